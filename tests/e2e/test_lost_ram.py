"""A cache device in RAM that is lost while the mount goes on: what is anywhere else goes on too."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import Mount, MountFactory, poll

MIB = 1 << 20
NEVER = {"flush.settle": "100s", "flush.settle_max": "100s"}
LOST = ("has failed", "not tended", "could not be recorded")


@pytest.fixture
def dirs(tmp_path: Path, after_mounts: ExitStack, disk_dir: Path) -> list[Path]:
    """One in a RAM disk of its own, and one on a disk."""
    place = tmp_path / "ram"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256M", "none", place], check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", place], capture_output=True))
    return [place / "cache", disk_dir / "cache"]


def lose(mount: Mount, how: str) -> None:
    if how == "emptied":
        shutil.rmtree(mount.cache_dirs[0])
    else:
        subprocess.run(["umount", "-l", mount.cache_dirs[0].parent], check=True)
    poll(lambda: mount.status()["cache"]["devices"][0]["healthy"] is False, 10)
    mount.spoiled = True


@pytest.mark.parametrize("how", ["emptied", "unmounted"])
def test_nothing_is_lost_that_is_on_the_disk_or_open(
    mounted: MountFactory, bucket: Any, dirs: list[Path], how: str
) -> None:
    mount = mounted(bucket, cache_dirs=dirs, options=NEVER, allow=LOST)
    bodies = {name: os.urandom(MIB + n) for n, name in enumerate(("a", "b", "c", "d"))}
    for name in ("a", "b"):
        (mount.path / name).write_bytes(bodies[name])
    # An open file is not moved to the disk: that has a copy of it.
    first = os.open(mount.path / "a", os.O_RDONLY)
    mount.wait(survives="reboot", timeout=20)
    assert mount.xattr("survives", "a") == "reboot"
    synced = os.open(mount.path / "c", os.O_RDWR | os.O_CREAT)
    os.write(synced, bodies["c"])
    os.fsync(synced)
    fresh = os.open(mount.path / "d", os.O_RDWR | os.O_CREAT)
    os.write(fresh, bodies["d"])
    second = os.open(mount.path / "b", os.O_RDONLY)
    lose(mount, how)
    assert os.pread(first, 2 * MIB, 0) == bodies["a"]
    os.close(first)
    os.close(second)
    for name, fd in (("c", synced), ("d", fresh)):
        os.pwrite(fd, b"later", 1000)
        bodies[name] = bodies[name][:1000] + b"later" + bodies[name][1005:]
    os.fsync(synced)
    os.close(synced)
    os.close(fresh)
    for name, body in bodies.items():
        assert (mount.path / name).read_bytes() == body, name
    mount.wait()
    for name, body in bodies.items():
        assert bucket.get(name) == body, name
        assert (mount.path / name).read_bytes() == body, name
    assert mount.status()["errors"] == []
