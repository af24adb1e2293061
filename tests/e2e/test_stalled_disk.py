"""The disk under the cache takes nothing for a while, as when a snapshot of it is made."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_readonly_disk import Ext4
from tests.support.actor import pattern
from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

OPTIONS = {"cache.size": "64MiB", "cache.meta_reserve": "1MiB"}
AT_REST = 2.0
SPARE_TIME = 2.5
"""Seconds after which a quiet mount has put away what it had kept ready."""


@pytest.fixture
def disk(tmp_path: Path, after_mounts: ExitStack) -> Ext4:
    made = Ext4(tmp_path)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", made.top], check=True))
    return made


@contextmanager
def frozen(disk: Ext4) -> Iterator[None]:
    subprocess.run(["fsfreeze", "--freeze", disk.top], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk.top], check=True)


def at_rest(mount: Mount) -> bool:
    """Whether nothing has been recorded for a while: what was going on is over."""
    changed = max(each.stat().st_mtime for each in (mount.cache_dirs[0] / "meta").iterdir())
    return time.time() - changed > AT_REST


def _look(top: str) -> list[Any]:
    with open(f"{top}/f0", "rb") as file:
        return [os.stat(f"{top}/f1").st_size, sorted(os.listdir(top)), file.read()]


def test_looking_goes_on(mounted: MountFactory, dir_store: Any, disk: Ext4, client: Client) -> None:
    """Names, sizes, bytes that are in memory, and status; a writer holds nobody up."""
    mount = mounted(dir_store, cache_dirs=[disk.top / "cache"], options=OPTIONS)
    names = sorted(f"f{number}" for number in range(20))
    for name in names:
        (mount.path / name).write_bytes(b"x" * 5000)
    mount.wait()
    names.append("written")
    actor = client.actor(mount.path)
    actor("open", 0, "written", "WRONLY|CREAT")
    actor("write", 0, 1, 100_000)
    poll(lambda: at_rest(mount))
    with frozen(disk):
        actor.send("write", 0, 2, 100_000)
        time.sleep(SPARE_TIME)
        for _ in range(2):
            assert client.run(_look, mount.path, timeout=10) == [5000, names, b"x" * 5000]
            assert mount.status()["dirty_files"] == 1
            time.sleep(0.5)
    assert actor.receive() == {"ok": 100_000}
    actor("close", 0)
    (mount.path / "late").write_bytes(b"after all")
    mount.wait()
    assert dir_store.get("written") == pattern(1, 100_000) + pattern(2, 100_000)
    assert dir_store.get("late") == b"after all"
