"""O_DIRECT through the mount is direct I/O on the cache's disk: the disk's own counters show it."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.place import Watch
from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory

MIB = 1 << 20
SIZE = 16 * MIB


@pytest.fixture
def disk(tmp_path: Path, after_mounts: ExitStack) -> Path:
    """An ext4 on a block device of its own."""
    image, top = tmp_path / "disk.img", tmp_path / "disk"
    top.mkdir()
    with open(image, "wb") as file:
        file.truncate(256 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, top], check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", top], check=True))
    return top


def statistics(top: Path) -> str:
    """Where the kernel tells what the disk under a directory has done."""
    source = subprocess.check_output(["findmnt", "-no", "SOURCE", top], text=True).strip()
    return f"/sys/block/{os.path.basename(source)}/stat"


def bytes_read(stat: str) -> int:
    return int(Path(stat).read_text().split()[2]) * 512


def is_in_page_cache(mount: Mount, size: int) -> bool:
    """Whether the kernel holds any page of the cache file of that size."""
    files = (mount.cache_dirs[0] / "files").glob("*/*")
    (path,) = [each for each in files if each.stat().st_size == size]
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(0, size, MIB):
            os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
        return True
    except OSError as error:
        assert error.errno == errno.EAGAIN
        return False
    finally:
        os.close(fd)


def write_directly(path: str, size: int, stat: str) -> int:
    """Returns the bytes that the disk wrote until the last write returned, before the file was
    closed."""
    import mmap

    block = mmap.mmap(-1, 1 << 20)
    block.write(b"d" * (1 << 20))
    with open(stat) as counters:
        before = int(counters.read().split()[6]) * 512
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for at in range(0, size, 1 << 20):
        assert os.pwritev(fd, [block], at) == 1 << 20
    with open(stat) as counters:
        after = int(counters.read().split()[6]) * 512
    os.close(fd)
    return after - before


def read_directly(path: str, size: int) -> bool:
    import mmap

    block = mmap.mmap(-1, 1 << 20)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    same = all(
        os.preadv(fd, [block], at) == 1 << 20 and block[:] == b"d" * (1 << 20)
        for at in range(0, size, 1 << 20)
    )
    os.close(fd)
    return same


@pytest.mark.parametrize("lane", ["passthrough"])
def test_aligned_writes_and_reads_reach_the_disk(
    mounted: MountFactory, dir_store: Any, disk: Path, client: Client
) -> None:
    """At once, without a request to the daemon and without a page of memory in between."""
    options = {"cache.size": "128MiB", "cache.meta_reserve": "1MiB", "flush.settle": "10s"}
    mount = mounted(dir_store, cache_dirs=[disk / "cache"], options=options)
    subprocess.run(["sync", "-f", disk], check=True)
    watch, stat = Watch(mount), statistics(disk)
    written = client.run(write_directly, mount.path / "f", SIZE, stat)
    assert SIZE <= written < 2 * SIZE
    assert not is_in_page_cache(mount, SIZE)
    before = bytes_read(stat)
    assert client.run(read_directly, mount.path / "f", SIZE)
    assert SIZE <= bytes_read(stat) - before < 2 * SIZE
    assert not is_in_page_cache(mount, SIZE)
    assert watch.data() == {}
    assert mount.xattr("lane", "f") == "passthrough"
    (mount.path / "buffered").write_bytes(bytes(SIZE + 1))
    assert is_in_page_cache(mount, SIZE + 1), "which would have been seen"
    mount.wait()
