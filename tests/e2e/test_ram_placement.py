"""Files that RAM has no room for, while the disk has: no save fails, in whatever lane."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_levels_of_loss import kind_of
from tests.lanes.place import require_passthrough
from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory

MIB = 1 << 20
RAM = 64


@pytest.fixture
def dirs(tmp_path: Path, after_mounts: ExitStack, disk_dir: Path) -> list[Path]:
    """The first one in a RAM disk of 64 MiB."""
    place = tmp_path / "ram"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={RAM}M", "none", place], check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", place], check=True))
    return [place / "cache", disk_dir / "cache"]


def write(path: str, mib: int, seed: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for number in range(mib):
        assert os.write(fd, bytes([(number + seed) % 251]) * (1 << 20)) == 1 << 20
    os.close(fd)


def is_whole(path: Path, mib: int, seed: int) -> bool:
    with path.open("rb") as file:
        return all(file.read(MIB) == bytes([(n + seed) % 251]) * MIB for n in range(mib))


def opened(mount: Mount, path: str, size: int = 12_345) -> tuple[str, str]:
    """(lane, kind of its device) of a new file with a little in it."""
    with open(mount.path / path, "wb", buffering=0) as file:
        file.write(bytes(size))
        return mount.xattr("lane", path), kind_of(mount, path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["passthrough"])
def test_no_save_fails_for_lack_of_ram(
    mounted: MountFactory, bucket: Any, dirs: list[Path], client: Client
) -> None:
    """A directory of a checkpoint is a new one each time. Of the first nothing is known: a shard
    begins in RAM, and goes on on the disk; those after it know, and begin there."""
    options = {"cache.size": "1GiB", "flush.settle": "100s", "flush.settle_max": "100s"}
    mount = mounted(bucket, cache_dirs=dirs, options=options)
    require_passthrough(mount)
    for step in (1, 2):
        (mount.path / f"run/step-{step}").mkdir(parents=True)
        shards = [mount.path / f"run/step-{step}/{n}.bin" for n in range(2)]
        writers = [client.start(write, path, RAM + 20, n) for n, path in enumerate(shards)]
        for each in writers:
            each.result(60)
        for seed, path in enumerate(shards):
            assert is_whole(path, RAM + 20, seed)
            if step == 1:
                os.unlink(path)
    (mount.path / "run/step-3").mkdir()
    assert opened(mount, "run/step-3/0.bin") == ("passthrough", "disk")
    for step in (1, 2):
        (mount.path / f"small/step-{step}").mkdir(parents=True)
    assert opened(mount, "small/step-1/0.bin") == ("tracked", "ram"), "nobody knows it"
    assert opened(mount, "small/step-2/0.bin") == ("passthrough", "ram"), "as small as the others"
    mount.remount()
    for run, where, size in (("small", "ram", 23_456), ("run", "disk", 34_567)):
        (mount.path / run / "step-4").mkdir()
        told = opened(mount, f"{run}/step-4/0.bin", size)
        assert told == ("passthrough", where), "what was learned is known after a restart"
