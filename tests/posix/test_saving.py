"""How programs save a file: by a temporary sibling, in place, by appending, through mappings."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.actor import pattern
from tests.support.client import program
from tests.support.mounts import poll
from tests.support.work import Work


def _save_by_sibling(target: str, mode: int, body: bytes) -> int:
    """As editors and libraries do it: unnoticed until it is complete."""
    temp = target + ".tmp-1234"
    fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, len(body))
    for start in range(0, len(body), 65536):
        os.write(fd, body[start : start + 65536])
    os.close(fd)
    os.chmod(temp, mode)
    os.rename(temp, target)
    return os.stat(target).st_size


@pytest.mark.parametrize("existing", [False, True], ids=["new", "over existing"])
def test_sibling_temp_file(work: Work, existing: bool) -> None:
    """O_EXCL create, ftruncate, writes, chmod, rename: only the final name is ever published."""
    body = os.urandom(300_000)
    if existing:
        (work / "weights").write_bytes(b"old")
        work.durable()
    assert work.run(_save_by_sibling, work / "weights", 0o640, body) == len(body)
    work.durable()
    assert work.bucket.keys() == ["weights"]
    assert work.bucket.get("weights") == body
    assert work.bucket.attributes("weights").permissions == 0o640
    assert (work / "weights").read_bytes() == body
    assert os.listdir(work) == ["weights"]


def test_reading_a_mapping_of_a_dirty_file(work: Work) -> None:
    """mmap(MAP_SHARED, PROT_READ) of a file that was saved a moment ago."""
    body = os.urandom(1 << 20)
    (work / "shard").write_bytes(body)

    def read(path: str) -> bytes:
        import mmap

        fd = os.open(path, os.O_RDONLY)
        with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            return bytes(mapped)

    assert work.run(read, work / "shard") == body


def test_storing_through_a_mapping(work: Work) -> None:
    """MAP_SHARED stores, munmap, close, no msync: the bytes reach readers and the bucket."""
    (work / "index").write_bytes(bytes(100_000))
    work.durable()
    actor = work.actor()
    actor("open", 0, "index", "RDWR")
    assert actor("mmap_write", 0, 7, 5000, 50_000) == 5000
    actor("close", 0)
    expected = bytearray(100_000)
    expected[50_000:55_000] = pattern(7, 5000)
    assert (work / "index").read_bytes() == expected
    work.durable()
    assert work.bucket.get("index") == expected


def test_storing_through_a_mapping_after_close(work: Work) -> None:
    """A mapping outlives its descriptor; what is stored through it is part of the file."""
    actor = work.actor()
    actor("open", 0, "state", "RDWR|CREAT")
    actor("ftruncate", 0, 65_536)
    actor("map", 0, 0, 65_536)
    actor("close", 0)
    actor("store", 0, 9, 1000, 4096)
    assert actor("load", 0, 1000, 4096)["len"] == 1000
    actor("unmap", 0)
    expected = bytearray(65_536)
    expected[4096:5096] = pattern(9, 1000)
    assert (work / "state").read_bytes() == expected
    work.durable()
    assert work.bucket.get("state") == expected


def test_private_mapping_changes_nothing(work: Work) -> None:
    """Copy-on-write stores stay in the process."""
    body = os.urandom(20_000)
    (work / "model").write_bytes(body)
    actor = work.actor()
    actor("open", 0, "model", "RDWR")
    actor("mmap_private", 0, 3, 5000, 100)
    actor("close", 0)
    assert (work / "model").read_bytes() == body


def test_rename_while_open(work: Work) -> None:
    """create a, write, rename to b, write on through the old descriptor: b has every byte."""
    fd = os.open(work / "a", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"first,")
    os.rename(work / "a", work / "b")
    os.write(fd, b"second")
    os.close(fd)
    work.durable()
    assert (work / "b").read_bytes() == b"first,second"
    assert os.listdir(work) == ["b"]
    assert work.bucket.keys() == ["b"]
    assert work.bucket.get("b") == b"first,second"


def test_rename_then_append(work: Work) -> None:
    """write, mv, append to the new name, with and without a flush in between."""
    for flushed in (False, True):
        old, new = work / f"old{flushed}", work / f"new{flushed}"
        old.write_bytes(b"one,")
        os.rename(old, new)
        if flushed:
            work.durable()
        with open(new, "ab") as file:
            file.write(b"two")
    work.durable()
    assert work.bucket.keys() == ["newFalse", "newTrue"]
    assert work.bucket.get("newFalse") == work.bucket.get("newTrue") == b"one,two"


@pytest.mark.parametrize("how", ["unlink", "rename over"])
def test_unlinked_but_open(work: Work, how: str) -> None:
    """The descriptor keeps working, nothing is published, space comes back with the close."""
    if how == "rename over":
        (work / "other").write_bytes(b"survivor")
    fd = os.open(work / "gone", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 100_000)
    if how == "unlink":
        os.unlink(work / "gone")
    else:
        os.rename(work / "other", work / "gone")
    assert os.fstat(fd).st_nlink == 0
    assert os.pwrite(fd, b"y" * 10, 50) == 10
    assert os.pread(fd, 12, 49) == b"x" + b"y" * 10 + b"x"
    os.fsync(fd)
    assert os.fstat(fd).st_size == 100_000
    os.close(fd)
    work.durable()
    assert work.bucket.keys() == ([] if how == "unlink" else ["gone"])
    if how == "rename over":
        assert (work / "gone").read_bytes() == b"survivor"


def test_space_of_an_unlinked_file_comes_back(work: Work) -> None:
    """The cache holds an unlinked file as long as it is open and not longer."""
    work.quiet()
    before = work.mount.status()["cache"]["used_bytes"]
    fd = os.open(work / "big", os.O_WRONLY | os.O_CREAT)
    os.write(fd, bytes(8 << 20))
    os.unlink(work / "big")
    os.close(fd)
    poll(lambda: work.mount.status()["cache"]["used_bytes"] < before + (1 << 20), 10)


def test_shell_redirections(work: Work) -> None:
    """echo a>f; echo b>>f."""
    program("sh", "-c", f"cd {work}; echo a>f; echo b>>f")
    assert (work / "f").read_text() == "a\nb\n"
    work.durable()
    assert work.bucket.get("f") == b"a\nb\n"


def test_two_processes_append_lines(work: Work) -> None:
    """O_APPEND writes of two processes never mix or overwrite each other: 2,000 whole lines."""

    def append(path: str, who: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in range(1000):
            os.write(fd, f"{who} {number} {'.' * (number % 90)}\n".encode())
        os.close(fd)

    runners = [work.client.start(append, work / "log.txt", who) for who in "ab"]
    for runner in runners:
        runner.result()
    lines = (work / "log.txt").read_text().splitlines()
    expected = {f"{who} {n} {'.' * (n % 90)}" for who in "ab" for n in range(1000)}
    assert len(lines) == 2000
    assert set(lines) == expected
    work.durable()
    assert sorted(work.bucket.get("log.txt").decode().splitlines()) == sorted(lines)


def test_truncating_open_and_close(work: Work) -> None:
    """open(O_WRONLY|O_TRUNC) of a file with content and close: empty, here and in the bucket."""
    (work / "f").write_bytes(b"content")
    work.durable()
    os.close(os.open(work / "f", os.O_WRONLY | os.O_TRUNC))
    assert (work / "f").stat().st_size == 0
    assert (work / "f").read_bytes() == b""
    work.durable()
    assert work.bucket.sizes() == {"f": 0}


def test_empty_file(work: Work) -> None:
    """touch f: an object of 0 bytes."""
    (work / "f").touch()
    work.durable()
    assert work.bucket.sizes() == {"f": 0}


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20, (20 << 20) + 7])
def test_round_trip_of_sizes(work: Work, size: int) -> None:
    """Bytes come back the same, locally and from the bucket, with one PUT or many parts."""
    body = os.urandom(size)
    (work / "f").write_bytes(body)
    assert (work / "f").read_bytes() == body
    work.durable()
    assert work.bucket.get("f") == body


def test_preallocated_then_written(work: Work) -> None:
    """posix_fallocate extends the file with zeros, the writes fill it."""
    body = os.urandom(200_000)
    fd = os.open(work / "f", os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(fd, 0, 300_000)
    assert os.fstat(fd).st_size == 300_000
    for start in range(0, len(body), 50_000):
        os.write(fd, body[start : start + 50_000])
    os.close(fd)
    expected = body + bytes(100_000)
    assert (work / "f").read_bytes() == expected
    work.durable()
    assert work.bucket.get("f") == expected


def test_preallocating_keeps_content(work: Work) -> None:
    """posix_fallocate of what is there already changes nothing; beyond it, adds zeros."""
    (work / "f").write_bytes(b"abc")
    fd = os.open(work / "f", os.O_RDWR)
    os.posix_fallocate(fd, 0, 2)
    assert os.fstat(fd).st_size == 3
    os.posix_fallocate(fd, 1, 4095)
    os.close(fd)
    assert (work / "f").read_bytes() == b"abc" + bytes(4093)


def test_direct_io(work: Work) -> None:
    """O_DIRECT with aligned buffers, mixed with buffered writes of the same file."""

    def direct(path: str) -> list[Any]:
        import mmap

        buffer = mmap.mmap(-1, 8192)  # page-aligned
        buffer.write(b"D" * 8192)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        wrote = os.pwritev(fd, [buffer], 4096)
        plain = os.open(path, os.O_RDWR)
        os.pwrite(plain, b"buffered", 0)
        os.pwrite(plain, b"more", 12288)
        into = mmap.mmap(-1, 4096)
        read = os.preadv(fd, [into], 8192)
        os.close(plain)
        os.close(fd)
        return [wrote, read, bytes(into[:10])]

    assert work.run(direct, work / "f") == [8192, 4096, b"D" * 10]
    expected = b"buffered".ljust(4096, b"\0") + b"D" * 8192 + b"more"
    assert (work / "f").read_bytes() == expected
    work.durable()
    assert work.bucket.get("f") == expected


def test_synchronous_writes(work: Work) -> None:
    """O_SYNC and O_DSYNC writers."""
    for name, flag in (("s", os.O_SYNC), ("d", os.O_DSYNC)):
        fd = os.open(work / name, os.O_WRONLY | os.O_CREAT | flag)
        assert os.write(fd, b"safe") == 4
        os.close(fd)
        assert (work / name).read_bytes() == b"safe"


def test_fsync_of_file_and_directory(work: Work) -> None:
    """fsync and fdatasync on every kind of descriptor."""
    for flags in (os.O_RDONLY | os.O_CREAT, os.O_WRONLY, os.O_RDWR):
        fd = os.open(work / "f", flags)
        os.fsync(fd)
        os.fdatasync(fd)
        os.close(fd)
    fd = os.open(work.path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def test_sparse_file(work: Work) -> None:
    """A hole reads as zeros, locally and in the bucket; size and bytes are right."""
    fd = os.open(work / "f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"end", 3_000_000)
    os.ftruncate(fd, 4_000_000)
    os.close(fd)
    expected = bytes(3_000_000) + b"end" + bytes(4_000_000 - 3_000_003)
    assert (work / "f").read_bytes() == expected
    work.durable()
    assert work.bucket.get("f") == expected


def test_blocks_and_statfs(work: Work) -> None:
    """st_blocks tells of data; du and df make sense."""
    (work / "full").write_bytes(b"x" * 1_000_000)
    told = (work / "full").stat()
    assert 1_000_000 <= told.st_blocks * 512 <= 1_100_000
    told_fs = os.statvfs(work.path)
    assert told_fs.f_bsize > 0
    assert told_fs.f_blocks > 0
    assert 0 < told_fs.f_bavail <= told_fs.f_blocks
    assert told_fs.f_files > 0
    assert told_fs.f_namemax >= 255
    used = int(program("du", "-sk", work).split()[0])
    assert 970 <= used <= 1200


def test_tar_sparse(work: Work) -> None:
    """tar --sparse archives the real bytes of dirty and durable files."""
    body = os.urandom(100_000)
    (work / "f").write_bytes(body)
    for name in ("dirty", "durable"):
        archive = work.local / f"{name}.tar"
        (work.local / name).mkdir()
        program("tar", "--sparse", "-C", work, "-cf", archive, "f")
        program("tar", "-C", work.local / name, "-xf", archive)
        assert (work.local / name / "f").read_bytes() == body
        work.durable()
