"""Who holds a mountpoint: a lock that tells a living supervisor, and what one left behind.

The supervisor inherits the lock from `cachefs mount` and holds it until it ends, however it ends.
So whoever gets the lock knows that no supervisor and no other `cachefs mount` is at work there.
The lock's file is removed only by who holds the lock, and a lock counts only while its file is
still in place: otherwise two processes could hold two locks of one name.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cachefs.config import Settings
from cachefs.errors import MountError
from cachefs.fuse import kernelmount
from cachefs.observe import runfiles
from cachefs.observe.client import ControlClient
from cachefs.observe.protocol import ControlError
from cachefs.supervised import TapState, objection, python_module

LEAVE_TIMEOUT = 30.0
"""Seconds a daemon without supervisor may take to step aside before it is killed."""

Connection = tuple[int, int]
"""Descriptors of a connection (/dev/fuse) and of the state its daemons share."""


@dataclass(slots=True)
class Claim:
    """The lock of a mountpoint, held."""

    fd: int
    handed_over: bool = False
    """A supervisor has it too: it removes the file."""


@contextmanager
def claim(mountpoint: str) -> Iterator[Claim]:
    """Hold the mountpoint's lock. MountError when somebody else does."""
    path = _lock_path(mountpoint)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while (held := _acquire(path, mountpoint)) is None:
        pass
    try:
        yield held
    finally:
        if not held.handed_over:
            path.unlink(missing_ok=True)
        os.close(held.fd)


