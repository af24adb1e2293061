"""Passthrough, negotiation, FALLOCATE: one daemon, no kills."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from cachefs.fuse import tap
from tests.tap.conftest import REPO, Toy, libc

MakeToy = Callable[..., Toy]
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
KILLPRIV_V2, WRITEBACK = 1 << 28, 1 << 16


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    call = libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if call(fd, mode, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("by_hook", [False, True])
def test_passthrough_writes_and_reads_ask_the_daemon_nothing(toy: MakeToy, by_hook: bool) -> None:
    mount = toy(by_hook=by_hook)
    fd = os.open(mount.mnt / "file", os.O_CREAT | os.O_RDWR)
    mount.counts("file")  # from here on they are counted
    before = mount.report()["counts"]
    for number in range(10_000):
        os.write(fd, number.to_bytes(4, "big") * 32)
    assert os.pread(fd, 128, 128 * 77) == (77).to_bytes(4, "big") * 32
    after = mount.report()["counts"]
    counts = mount.counts("file")
    os.close(fd)
    assert "READ" not in counts and "WRITE" not in counts, counts
    grown = {op: n - before.get(op, 0) for op, n in after.items() if n != before.get(op, 0)}
    assert sum(grown.values()) - grown.pop("GETXATTR", 0) <= 2, grown
    assert (mount.source / "file").stat().st_size == 1_280_000


def test_the_tracked_lane_sees_every_write(toy: MakeToy) -> None:
    mount = toy()
    fd = os.open(mount.mnt / "t-file", os.O_CREAT | os.O_RDWR)
    mount.counts("t-file")
    for _ in range(10):
        os.write(fd, b"x" * 4096)
    assert mount.counts("t-file")["WRITE"] == 10
    os.close(fd)


@pytest.mark.parametrize("by_hook", [False, True])
def test_what_is_negotiated(toy: MakeToy, by_hook: bool) -> None:
    report = toy(by_hook=by_hook).report()
    info = report["info"]
    assert info["hooked"] >= by_hook, "from libfuse 3.18 on there is no other way"
    assert report["passthrough"] == [True, ""]
    assert report["takeover"] == [True, False]
    assert info["stack_depth"] == 1
    assert info["flags"] & KILLPRIV_V2
    assert not info["flags"] & WRITEBACK
    assert info["unrecorded"] == 0


def test_switched_off(toy: MakeToy) -> None:
    mount = toy(passthrough=False, takeover=False)
    (mount.mnt / "file").write_bytes(b"x" * 100_000)
    report = mount.report()
    assert report["passthrough"] == [False, "switched off (mount.passthrough = off)"]
    assert report["takeover"] == [False, False]
    assert report["counts"]["WRITE"] >= 1
    assert report["info"]["flags"] & KILLPRIV_V2
    assert (mount.source / "file").read_bytes() == b"x" * 100_000


def test_one_backing_id_for_an_inode_until_its_last_handle(toy: MakeToy) -> None:
    mount = toy()
    path = mount.mnt / "file"
    first = os.open(path, os.O_CREAT | os.O_WRONLY)
    inode = os.fstat(first).st_ino
    (entry,) = mount.report()["backings"].values()
    second = os.open(path, os.O_RDONLY)
    assert mount.report()["backings"] == {str(inode): [entry[0], 2]}
    os.write(first, b"seen at once")
    assert os.read(second, 100) == b"seen at once"
    os.close(first)
    wait_until(lambda: mount.report()["backings"] == {str(inode): [entry[0], 1]})
    os.close(second)
    wait_until(lambda: mount.report()["backings"] == {})
    third = os.open(path, os.O_RDONLY)
    (new,) = mount.report()["backings"].values()
    os.close(third)
    assert new[0] > entry[0] and new[1] == 1


def wait_until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def test_open_handles(toy: MakeToy) -> None:
    mount = toy()
    file = os.open(mount.mnt / "file", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    tracked = os.open(mount.mnt / "t-file", os.O_CREAT | os.O_RDWR)
    directory = os.open(mount.mnt, os.O_RDONLY | os.O_DIRECTORY)
    os.listdir(directory)
    handles = mount.report()["handles"]
    by_node = {(node, is_dir): (flags, lane) for _, node, flags, is_dir, lane in handles}
    flags, lane = by_node[os.fstat(file).st_ino, False]
    assert flags & os.O_APPEND and flags & os.O_ACCMODE == os.O_WRONLY and lane
    flags, lane = by_node[os.fstat(tracked).st_ino, False]
    assert flags & os.O_ACCMODE == os.O_RDWR and not lane
    assert (1, True) in by_node
    assert len({fh for fh, *_ in handles}) == 3
    for fd in (file, tracked, directory):
        os.close(fd)
    wait_until(lambda: mount.report()["handles"] == [])


@pytest.mark.parametrize("name", ["file", "t-file"])
def test_fallocate(toy: MakeToy, name: str) -> None:
    mount = toy(ttl=60)
    fd = os.open(mount.mnt / name, os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, 100_000)
    assert os.fstat(fd).st_size == 100_000
    assert (mount.source / name).stat().st_blocks * 512 >= 100_000
    fallocate(fd, KEEP_SIZE, 100_000, 100_000)
    assert os.fstat(fd).st_size == 100_000
    os.pwrite(fd, b"x" * 100_000, 0)
    fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 4096, 4096)
    assert (mount.source / name).read_bytes()[4095:8193] == b"x" + bytes(4096) + b"x"
    with pytest.raises(OSError) as caught:
        fallocate(fd, 0x20, 0, 4096)  # FALLOC_FL_INSERT_RANGE, which FUSE does not have
    assert caught.value.errno == errno.EOPNOTSUPP
    os.close(fd)
    events = [tuple(event[:1]) + tuple(event[2:]) for event in mount.report()["events"]]
    assert events == [
        ("FALLOCATE", 0, 0, 100_000),
        ("FALLOCATE", KEEP_SIZE, 100_000, 100_000),
        ("FALLOCATE", PUNCH_HOLE | KEEP_SIZE, 4096, 4096),
    ]


def test_fallocate_fails_as_the_disk_does(toy: MakeToy) -> None:
    mount = toy()
    fd = os.open(mount.mnt / "file", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError) as caught:
        os.posix_fallocate(fd, 0, 1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    os.posix_fallocate(fd, 0, 4096)  # and is still there afterwards
    os.close(fd)


@pytest.mark.parametrize("name", ["file", "t-file"])
def test_fallocate_without_descriptors(toy: MakeToy, name: str) -> None:
    """Says so: glibc would write zeros in place of what is not supported."""
    mount = toy()
    fd = os.open(mount.mnt / name, os.O_CREAT | os.O_WRONLY)
    used = {int(number) for number in os.listdir(f"/proc/{mount.pid}/fd")}
    free = min(set(range(len(used) + 1)) - used)
    before = resource.prlimit(mount.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            os.posix_fallocate(fd, 0, 4096)
    finally:
        resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, before)
    assert caught.value.errno == errno.EMFILE
    os.posix_fallocate(fd, 0, 4096)
    os.close(fd)


def test_the_last_writer_shows_in_the_lease(toy: MakeToy) -> None:
    """The daemon holds the file read-only, so a read lease tells whether a client may write."""
    mount = toy()
    fd = os.open(mount.mnt / "file", os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, 4096)
    probe = os.open(mount.source / "file", os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    os.close(fd)

    def free() -> bool:
        try:
            fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            return False
        return True

    wait_until(free)
    os.close(probe)


def test_memory_maps_in_another_process(toy: MakeToy) -> None:
    mount = toy()
    code = """
