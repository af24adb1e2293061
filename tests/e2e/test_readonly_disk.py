"""The filesystem under the cache turns read-only, as ext4 does when it finds itself damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cachefs.cache import leftovers
from cachefs.observe.runfiles import memory_dirs
from tests.e2e.test_failing_disk import EXPECTED, TOLD
from tests.support.client import program
from tests.support.mounts import MountFactory

REFUSED = r"Read-only file system|Input/output error"

pytestmark = pytest.mark.either_lane


class Ext4:
    """A small ext4 on a loop device, which goes read-only at its first error."""

    def __init__(self, folder: Path, size: int = 128 << 20) -> None:
        self.image, self.top = folder / "disk.img", folder / "disk"
        self.top.mkdir()
        with open(self.image, "wb") as image:
            image.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)
        self.attach()

    def attach(self) -> None:
        options = "loop,errors=remount-ro"
        subprocess.run(["mount", "-o", options, self.image, self.top], check=True)

    def fail(self) -> None:
        """The kernel reports an error of the filesystem, and does what it does about one."""
        source = subprocess.check_output(["findmnt", "-no", "SOURCE", self.top], text=True)
        device = os.path.basename(source.strip())
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test")

    def repair(self) -> None:
        subprocess.run(["umount", self.top], check=True)
        done = subprocess.run(["e2fsck", "-fy", self.image], stdout=subprocess.DEVNULL)
        assert done.returncode in (0, 1)
        self.attach()


@pytest.fixture
def disk(tmp_path: Path, after_mounts: ExitStack) -> Ext4:
    made = Ext4(tmp_path)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", made.top], check=True))
    after_mounts.callback(_forget_cache, made.top / "cache")
    return made


def _forget_cache(cache: Path) -> None:
    """With what did not fit the repaired disk any more."""
    shutil.rmtree(cache)
    leftovers.sweep(memory_dirs())


def test_remounted_read_only(mounted: MountFactory, dir_store: Any, disk: Ext4) -> None:
    """Writers are told; what is there can be read; once the disk is repaired all of it goes out."""
    mount = mounted(
        dir_store,
        cache_dirs=[disk.top / "cache"],
        options={"cache.size": "64MiB", "cache.meta_reserve": "1MiB", "flush.settle": "1h",
                 "flush.settle_max": "1h", **TOLD},
        allow=(EXPECTED,),
    )  # fmt: skip
    body = os.urandom(300_000)
    (mount.path / "synced").write_bytes(body)
    program("sync", mount.path / "synced", mount.path)  # the close of it as well
    disk.fail()
    with pytest.raises(OSError, match=REFUSED):
        (mount.path / "late").write_bytes(b"x" * 100_000)
    with pytest.raises(OSError, match=REFUSED):
        os.mkdir(mount.path / "directory")
    assert (mount.path / "synced").read_bytes() == body
    assert mount.status()["dirty_files"] >= 1
    mount.unmount(drain_timeout=0)
    mount.wait_gone()
    disk.repair()
    mount.start()
    assert (mount.path / "synced").read_bytes() == body
    mount.cli("flush", mount.path)
    mount.wait()
    assert dir_store.get("synced") == body
    (mount.path / "after").write_bytes(body)
    assert (mount.path / "after").read_bytes() == body
