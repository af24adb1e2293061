"""safetensors saved under a temporary name, synced and renamed over the file before."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.frameworks.checks import assert_mirrored
from tests.support.client import Client
from tests.support.mounts import MountFactory, poll

pytestmark = [pytest.mark.frameworks, pytest.mark.frameworks_all, pytest.mark.timeout(200)]


def _save(folder: str, rounds: int) -> None:
    """Every tensor of a file has the number of its round."""
    import numpy
    from safetensors.numpy import save_file

    target = f"{folder}/model.safetensors"
    for number in range(rounds):
        tensors = {f"layer.{n}": numpy.full((200, 500), number, "float32") for n in range(4)}
        save_file(tensors, target + ".tmp")
        descriptor = os.open(target + ".tmp", os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        os.replace(target + ".tmp", target)
        time.sleep(0.15)


def _round_of(body: bytes) -> int:
    """The round that a complete file is of; fails for a torn one."""
    from safetensors.numpy import load

    tensors = load(body)
    (number,) = {float(value) for tensor in tensors.values() for value in tensor.flat}
    assert len(tensors) == 4
    return int(number)


def test_renamed_over_the_last(mounted: MountFactory, bucket: Any, frameworks: Client) -> None:
    """A reader of the bucket sees whole files only, ever newer, and never a temporary name."""
    mount = mounted(bucket)
    run = frameworks.start(_save, mount.path, 30)
    seen: list[int] = []

    def look() -> bool:
        keys = bucket.keys()
        assert set(keys) <= {"model.safetensors"}
        if keys:
            seen.append(_round_of(bucket.get("model.safetensors")))
        return run.process.poll() is not None

    poll(look, 100, step=0.05, what="the end of the run")
    run.result()
    assert seen == sorted(seen)
    assert len(set(seen)) > 1
    assert_mirrored(mount, bucket, frameworks)
    assert _round_of(bucket.get("model.safetensors")) == 29
