"""The disk under the cache is full: nothing that was acknowledged is lost or called durable."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import MountFactory

SIZE = 200 << 20


@pytest.fixture
def small_disk(tmp_path: Path, after_mounts: ExitStack) -> Path:
    """A filesystem of 200 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", place], check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", place], check=True))
    return place


def fill(disk: Path) -> None:
    """Others take what is left of it."""
    status = os.statvfs(disk)
    with open(disk / "others", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)


def test_full_disk(mounted: MountFactory, dir_store: Any, small_disk: Path) -> None:
    """A writer meets ENOSPC and closes: what it wrote is counted, waited for and published."""
    mount = mounted(
        dir_store,
        cache_dirs=[small_disk / "cache"],
        options={"cache.size": "2GiB", "cache.full": "enospc", "flush.settle": "200ms"},
        allow=("could not be recorded", "disk is full", "wait to be recorded", "stalled", "failed"),
    )
    written = 0
    fd = os.open(mount.path / "w.bin", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError) as caught:
        while written < 2 * SIZE:
            if written == SIZE // 4:
                fill(small_disk)
            written += os.write(fd, os.urandom(1 << 20))
    assert caught.value.errno == errno.ENOSPC
    os.close(fd)
    size = os.stat(mount.path / "w.bin").st_size
    assert size >= written
    mount.wait(timeout=60)
    body = (mount.path / "w.bin").read_bytes()
    assert len(body) == size
    assert dir_store.get("w.bin") == body
    assert mount.status()["dirty_files"] == 0