import mmap, os
fd = os.open("file", os.O_CREAT | os.O_RDWR); os.truncate("file", 1 << 20)
m = mmap.mmap(fd, 1 << 20); os.close(fd)
m[5000:5005] = b"hello"; m.flush(); print(bytes(m[5000:5005]))
"""
    out, _ = mount.client(code).communicate(timeout=20)
    assert out.strip() == "b'hello'"
    assert (mount.source / "file").read_bytes()[5000:5005] == b"hello"


def test_a_stacked_cache_needs_a_deeper_stack(toy: MakeToy) -> None:
    """Without it the kernel refuses the file, and `acquire` says so."""
    mount = toy(overlay=True, stack_depth=2)
    (mount.mnt / "file").write_bytes(b"x" * 100_000)
    assert "WRITE" not in mount.report()["counts"]
    assert (mount.source / "file").read_bytes() == b"x" * 100_000
    flat = toy(overlay=True)
    with pytest.raises(OSError) as caught:
        (flat.mnt / "file").write_bytes(b"x")
    assert caught.value.errno == errno.ELOOP
    assert flat.report()["handles"] == [] and flat.report()["backings"] == {}


def test_whose_writes_clear_suid(toy: MakeToy) -> None:
    """The kernel asks for it when the caller lacks CAP_FSETID."""
    mount = toy()
    (mount.mnt / "t-file").write_bytes(b"by root")
    (mount.mnt / "t-file").chmod(0o666)
    for directory in (mount.base, mount.source):
        directory.chmod(0o755)
    code = "import os; os.setgid(65534); os.setuid(65534); f = os.open('t-file', 1)"
    out, _ = mount.client(code + "; os.write(f, b'by nobody'); os.close(f)").communicate(timeout=20)
    assert out == ""
    assert mount.report()["killed"] == [False, True]


def test_many_files_at_once(toy: MakeToy) -> None:
    mount = toy()
    fds = [os.open(mount.mnt / f"f{i}", os.O_CREAT | os.O_WRONLY) for i in range(500)]
    for i, fd in enumerate(fds):
        os.write(fd, b"%d" % i)
    report = mount.report()
    assert len(report["backings"]) == len(report["handles"]) == 500
    for fd in fds:
        os.close(fd)
    assert all((mount.source / f"f{i}").read_bytes() == b"%d" % i for i in range(500))
    wait_until(lambda: mount.report()["backings"] == {})


@pytest.mark.parametrize("by_hook", [False, True])
def test_unmounting_ends_the_daemon(toy: MakeToy, by_hook: bool) -> None:
    mount = toy(by_hook=by_hook)
    mount.end()
    assert "toy ended: 0" in mount.log.read_text()


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPO), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout + done.stderr


def test_too_late_to_load() -> None:
    out = run_python("import pyfuse3; from cachefs.fuse.tap import load; print(load(None))")
    assert out == "the tap must be loaded before pyfuse3\n"


def test_an_installation_without_the_extension() -> None:
    code = "import sys; sys.modules['cachefs.fuse._tap'] = None\n"
    out = run_python(code + "from cachefs.fuse.tap import load; print(load(None))")
    assert out.startswith("this installation has no tap (was there a C compiler?)")


def test_state_of_another_version() -> None:
    code = """
