"""FUSE mounts as the kernel sees them: mount(2), umount2(2), connections, mountinfo.

Standard library only, because the supervisor imports it. Nothing here resolves a path below a
mountpoint or asks the filesystem behind one, so no call waits for a daemon, living or dead; the one
question to a filesystem, `answers`, is asked by a child process with a time limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

FSTYPE = "fuse.cachefs"
FUSE_DEVICE = "/dev/fuse"
MAX_READ = 1 << 20
"""Largest READ request in bytes; the kernel takes no more than this either by default."""

_CONNECTIONS = "/sys/fs/fuse/connections"
# sys/mount.h and linux/mount.h
_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_FORCE, _MNT_DETACH, _MNT_EXPIRE, _UMOUNT_NOFOLLOW = 1, 2, 4, 8
_FSOPEN_CLOEXEC, _FSCONFIG_CMD_CREATE, _FSMOUNT_CLOEXEC = 1, 6, 1
# Numbers of the calls that libc may not know; equal on every architecture but alpha.
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT, _SYS_PIDFD_GETFD = 430, 431, 432, 438

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/self/mountinfo. `connection` names the FUSE connection in fusectl."""

    mountpoint: str
    fstype: str
    source: str
    connection: int


def mount_table() -> list[MountEntry]:
    """All mounts of this mount namespace, the later ones on top of the earlier ones."""
    with open("/proc/self/mountinfo", "rb") as file:
        return [_parse(line) for line in file.read().splitlines()]


def mount_at(mountpoint: str) -> MountEntry | None:
    """The topmost mount exactly at `mountpoint` (absolute, without symbolic links)."""
    return next((m for m in reversed(mount_table()) if m.mountpoint == mountpoint), None)


def connections_at(mountpoint: str) -> set[int]:
    """The connections of all cachefs mounts at `mountpoint`, covered ones too."""
    ours = (m for m in mount_table() if m.fstype == FSTYPE and m.mountpoint == mountpoint)
    return {m.connection for m in ours}


def _parse(line: bytes) -> MountEntry:
    fields = line.split(b" ")
    fstype, source = fields[fields.index(b"-") + 1 :][:2]
    minor = int(fields[2].partition(b":")[2])
    return MountEntry(_unescape(fields[4]), _unescape(fstype), _unescape(source), minor)


def _unescape(field: bytes) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
    return os.fsdecode(raw)


def resolve(path: str) -> str:
    """`path` absolute and without symbolic links, not touching what is mounted there.

    os.path.realpath would ask the filesystem mounted at the path, which may hang or be dead.
    """
    for _ in range(40):
        head, tail = os.path.split(os.path.abspath(path))
        path = os.path.join(os.path.realpath(head), tail)
        if mount_at(path) or not os.path.islink(path):
            return path
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def open_device() -> int:
    """A new file descriptor for one connection, close-on-exec."""
    return os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)


def mount(fd: int, mountpoint: str, source: str, *, allow_other: bool) -> int:
    """Mount the connection of `fd`; returns its number in fusectl. Raises OSError."""
    options = [f"fd={fd}", "rootmode=40000", f"user_id={os.getuid()}", f"group_id={os.getgid()}"]
    options += ["default_permissions", f"max_read={MAX_READ}"]
    options += ["allow_other"] if allow_other else []
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    data = ",".join(options).encode()
    target = os.fsencode(mountpoint)
    _check(_libc.mount(os.fsencode(source), target, FSTYPE.encode(), flags, data), mountpoint)
    entry = mount_at(mountpoint)
    if entry is None:
        raise OSError(errno.EBUSY, "unmounted again at once", mountpoint)
    return entry.connection


def abort(mountpoint: str) -> bool:
    """Take the topmost mount off `mountpoint` even if it is in use; False if there is none.

    Its connection ends too: requests that wait, and later ones on open files, get an error.
    """
    flags = _MNT_FORCE | _MNT_DETACH | _UMOUNT_NOFOLLOW
    try:
        _check(_libc.umount2(os.fsencode(mountpoint), flags), mountpoint)
    except OSError as exc:
        if exc.errno in (errno.EINVAL, errno.ENOENT):
            return False
        raise
    return True


