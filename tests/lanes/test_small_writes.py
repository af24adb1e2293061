"""Bytes written to new files and read from cached ones without a word of Python: nothing else may
tell.

Every program runs on the mount and in a local directory, and the answers must be the same.
"""

from __future__ import annotations

import os
import stat
import urllib.request
from typing import Any

import pytest

from tests.lanes.place import Place
from tests.lanes.test_kernel import Both
from tests.support.mounts import Mount, MountFactory

BUDGET = 64 << 10
tracked = pytest.mark.parametrize("lane", ["tracked"], indirect=True)


def metric(mount: Mount, name: str) -> int:
    address = mount.status()["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    wanted = f"{name} "
    return int(next((float(x[len(wanted) :]) for x in lines if x.startswith(wanted)), 0.0))


def handled(mount: Mount, op: str) -> int:
    """Requests that a handler saw."""
    return metric(mount, f'cachefs_fuse_request_seconds_count{{op="{op}"}}')


def read_bytes(mount: Mount) -> int:
    """Bytes that programs were given, with or without a handler."""
    return metric(mount, "cachefs_read_bytes_total")


@pytest.fixture
def both(place: Place) -> Both:
    return Both(place)


@tracked
def test_small_files_cost_no_handler(place: Place) -> None:
    """The kernel sent the writes, no handler saw them, and the bytes are in file and store."""
    before, watch = handled(place.mount, "write"), place.watch()
    for number in range(20):
        (place / f"f{number}").write_bytes(bytes([number]) * 4096)
    assert watch.seen()["WRITE"] == 20
    assert handled(place.mount, "write") == before
    place.durable()
    for number in range(20):
        assert place.store.get(f"f{number}") == bytes([number]) * 4096


@tracked
def test_a_large_file_costs_few_handlers(place: Place) -> None:
    """Each time that a handler is asked it lets more go by, and all of it is counted."""
    before, watch = handled(place.mount, "write"), place.watch()
    with open(place / "f.bin", "wb", buffering=0) as file:
        file.writelines(bytes([number]) * (1 << 20) for number in range(64))
        assert place.mount.status()["cache"]["used_bytes"] >= 32 << 20
    assert watch.seen()["WRITE"] >= 64
    assert handled(place.mount, "write") - before <= 10
    place.durable()
    assert place.store.get("f.bin") == b"".join(bytes([n]) * (1 << 20) for n in range(64))


@tracked
def test_reading_what_is_cached_costs_no_handler(place: Place) -> None:
    data = os.urandom(3 << 20)
    (place / "f").write_bytes(data)
    place.durable()
    before, watch = handled(place.mount, "read"), place.watch()
    fd = os.open(place / "f", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.read(fd, 4 << 20) == data
    assert os.pread(fd, 100, len(data) - 40) == data[-40:]
    assert watch.seen()["READ"] >= 3
    assert handled(place.mount, "read") == before
    with open(place / "f", "r+b") as file:  # another generation, under the open descriptor
        file.seek(1 << 20)
        file.write(b"changed")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert (
        os.pread(fd, 20, (1 << 20) - 5)
        == data[(1 << 20) - 5 : 1 << 20] + b"changed" + (data[(1 << 20) + 7 : (1 << 20) + 15])
    )
    os.truncate(place / "f", 10)
    assert os.pread(fd, 20, 0) == data[:10]
    os.close(fd)


@tracked
def test_reading_what_has_arrived_costs_few_handlers(place: Place) -> None:
    """Of a file that is being fetched a handler sees the beginning of each piece alone: it has to
    fetch ahead."""
    data = os.urandom(20 << 20)
    (place / "f").write_bytes(data)
    place.durable()
    assert place.mount.cli("evict", place / "f").returncode == 0
    before, watch = handled(place.mount, "read"), place.watch()
    counted = read_bytes(place.mount)
    fd = os.open(place / "f", os.O_RDONLY)
    for start in range(0, 16 << 20, 256 << 10):
        assert os.pread(fd, 256 << 10, start) == data[start : start + (256 << 10)]
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert handled(place.mount, "read") - before < watch.seen()["READ"] / 2
    assert os.pread(fd, 100, len(data) - 40) == data[-40:]
    with open(place / "f", "r+b") as file:  # another generation, under the open descriptor
        file.seek(1 << 20)
        file.write(b"changed")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(fd, 7, 1 << 20) == b"changed"
    os.truncate(place / "f", 10)
    assert os.pread(fd, 20, 0) == data[:10]
    os.close(fd)
    assert read_bytes(place.mount) - counted >= 16 << 20


def test_the_kernel_reads_far_ahead(place: Place) -> None:
    """In requests of 1 MiB: each costs the daemon about the same, whatever its size."""
    device = os.stat(place.mount.path).st_dev
    path = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    with open(path) as file:
        assert int(file.read()) == 1024


@tracked
def test_no_capabilities_are_asked_for(place: Place) -> None:
    watch = place.watch()
    (place / "f").write_bytes(b"x")
    assert watch.seen().get("GETXATTR", 0) <= 1
    with pytest.raises(OSError, match="No data"):
        os.getxattr(place / "f", "security.capability")


@tracked
@pytest.mark.parametrize("size", [1, 4095, 4096, 10_000, BUDGET - 1, BUDGET, BUDGET + 1])
def test_across_the_end_of_the_budget(both: Both, size: int) -> None:
    """In pieces that end before, at and behind it, then read back by another handle."""
    both("open", 0, "f", "RDWR|CREAT")
    written = 0
    while written < 3 * BUDGET:
        both.run([("write", 0, written % 251, size), ("fstat", 0), ("pread", 0, size, written)])
        written += size * (1 if size > 4000 else 97)
    both("open", 1, "f", "RDONLY", who=1)
    both.run([("pread", 0, 4096, 0), ("stat", "f")])
    both("pread", 1, 2 * BUDGET, 0, who=1)
    both("close", 1, who=1)
    both("close", 0)
    both.same("f")


@tracked
def test_holes_overwrites_and_truncation(both: Both) -> None:
    both("open", 0, "f", "RDWR|CREAT")
    both.run([("pwrite", 0, 1, 100, 50_000), ("fstat", 0), ("pread", 0, 200, 49_950)])
    both.run([("pwrite", 0, 2, 3000, 10), ("ftruncate", 0, 2000), ("fstat", 0)])
    both.run([("pwrite", 0, 3, 500, 1900), ("fstat", 0), ("truncate", "f", 100_000)])
    both.run([("pwrite", 0, 4, 70, 99_999), ("fstat", 0), ("pread", 0, 4096, 99_000)])
    both("open", 1, "f", "WRONLY|APPEND", who=1)
    both("write", 1, 5, 300, who=1)
    both.run([("fstat", 0), ("pwrite", 0, 6, 10, 0), ("close", 0)])
    both("close", 1, who=1)
    both.same("f")


@tracked
def test_a_later_set_user_id_is_cleared(place: Place) -> None:
    """The mode changes while the file is open; a write by another user must be asked for then."""
    place.path.chmod(0o777)
    actor = place.actor()
    actor("become", 12345, 12345, [])
    actor("open", 0, "f", "RDWR|CREAT", 0o777)
    actor("write", 0, 1, 10)
    os.chmod(place / "f", 0o6777)
    actor("write", 0, 2, 10)
    assert stat.S_IMODE(os.stat(place / "f").st_mode) == 0o777
    actor("close", 0)


@tracked
def test_synchronous_writers_are_asked_for(place: Place) -> None:
    before = handled(place.mount, "write")
    fd = os.open(place / "f", os.O_WRONLY | os.O_CREAT | os.O_DSYNC)
    os.write(fd, b"x")
    os.close(fd)
    assert handled(place.mount, "write") == before + 1


@tracked
def test_a_full_cache_promises_nothing(mounted: MountFactory, dir_store: Any) -> None:
    """Many files at once get no more than there is; what they do not use is given back."""
    mount = mounted(
        dir_store,
        options={"cache.size": "16MiB", "cache.meta_reserve": "1MiB"},
        allow=("full|room|space",),
    )
    descriptors = [
        os.open(mount.path / f"f{n}", os.O_WRONLY | os.O_CREAT) for n in range(600)
    ]  # fmt: skip
    for descriptor in descriptors:
        assert os.write(descriptor, b"x" * 100) == 100
    for descriptor in descriptors:
        os.close(descriptor)
    mount.wait()
    (mount.path / "last").write_bytes(bytes(4 << 20))
    mount.wait()
    assert dir_store.get("f599") == b"x" * 100
