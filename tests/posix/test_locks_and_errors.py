"""Locks between processes, and what happens to a call that the product cannot carry out."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from tests.support.actor import pattern
from tests.support.mounts import poll
from tests.support.work import Work


def test_flock_excludes_and_dies_with_its_holder(work: Work) -> None:
    """LOCK_EX|LOCK_NB from two processes; the holder is killed: the lock frees."""
    first, second = work.actor(), work.actor()
    for actor in (first, second):
        actor("open", 0, "lock", "RDWR|CREAT")
    first("flock", 0, "EX")
    with pytest.raises(BlockingIOError):
        second("flock", 0, "EX")
    with pytest.raises(BlockingIOError):
        second("flock", 0, "SH")
    first.kill()
    poll(lambda: second.ask("flock", 0, "EX") == {"ok": None}, 5)


def test_shared_flocks(work: Work) -> None:
    first, second = work.actor(), work.actor()
    for actor in (first, second):
        actor("open", 0, "lock", "RDWR|CREAT")
        actor("flock", 0, "SH")
    with pytest.raises(BlockingIOError):
        first("flock", 0, "EX")
    second("flock", 0, "UN")
    first("flock", 0, "EX")


def test_record_locks(work: Work) -> None:
    """fcntl locks on ranges (sqlite's kind)."""
    first, second = work.actor(), work.actor()
    for actor in (first, second):
        actor("open", 0, "db", "RDWR|CREAT")
    first("lockf", 0, "EX", 10, 0)
    second("lockf", 0, "EX", 10, 10)
    with pytest.raises(BlockingIOError):
        second("lockf", 0, "EX", 1, 5)
    first("lockf", 0, "UN", 10, 0)
    second("lockf", 0, "EX", 1, 5)
    second.kill()
    poll(lambda: first.ask("lockf", 0, "EX", 20, 0) == {"ok": None}, 5)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (("open", 0, "missing", "RDONLY"), errno.ENOENT),
        (("open", 0, "d", "WRONLY"), errno.EISDIR),
        (("open", 0, "f/x", "RDONLY"), errno.ENOTDIR),
        (("open", 0, "f", "RDONLY|DIRECTORY"), errno.ENOTDIR),
        (("open", 0, "l", "RDONLY|NOFOLLOW"), errno.ELOOP),
        (("open", 0, "f", "RDWR|CREAT|EXCL"), errno.EEXIST),
        (("open", 0, "l", "RDWR|CREAT|EXCL"), errno.EEXIST),
        (("open", 0, "loop", "RDONLY"), errno.ELOOP),
        (("mkdir", "f"), errno.EEXIST),
        (("rmdir", "missing"), errno.ENOENT),
        (("truncate", "d", 0), errno.EISDIR),
        (("truncate", "f", -1), errno.EINVAL),
        (("readlink", "f"), errno.EINVAL),
        (("listdir", "f"), errno.ENOTDIR),
        (("link", "missing", "x"), errno.ENOENT),
        (("link", "f", "d"), errno.EEXIST),
        (("symlink", "f", "d"), errno.EEXIST),
        (("getxattr", "f", "user.none"), errno.ENODATA),
    ],
)
def test_errnos(work: Work, what: tuple[object, ...], expected: int) -> None:
    """The mount refuses with the errno of a local disk."""
    (work / "d").mkdir()
    (work / "f").write_bytes(b"x")
    os.symlink("f", work / "l")
    os.symlink("loop", work / "loop")
    with pytest.raises(OSError) as caught:
        work.actor()(*what)
    assert caught.value.errno == expected


def test_reading_a_directory_descriptor(work: Work) -> None:
    actor = work.actor()
    actor("open", 0, "", "RDONLY|DIRECTORY")
    with pytest.raises(IsADirectoryError):
        actor("read", 0, 10)


def test_wrong_direction(work: Work) -> None:
    """Reading a write-only descriptor and the reverse: EBADF."""
    actor = work.actor()
    actor("open", 0, "f", "WRONLY|CREAT")
    actor("open", 1, "f", "RDONLY")
    for command in (("read", 0, 1), ("write", 1, 1, 1)):
        with pytest.raises(OSError) as caught:
            actor(*command)
        assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError) as caught:
        actor("ftruncate", 1, 0)
    assert caught.value.errno == errno.EINVAL