import os, struct
from cachefs.fuse.tap import load
fd = os.memfd_create("s"); os.ftruncate(fd, {size})
os.pwrite(fd, struct.pack("=4sI", b"CFT1", 9), 0); os.pwrite(fd, struct.pack("=I", {slots}), 44)
print(load(fd))
"""
    out = run_python(code.format(size=4 << 20, slots=8192))
    assert out == "the takeover state has layout 9, this version knows layout 1\n"
    out = run_python(code.format(size=1 << 20, slots=8192))
    assert out == "cannot map the takeover state: smaller than 4 MiB\n"


def test_a_live_mount_cannot_do_without() -> None:
    code = """
import os, struct, sys
sys.modules["cachefs.fuse._tap"] = None
from cachefs.fuse.tap import load
fd = os.memfd_create("s"); os.ftruncate(fd, 4 << 20)
print(load(fd)); os.pwrite(fd, struct.pack("=I", 1), 28); load(fd)
"""
    out = run_python(code)
    assert out.startswith("this installation has no tap")
    assert "MountError: the mount cannot be taken over: this installation has no tap" in out


def test_names_and_handles_of_given_up_requests() -> None:
    def made(opcode: tap.Opcode, body: bytes) -> tap.Poisoned:
        return tap.Poisoned(8, opcode, 1, body)

    assert made(tap.Opcode.CREATE, bytes(16) + b"name\0").names == [b"name"]
    assert made(tap.Opcode.RENAME2, bytes(16) + b"old\0new\0").names == [b"old", b"new"]
    assert made(tap.Opcode.UNLINK, b"gone\0").names == [b"gone"]
    release = made(tap.Opcode.RELEASE, (77).to_bytes(8, sys.byteorder) + bytes(16))
    assert (release.fh, release.names) == (77, [])
    assert tap.Opcode(4711) is tap.Opcode.OTHER


def test_nothing_is_counted_for_an_inode_nobody_watches(toy: MakeToy) -> None:
    report: dict[str, Any] = toy().report()
    assert report["counts"]["INIT"] == 1 and "OTHER" not in report["counts"]