def abort_ours(mountpoint: str) -> None:
    """Abort the cachefs mounts on top of `mountpoint`, down to what is not ours."""
    while (entry := mount_at(mountpoint)) is not None and entry.fstype == FSTYPE:
        abort(mountpoint)


def is_busy(mountpoint: str) -> bool:
    """Whether files of the mount are open, or something is mounted below or works inside it."""
    # MNT_EXPIRE only marks an idle mount, which any later use undoes: the kernel's own test for
    # EBUSY without its effect. A mark left by somebody else would make it unmount: clear it before.
    _touch(mountpoint)
    result = _libc.umount2(os.fsencode(mountpoint), _MNT_EXPIRE | _UMOUNT_NOFOLLOW)
    error = ctypes.get_errno() if result < 0 else 0
    _touch(mountpoint)
    if error not in (0, errno.EAGAIN, errno.EBUSY, errno.EINVAL):
        raise OSError(error, os.strerror(error), mountpoint)
    return error == errno.EBUSY


def _touch(mountpoint: str) -> None:
    """A use of the mount that sends no request to its daemon."""
    with contextlib.suppress(OSError):
        os.close(os.open(mountpoint, os.O_PATH | os.O_CLOEXEC))


def connection_alive(fd: int) -> bool:
    """Whether the connection of a /dev/fuse descriptor still serves a mount."""
    poll = select.poll()
    poll.register(fd, 0)
    return not poll.poll(0)


def raise_limits(connection: int, max_background: int, congestion_threshold: int) -> None:
    """Let the kernel queue more asynchronous requests (releases, readahead). Raises OSError."""
    with _fusectl() as directory:
        for name, value in (
            ("max_background", max_background),
            ("congestion_threshold", congestion_threshold),
        ):
            path = f"{connection}/{name}"
            with open(path, "w", opener=lambda p, f: os.open(p, f, dir_fd=directory)) as file:
                file.write(str(value))


def raise_readahead(connection: int, nbytes: int) -> None:
    """Let the kernel read so far ahead of programs, which makes for requests of that size. The
    kernel's default of 128 KiB is all that the filesystem can ask for itself. Raises OSError."""
    with open(f"/sys/class/bdi/0:{connection}/read_ahead_kb", "w") as file:
        file.write(str(nbytes >> 10))


@contextlib.contextmanager
def _fusectl() -> Iterator[int]:
    """fusectl as a directory descriptor, mounted or not: containers often lack the mount."""
    if os.path.ismount(_CONNECTIONS):
        fd = os.open(_CONNECTIONS, os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        fd = _private_mount(b"fusectl")
    try:
        yield fd
    finally:
        os.close(fd)


def _private_mount(fstype: bytes) -> int:
    """A mount that is attached nowhere and ends with its descriptor."""
    context = _check(_libc.syscall(_SYS_FSOPEN, fstype, _FSOPEN_CLOEXEC), "fsopen")
    try:
        command = (_FSCONFIG_CMD_CREATE, None, None, 0)
        _check(_libc.syscall(_SYS_FSCONFIG, context, *command), "fsconfig")
        return _check(_libc.syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0), "fsmount")
    finally:
        os.close(context)


def take_fd(pid: int, fd: int) -> int:
    """A duplicate of descriptor `fd` of process `pid`, close-on-exec. Raises OSError.

    Opening /proc/PID/fd/N instead would give a new, unconnected /dev/fuse.
    """
    pidfd = os.pidfd_open(pid)
    try:
        return _check(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0), f"/proc/{pid}/fd/{fd}")
    finally:
        os.close(pidfd)


def answers(mountpoint: str, timeout: float) -> bool:
    """Whether a stat of `mountpoint` succeeds within `timeout` seconds."""
    command = [sys.executable, "-I", "-S", "-c", "import os, sys; os.stat(sys.argv[1])", mountpoint]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + timeout
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if child.poll() is None:
        # Not waited for: a process whose request the daemon has read cannot die before the reply.
        child.kill()
    return child.returncode == 0


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