def test_special_files(work: Work) -> None:
    """FIFOs and sockets work or are refused cleanly; device nodes are not to be had (nodev)."""
    try:
        os.mkfifo(work / "fifo")
    except OSError as error:
        assert error.errno in (errno.EPERM, errno.EOPNOTSUPP)
    else:
        assert (work / "fifo").is_fifo()
        (work / "fifo").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server_path = str(work / "s")
        try:
            server.bind(server_path)
        except OSError as error:
            assert error.errno in (errno.EPERM, errno.EOPNOTSUPP)
        else:
            assert (work / "s").is_socket()


def test_tmpfile(work: Work) -> None:
    """O_TMPFILE: works, or EOPNOTSUPP as on filesystems that lack it (programs fall back then)."""
    try:
        fd = os.open(work.path, os.O_TMPFILE | os.O_RDWR)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP
    else:
        os.write(fd, b"x")
        os.close(fd)
        assert os.listdir(work) == []


def test_unlinked_directory_in_use(work: Work) -> None:
    """rmdir of an open directory: listing it is empty, creating in it ENOENT."""

    def play(folder: str) -> list[object]:
        os.mkdir(folder)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.rmdir(folder)
        listed = os.listdir(fd)
        try:
            os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
        except OSError as error:
            return [listed, error.errno]
        return [listed, 0]

    assert work.run(play, work / "d") == [[], errno.ENOENT]


def test_seeking(work: Work) -> None:
    """SEEK_DATA and SEEK_HOLE never call data a hole, and end with ENXIO."""
    actor = work.actor()
    actor("open", 0, "f", "RDWR|CREAT")
    actor("pwrite", 0, 1, 4096, 1 << 20)
    actor("ftruncate", 0, 2 << 20)
    assert actor("seek_data", 0, 0) <= 1 << 20
    assert actor("seek_data", 0, 1 << 20) == 1 << 20
    assert actor("seek_hole", 0, 1 << 20) >= (1 << 20) + 4096
    with pytest.raises(OSError) as caught:
        actor("seek_data", 0, 2 << 20)
    assert caught.value.errno == errno.ENXIO


def test_copying_in_the_kernel(work: Work) -> None:
    """copy_file_range inside the mount, sendfile also out of it."""
    body = os.urandom(500_000)
    (work / "src").write_bytes(body)

    def copies(source: str, target: str, outside: str) -> list[bytes]:
        with open(source, "rb") as a, open(target, "wb") as b:
            left = os.fstat(a.fileno()).st_size
            while left:
                left -= os.copy_file_range(a.fileno(), b.fileno(), left)
        with open(target, "rb") as file:
            seen = [file.read()]
        for destination in (target, outside):
            with open(source, "rb") as a, open(destination, "wb") as b:
                while os.sendfile(b.fileno(), a.fileno(), None, 1 << 20):
                    pass
            with open(destination, "rb") as file:
                seen.append(file.read())
        return seen

    assert work.run(copies, work / "src", work / "dst", work.local / "out") == [body] * 3
    work.durable()
    assert work.bucket.get("dst") == body


def test_inotify_of_own_changes(work: Work) -> None:
    """Changes made through the mount wake watchers on the mount (tail -f, file watchers)."""

    def watch(folder: str) -> int:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(0)
        libc.inotify_add_watch(fd, folder.encode(), 0x100 | 0x8)  # IN_CREATE, IN_CLOSE_WRITE
        with open(os.path.join(folder, "f"), "w") as file:
            file.write("x")
        data = os.read(fd, 4096)
        return len(data)

    assert work.run(watch, work.path, timeout=10) > 0


def test_forked_child_does_not_end_a_write(work: Work) -> None:
    """A child that exits closes its copies of the descriptors; the parent writes on."""
    actor = work.actor()
    actor("open", 0, "f", "WRONLY|CREAT")
    actor("write", 0, 1, 1000)
    actor("fork_exit", 0)
    actor("write", 0, 2, 1000)
    actor("dup", 0, 1)
    actor("close", 0)
    actor("write", 1, 3, 1000)
    actor("close", 1)
    expected = b"".join(pattern(seed, 1000) for seed in (1, 2, 3))
    assert (work / "f").read_bytes() == expected
    work.durable()
    assert work.bucket.get("f") == expected
