"""What a killed daemon leaves in memory is there for the next one, and goes with its cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cachefs.observe.runfiles import memory_dirs
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane


def _left_by(mount: Mount) -> list[Path]:
    """What a mount's daemon that was killed has in memory."""
    (name,) = ((cache / "device").read_text().strip() for cache in mount.cache_dirs)
    (note,) = (path for place in memory_dirs() for path in place.glob(f"{name}.cache"))
    text = note.read_text()
    return [note, *(path for path in note.parent.iterdir() if path.name in text)]


def test_memory_of_a_cache_that_is_gone_is_freed(
    mounted: MountFactory, bucket: Any, dir_store: Any
) -> None:
    """Not that of one that was only moved, which is told of."""
    mount = mounted(bucket, cache="disk")
    (mount.path / "f").write_bytes(b"acknowledged")
    mount.crash()
    left = _left_by(mount)
    assert {path.suffix for path in left} >= {".cache", ".ring", ".index"}
    (cache,) = mount.cache_dirs
    moved = cache.rename(cache.with_name(f"{cache.name}-moved"))
    try:
        other = mounted(dir_store)
        told = " ".join(other.cli("status").stdout.split())
        assert f"the cache {cache}, which is not there" in told
        assert all(map(os.path.exists, left))
    finally:
        shutil.rmtree(moved)
    other.remount()
    poll(lambda: not any(map(os.path.exists, left)), what="the next daemon frees it")
    assert str(cache) not in other.cli("status").stdout


def test_nothing_stays_of_a_cache_that_goes_on(mounted: MountFactory, bucket: Any) -> None:
    """The next daemon uses what was left, and takes it along when it ends in order."""
    mount = mounted(bucket, cache="disk")
    (mount.path / "f").write_bytes(b"acknowledged")
    mount.crash()
    before = _left_by(mount)
    mount.start()
    assert (mount.path / "f").read_bytes() == b"acknowledged"
    during = _left_by(mount)
    assert mount.unmount() == 0
    mount.wait_gone()
    assert not any(map(os.path.exists, {*before, *during}))
