"""Lightning's ModelCheckpoint with save_last="link" on the mount, and a resumed run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.checks import assert_mirrored
from tests.support.client import Client
from tests.support.mounts import MountFactory

pytestmark = [pytest.mark.frameworks, pytest.mark.frameworks_all, pytest.mark.timeout(300)]


def _train(folder: str, epochs: int, resume: bool) -> str:
    """Train a tiny model for some epochs of four steps; a digest of its weights."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger

    lightning.seed_everything(1)
    keep = ModelCheckpoint(
        dirpath=f"{folder}/checkpoints",
        filename="{epoch}-{step}",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last="link",
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        limit_train_batches=4,
        limit_val_batches=0,
        accelerator="cpu",
        callbacks=[keep],
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    trainer.fit(model, ckpt_path=f"{folder}/checkpoints/last.ckpt" if resume else None)
    weights: list[bytes] = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def test_model_checkpoint(
    mounted: MountFactory, bucket: Any, frameworks: Client, disk_dir: Path
) -> None:
    """`last.ckpt` is a link, here and in the bucket; another machine resumes through it."""
    expected = frameworks.run(_train, disk_dir, 6, False, timeout=100)
    mount = mounted(bucket)
    frameworks.run(_train, mount.path / "run", 3, False, timeout=100)
    assert_mirrored(mount, bucket, frameworks)
    assert mount.unmount() == 0
    other = mounted(bucket, start=False)
    other.path = mount.path  # Lightning forgets its best checkpoints when they have moved
    other.start()
    folder = other.path / "run/checkpoints"
    assert os.readlink(folder / "last.ckpt") == "epoch=2-step=12.ckpt"
    assert frameworks.run(_train, other.path / "run", 6, True, timeout=100) == expected
    assert_mirrored(other, bucket, frameworks)
    names = ["epoch=4-step=20.ckpt", "epoch=5-step=24.ckpt", "last.ckpt"]
    assert bucket.below("run/checkpoints").keys() == names
    assert bucket.get("run/checkpoints/last.ckpt") == b"epoch=5-step=24.ckpt"
