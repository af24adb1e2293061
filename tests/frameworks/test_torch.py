"""PyTorch and safetensors save through the mount and load what they saved: equal tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.frameworks.conftest import installed
from tests.support.client import Client
from tests.support.mounts import MountFactory

pytestmark = [pytest.mark.frameworks, pytest.mark.either_lane, pytest.mark.timeout(120)]


def _state(seed: int) -> Any:
    """A state dict of a few megabytes with several dtypes, shapes and a non-contiguous tensor."""
    import torch

    torch.manual_seed(seed)
    return {
        "model.weight": torch.randn(512, 700),
        "model.bias": torch.randn(700, dtype=torch.float64),
        "half": torch.randn(1000, 300).to(torch.bfloat16),
        "ids": torch.randint(0, 1 << 30, (1000,)),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def _same(left: Any, right: Any) -> bool:
    import torch

    return set(left) == set(right) and all(torch.equal(left[k], right[k]) for k in left)


HELPERS: list[Callable[..., Any]] = [_state, _same]


def _torch_round_trip(path: str, legacy: bool) -> list[bool]:
    import torch

    state = _state(1)
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    plain = torch.load(path, weights_only=True)
    kinds = [_same(state, plain)]
    if not legacy:
        kinds.append(_same(state, torch.load(path, weights_only=True, mmap=True)))
    return kinds


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_torch_save(mounted: MountFactory, bucket: Any, framework: Client, legacy: bool) -> None:
    """torch.save / torch.load, also with mmap=True while dirty; again from an empty cache."""
    mount = mounted(bucket)
    path = mount.path / "model.pt"
    assert all(framework.run(_torch_round_trip, path, legacy, helpers=HELPERS, timeout=100))
    mount.wait()
    assert bucket.get("model.pt") == path.read_bytes()
    assert mount.unmount() == 0
    cold = mounted(bucket)

    def load(path: str) -> bool:
        import torch

        return _same(_state(1), torch.load(path, weights_only=True))

    assert framework.run(load, cold.path / "model.pt", helpers=HELPERS, timeout=100)


def test_torch_save_over_existing(mounted: MountFactory, bucket: Any, framework: Client) -> None:
    """The same path saved again and again, loaded each time."""
    mount = mounted(bucket, options={"flush.settle": "5ms"})

    def saves(path: str) -> bool:
        import torch

        for seed in range(5):
            torch.save(_state(seed), path)
            if not _same(_state(seed), torch.load(path, weights_only=True)):
                return False
        return True

    assert framework.run(saves, mount.path / "last.ckpt", helpers=HELPERS, timeout=100)
    mount.wait()
    assert bucket.get("last.ckpt") == (mount.path / "last.ckpt").read_bytes()


def test_safetensors(mounted: MountFactory, bucket: Any, framework: Client) -> None:
    """save_file / load_file / safe_open (which maps the file) while dirty, and cold."""
    if not installed("safetensors.torch"):
        pytest.skip("safetensors is not installed")
    mount = mounted(bucket)

    def play(folder: str) -> list[bool]:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        state, path = _state(2), f"{folder}/model.safetensors"
        save_file(state, path)
        answers = [_same(state, load_file(path))]
        with safe_open(path, framework="pt") as opened:
            answers.append(_same(state, {k: opened.get_tensor(k) for k in opened.keys()}))  # noqa: SIM118
        temp = path + ".tmp"
        save_file(state, temp)
        os.rename(temp, path)
        answers.append(_same(state, load_file(path)))
        return answers

    assert all(framework.run(play, mount.path, helpers=HELPERS, timeout=100))
    mount.wait()
    assert bucket.keys() == ["model.safetensors"]
    assert mount.unmount() == 0
    cold = mounted(bucket)

    def load(path: str) -> bool:
        from safetensors.torch import load_file

        return _same(_state(2), load_file(path))

    assert framework.run(load, cold.path / "model.safetensors", helpers=HELPERS, timeout=100)


def _dcp(folder: str, asynchronous: bool) -> bool:
    """One process saves and loads with torch.distributed.checkpoint."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = _state(3)
    try:
        if asynchronous:
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder)
        loaded = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(loaded, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()
    return _same(state, loaded)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_distributed_checkpoint(
    mounted: MountFactory, bucket: Any, framework: Client, asynchronous: bool
) -> None:
    """DCP: .distcp files and .metadata; the marker is in the bucket, and the tensors are equal."""
    mount = mounted(bucket)
    folder = mount.path / "step_100"
    assert framework.run(_dcp, folder, asynchronous, helpers=HELPERS, timeout=100)
    mount.wait()
    assert "step_100/.metadata" in bucket.keys()  # noqa: SIM118
    assert any(key.endswith(".distcp") for key in bucket.keys())  # noqa: SIM118
    assert mount.unmount() == 0
    cold = mounted(bucket)

    def load(folder: str) -> bool:
        import torch
        import torch.distributed.checkpoint as dcp

        expected = _state(3)
        loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        return _same(expected, loaded)

    assert framework.run(load, cold.path / "step_100", helpers=HELPERS, timeout=100)
