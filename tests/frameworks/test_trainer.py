"""Hugging Face Trainer saves, rotates and resumes; the run is the one that a local disk gives."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.checks import assert_mirrored, first_names
from tests.support.client import Client
from tests.support.mounts import MountFactory

pytestmark = [pytest.mark.frameworks, pytest.mark.frameworks_all, pytest.mark.timeout(300)]


def _train(folder: str, steps: int, resume: bool) -> list[str]:
    """Train a tiny model with random weights; a digest of its weights and what was logged."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(1)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes))
    ids = torch.randint(64, (48, 16), generator=torch.Generator().manual_seed(2))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=5,
        save_total_limit=2,
        logging_steps=5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    whole = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole.update(tensor.numpy().tobytes())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [whole.hexdigest(), *map(str, losses)]


def test_trainer(mounted: MountFactory, bucket: Any, frameworks: Client, disk_dir: Path) -> None:
    """Fifteen steps, then the machine is gone; another one resumes from the bucket alone."""
    expected = frameworks.run(_train, disk_dir, 30, False, timeout=100)
    mount = mounted(bucket)
    frameworks.run(_train, mount.path / "run", 15, False, timeout=100)
    assert_mirrored(mount, bucket, frameworks)
    assert {"checkpoint-10", "checkpoint-15"} < set(first_names(bucket.below("run")))
    assert mount.unmount() == 0
    other = mounted(bucket)
    assert frameworks.run(_train, other.path / "run", 30, True, timeout=100) == expected
    assert_mirrored(other, bucket, frameworks)
    kept = [name for name in first_names(bucket.below("run")) if name.startswith("checkpoint-")]
    assert kept == ["checkpoint-25", "checkpoint-30"]


def test_sharded_model(mounted: MountFactory, bucket: Any, frameworks: Client) -> None:
    """save_pretrained in shards with an index, over an older one; from_pretrained elsewhere."""

    def save(folder: str) -> list[str]:
        from transformers import GPT2Config, GPT2LMHeadModel, set_seed

        for seed, shard in ((1, "100KB"), (2, "200KB")):
            set_seed(seed)
            model = GPT2LMHeadModel(
                GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=2)
            )
            model.save_pretrained(folder, max_shard_size=shard)
        return digests(model)

    def load(folder: str) -> list[str]:
        from transformers import GPT2LMHeadModel

        return digests(GPT2LMHeadModel.from_pretrained(folder))

    def digests(model: Any) -> list[str]:
        weights = model.state_dict().items()
        return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for _, tensor in weights]

    mount = mounted(bucket)
    saved = frameworks.run(save, mount.path / "model", helpers=[digests], timeout=100)
    assert_mirrored(mount, bucket, frameworks)
    assert "model.safetensors.index.json" in first_names(bucket.below("model"))
    assert mount.unmount() == 0
    cold = mounted(bucket)
    assert frameworks.run(load, cold.path / "model", helpers=[digests], timeout=100) == saved
