"""Places to put cache devices: RAM and disk, and a filesystem small enough to fill."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.cache.filler import Fill
from cachefs.model.extents import ExtentSet
from tests.cache.objects import CHUNK, Store
from tests.support import scratch

SMALL = 8 << 20
"""Bytes of the small filesystem."""


@pytest.fixture(params=["/dev/shm", "/var/tmp"], ids=["ram", "disk"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory, in RAM and on disk."""
    with scratch.directory(request.param) as path:
        yield path


@pytest.fixture
def device(place: Path) -> Iterator[CacheDevice]:
    """A cache device in `place`."""
    made = CacheDevice(0, place / "cache")
    yield made
    made.close()


@pytest.fixture
def small_fs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small filesystem")
    where = tmp_path / "small"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(where)], check=True)
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def small_device(small_fs: Path) -> Iterator[CacheDevice]:
    """A cache device that is easily filled."""
    made = CacheDevice(0, small_fs / "cache")
    yield made
    made.close()


@pytest.fixture
def store() -> Store:
    return Store(random.Random(1).randbytes(20 * CHUNK + 123))


@pytest.fixture
def fill(place: Path, store: Store) -> Fill:
    path = place / "file"
    path.touch()
    return Fill(str(path), "key", "v1", len(store.content), ExtentSet())
