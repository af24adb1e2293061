"""The disk under the cache is full: nothing that was acknowledged is lost or called durable."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Failed, Mount, MountFactory, poll

SIZE = 200 << 20


@pytest.fixture
def small_disk(tmp_path: Path, after_mounts: ExitStack) -> Path:
    """A filesystem of 200 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", place], check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", place], check=True))
    return place


def fill(disk: Path, name: str = "others") -> None:
    """Others take what is left of it."""
    status = os.statvfs(disk)
    with open(disk / name, "wb") as file:
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


def read_all(path: str) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_if_it_opens(path: str) -> str | int:
    """The same, or why it cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        return error.errno or 0
    with open(fd, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_warmed(mount: Mount, path: Path) -> bool:
    """False: there is no room for it, as far as was seen yet."""
    with suppress(Failed):
        mount.ask("warm", {"paths": [str(path)]})
        return True
    return False


def test_restoring_to_a_full_disk(
    mounted: MountFactory, dir_store: Any, small_disk: Path, client: Client
) -> None:
    """What can be opened is read all the same, and not kept; where not even an empty file can be
    made whoever opens it is told, and so is `warm`. The same daemon restores it all later."""
    shards = [f"checkpoint-1/model-{n}.safetensors" for n in range(3)]
    (dir_store.path / "checkpoint-1").mkdir()
    for shard in shards:
        (dir_store.path / shard).write_bytes(os.urandom(24 << 20))
    mount = mounted(
        dir_store,
        cache_dirs=[small_disk / "cache"],
        options={"cache.size": "2GiB", "cache.meta_reserve": "1MiB"},
        allow=("disk is full", "wait to be recorded", "No space", "begun anew"),
    )
    pid = mount.daemon_pid
    list(mount.path.rglob("*"))
    for number, shard in enumerate(shards):
        with suppress(OSError):  # Nothing is left: not even what the database had for itself.
            fill(small_disk, f"others-{number}")
        expected = hashlib.sha256(dir_store.get(shard)).hexdigest()
        assert client.run(read_if_it_opens, mount.path / shard) in (expected, errno.ENOSPC)
    assert mount.metric("cachefs_unkept_bytes_total") > 0
    with pytest.raises(Failed) as failed:
        mount.ask("warm", {"paths": [str(mount.path / "checkpoint-1")]})
    assert failed.value.exit_code == 1
    assert "room" in failed.value.message or "space" in failed.value.message
    for number in range(len(shards)):
        (small_disk / f"others-{number}").unlink()
    unkept = mount.metric("cachefs_unkept_bytes_total")
    poll(lambda: is_warmed(mount, mount.path / "checkpoint-1"), 20)
    for shard in shards:
        expected = hashlib.sha256(dir_store.get(shard)).hexdigest()
        assert client.run(read_all, mount.path / shard) == expected
    assert mount.metric("cachefs_unkept_bytes_total") == unkept
    mount.reread()
    assert mount.daemon_pid == pid