def _acquire(path: Path, mountpoint: str) -> Claim | None:
    """None when the file was removed meanwhile: the next attempt makes another."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _try(fd, fcntl.LOCK_EX):
        os.close(fd)
        raise _taken(mountpoint)
    if not _in_place(fd, path):
        os.close(fd)
        return None
    return Claim(fd)


def is_supervised(mountpoint: str) -> bool:
    """Whether a supervisor (or a `cachefs mount` at work) holds the mountpoint."""
    try:
        fd = os.open(_lock_path(mountpoint), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _lock_path(mountpoint: str) -> Path:
    return runfiles.run_path(mountpoint).with_suffix(".lock")


def _in_place(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _try(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _taken(mountpoint: str) -> MountError:
    run = runfiles.read(mountpoint)
    if run is None:
        return MountError(f"another `cachefs mount` is at work on {mountpoint}")
    entry = kernelmount.mount_at(mountpoint)
    if entry is not None and entry.fstype == kernelmount.FSTYPE:
        what = f"{mountpoint} is mounted already ({entry.source}, pid {run.pid})"
        return MountError(what, hint=f"`cachefs unmount {mountpoint}` ends that mount")
    return MountError(
        f"the last mount on {mountpoint} is still uploading what it holds (pid {run.pid})",
        hint="wait for it, or cut it short with "
        f"`cachefs unmount {mountpoint} --drain-timeout 0`: the rest uploads at the next mount",
    )


def daemon_of(mountpoint: str) -> int:
    """The pid of the daemon that serves (or drains) a mountpoint; 0 when none lives.

    The run file may name the one before it: whoever was to write it was killed just then.
    """
    run = runfiles.read(mountpoint)
    if run is not None and _is_daemon(run.pid, mountpoint):
        return run.pid
    pids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return next((pid for pid in pids if _is_daemon(pid, mountpoint) and _serves_here(pid)), 0)


def _is_daemon(pid: int, mountpoint: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--mountpoint" in words and os.fsencode(mountpoint) in words


def _serves_here(pid: int) -> bool:
    """Not one in reserve, one that only rehearses, or one of a container with the same paths."""
    try:
        TapState.descriptors_of(pid)
        return os.path.samefile(f"/proc/{pid}/ns/mnt", "/proc/self/ns/mnt")
    except (OSError, KeyError):
        return False


def clear(mountpoint: str, settings: Settings, daemon_module: str) -> Connection | None:
    """Make way for a new mount, holding the lock: end what a dead supervisor left behind.

    A daemon that lives on is asked to step aside. When takeover is possible the connection is
    kept, so that no caller notices: its descriptors are returned for the next supervisor.
    Raises MountError when something else is mounted there, or when a living mount could not be gone
    on with by this installation: that is left as it is.
    """
    entry = kernelmount.mount_at(mountpoint)
    if entry is None:
        return None
    if entry.fstype != kernelmount.FSTYPE:
        what = f"{mountpoint} is a mount point already ({entry.source}, {entry.fstype})"
        raise MountError(what, hint="unmount it first, or choose another directory")
    daemon = daemon_of(mountpoint)
    connection = None
    if daemon:
        _same_mount(mountpoint, entry, settings)
        connection = _connection_of(daemon) if settings.mount.takeover == "auto" else None
        if connection is not None:
            _rehearse(mountpoint, settings, daemon_module, connection)
        _step_aside(mountpoint, daemon, keep=connection is not None)
    # A dead mount stays until the new one takes its place: what a program writes meanwhile must
    # fail, not land in the bare directory below.
    return connection


def forget(mountpoint: str) -> None:
    """Remove what is left of a mount whose processes have ended, unless the next is at work."""
    with suppress(MountError), claim(mountpoint):
        kernelmount.abort_ours(mountpoint)
        runfiles.remove(mountpoint)
        settings_path(mountpoint).unlink(missing_ok=True)


def settings_path(mountpoint: str) -> Path:
    """Where the resolved settings lie for the daemons of a mount."""
    return runfiles.run_path(mountpoint).with_suffix(".settings")


def _same_mount(mountpoint: str, entry: kernelmount.MountEntry, settings: Settings) -> None:
    run = runfiles.read(mountpoint)
    dirs = tuple(str(path) for path in settings.cache.dirs)
    if entry.source != settings.store.url or (run is not None and run.cache_dirs != dirs):
        raise MountError(
            f"{mountpoint} is mounted already with another store or cache ({entry.source})",
            hint=f"`cachefs unmount {mountpoint}` ends that mount",
        )


def _connection_of(daemon: int) -> Connection | None:
    """The descriptors of a living daemon, if another one can go on with them."""
    try:
        fuse_fd, state_fd = TapState.descriptors_of(daemon)
        connection = kernelmount.take_fd(daemon, fuse_fd), kernelmount.take_fd(daemon, state_fd)
    except (OSError, KeyError):
        return None
    return connection if TapState(connection[1]).can_take_over() else None


def _rehearse(
    mountpoint: str, settings: Settings, daemon_module: str, connection: Connection
) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(settings.to_json())
        file.flush()
        command = [*python_module(daemon_module), file.name, "--mountpoint", mountpoint]
        why = objection(command, connection[1])
    if why:
        hint = f"its daemon serves on; `cachefs unmount {mountpoint}` ends it in order"
        raise MountError(f"cannot go on with the mount on {mountpoint}: {why}", hint=hint)


def _step_aside(mountpoint: str, daemon: int, *, keep: bool) -> None:
    """End the daemon: by request, so that nothing is in flight, otherwise by force."""
    # What is installed where that daemon came from does not matter any more.
    op, args = ("upgrade", {"rehearse": False}) if keep else ("unmount", {"drain_timeout": 0})
    try:
        with ControlClient(runfiles.socket_path(mountpoint)) as control:
            control.call(op, args, timeout=LEAVE_TIMEOUT)
        if wait_for_end(daemon, LEAVE_TIMEOUT):
            return
    except ControlError:
        pass
    os.kill(daemon, signal.SIGKILL)
    if not wait_for_end(daemon, LEAVE_TIMEOUT):
        raise MountError(f"the last daemon on {mountpoint} (pid {daemon}) cannot be ended")


def wait_for_end(pid: int, timeout: float) -> bool:
    """Whether a process ends within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while _runs(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] not in (b"Z", b"X")
