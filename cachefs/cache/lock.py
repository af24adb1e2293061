"""One daemon per cache device: an exclusive `flock` for the life of the process.

The lock belongs to the open file, so it ends with the process however that dies, and a new daemon
simply takes it again. The pid in the file is for people and messages; it decides nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from cachefs.errors import CacheBusy, CacheError

# A dead daemon's child that has not reached exec yet still holds the lock, for milliseconds.
_GRACE_SECONDS = 1.0
# Fixed and overwritten in place: needs no new block, so it works on a full disk too.
_RECORD_BYTES = 128


class DeviceLock:
    """The `LOCK` file of a cache device, held from construction to `release`."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._take(path)
        except BaseException:
            os.close(self._fd)
            raise
        self._record_owner()

    def _take(self, path: Path) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        while not _try_lock(self._fd, path):
            pid, host = _read_owner(self._fd)
            if _may_be_alive(pid, host) or time.monotonic() > deadline:
                raise _busy(path.parent, pid, host)
            time.sleep(0.02)

    def _record_owner(self) -> None:
        record = f"{os.getpid()}\n{socket.gethostname()}\n".encode()[:_RECORD_BYTES]
        try:
            os.pwrite(self._fd, record.ljust(_RECORD_BYTES, b"\n"), 0)
        except OSError:
            pass  # a full disk: the lock itself is held all the same

    def release(self) -> None:
        """Let another process have the device. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _try_lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        raise CacheError(
            f"cannot lock cache directory {path.parent}: {os.strerror(err.errno or errno.EIO)}",
            hint="use a local filesystem, or mount this one with lock support",
        ) from err
    return True


def _read_owner(fd: int) -> tuple[int | None, str | None]:
    try:
        lines = os.pread(fd, _RECORD_BYTES, 0).decode(errors="replace").split()
    except OSError:
        return None, None
    pid = int(lines[0]) if lines and lines[0].isdigit() else None
    return pid, lines[1] if len(lines) > 1 else None


def _may_be_alive(pid: int | None, host: str | None) -> bool:
    """False only for a pid that is certainly gone from this very host, or on its way out."""
    if pid is None or host != socket.gethostname():
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # A process of several threads is a zombie before the last of them has let go of its files.
    return stat.rpartition(b") ")[2][:1] not in (b"Z", b"X")


def _busy(directory: Path, pid: int | None, host: str | None) -> CacheBusy:
    owner = "another process" if pid is None else f"pid {pid}"
    if host is not None and host != socket.gethostname():
        owner += f" on {host}"
    return CacheBusy(
        f"cache directory {directory} is in use by {owner}",
        hint="unmount that filesystem first, or give this mount a cache directory of its own",
    )
