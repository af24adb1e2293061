from __future__ import annotations

import pytest

from cachefs.model.checkpoints import (
    Checkpoint,
    checkpoint_root,
    find,
    is_marker,
    is_named_by,
    step_of,
)


@pytest.mark.parametrize(
    ("path", "root", "framework", "step"),
    [
        ("run/checkpoint-500", "run/checkpoint-500", "Hugging Face", 500),
        (
            "run/checkpoint-500/global_step500/mp_rank_00_model_states.pt",
            "run/checkpoint-500",
            "Hugging Face",
            500,
        ),
        ("ds/global_step20/x.pt", "ds/global_step20", "DeepSpeed", 20),
        ("m/iter_0000100/mp_rank_00/x.pt", "m/iter_0000100", "Megatron", 100),
        ("m/release/mp_rank_00/x.pt", "m/release", "Megatron", None),
        ("d/final/__3_0.distcp", "d/final", "PyTorch DCP", None),
        ("d/final/.metadata", "d/final", "PyTorch DCP", None),
        ("t/step-100/__0_0.distcp", "t/step-100", "torchtitan", 100),
        ("l/epoch=3-step=1000.ckpt", "l/epoch=3-step=1000.ckpt", "Lightning", 1000),
        ("l/last.ckpt/x.pt", "l/last.ckpt", "Lightning", None),
        (
            "n/m--val_loss=2.30-step=99-consumed_samples=800.0/weights/common.pt",
            "n/m--val_loss=2.30-step=99-consumed_samples=800.0",
            "NeMo",
            99,
        ),
        ("n/model.nemo", "n/model.nemo", "NeMo", None),
        ("o/1000/params/ocdbt.process_0/d/abc", "o/1000", "Orbax", 1000),
        ("o/1000/commit_success.txt", "o/1000", "Orbax", 1000),
        ("o/step_7/default/_METADATA", "o/step_7", "Orbax", 7),
        ("tf/ckpt-12.index", "tf/ckpt-12", "TensorFlow", 12),
        ("tf/ckpt-12.data-00000-of-00002", "tf/ckpt-12", "TensorFlow", 12),
        ("out/model-00001-of-00002.safetensors", "out", "Hugging Face", None),
        ("out/model.safetensors.index.json", "out", "Hugging Face", None),
        ("/run/checkpoint-5/", "run/checkpoint-5", "Hugging Face", 5),
    ],
)
def test_what_a_path_belongs_to(path: str, root: str, framework: str, step: int | None) -> None:
    assert find(path) == Checkpoint(root, framework, step)
    assert checkpoint_root(path) == root


@pytest.mark.parametrize(
    "path",
    [
        "",
        "latest",
        "run/config.json",
        "2024/notes.txt",
        "step-by-step/x",
        "tmp-checkpoint-500/x.bin",
        "o/1000.orbax-checkpoint-tmp-3/_METADATA",
        "__0_0.distcp",
    ],
)
def test_what_belongs_to_none(path: str) -> None:
    assert find(path) is None
    assert checkpoint_root(path) is None


def test_own_patterns() -> None:
    assert find("a/weights.v7/x", ["weights.v*"]) == Checkpoint("a/weights.v7", "", 7)
    assert find("a/b/c/x", ["b/*"]) == Checkpoint("a/b/c", "", None)
    assert find("run/checkpoint-5/x", ["weights.*"]) is None


def test_steps() -> None:
    assert step_of("a/epoch=2-step=30-v4") == 30
    assert step_of("x-3-epochs-12") == 12
    assert step_of("7/final") is None


def test_markers() -> None:
    for name in ("latest", ".metadata", "_SUCCESS", "x.index.json", "commit_success.txt"):
        assert is_marker(name)
    for name in ("model.bin", "config.json", "a/latest.d/x"):
        assert not is_marker(name)


@pytest.mark.parametrize(
    ("root", "pointer", "text"),
    [
        ("run/step-5", "run/latest", "step-5\n"),
        ("run/step-5", "run/latest", "step-5/"),
        ("run/step-5", "latest", "run/step-5"),
        ("run/step-5", "run/latest", "/mnt/elsewhere/run/step-5"),
        ("run/step-5", "run/latest", "../run/step-5"),
        ("m/iter_0000500", "m/latest_checkpointed_iteration.txt", "500"),
        ("t/ckpt-7", "t/checkpoint", 'model_checkpoint_path: "ckpt-7"\nall_model_check'),
    ],
)
def test_a_pointer_names_a_checkpoint(root: str, pointer: str, text: str) -> None:
    assert is_named_by(root, pointer, text)


@pytest.mark.parametrize(
    ("root", "pointer", "text"),
    [
        ("run/step-50", "run/latest", "step-5"),
        ("other/step-5", "run/latest", "step-5"),
        ("other/step-5", "run/latest", "5"),
        ("run/step-5", "run/latest", ""),
        ("run/step-5", "run/latest", "\xb2"),
        ("run/step-5", "run/latest", "release"),
    ],
)
def test_a_pointer_names_no_other(root: str, pointer: str, text: str) -> None:
    assert not is_named_by(root, pointer, text)
