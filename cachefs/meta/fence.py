"""Keeps other programs out of a database whose latest commits are not in its files.

While commits wait in memory, so do the index of the log and SQLite's locks on it. Another program
would find neither at their usual place, take the database for nobody's, and spoil it. So the locks
that it looks for there are taken as well, all of them: whatever it wants, `database is locked`.

They are locks of a descriptor (F_OFD_SETLK), which none of this process's own files takes away, and
end with the process. The file says which schema the database has, as nobody can look.

Locks: https://sqlite.org/walformat.html#wal_locks
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

_FIRST, _COUNT = 120, 8
"""Bytes that SQLite locks in the shared-memory file for what it does."""
_IN_USE = 128
"""The one that it holds, shared, while that file is open: else the next one begins it anew."""
_SIZE, _TEXT_AT = 32768, 4096
"""Of an index that is there, and says nothing: others ask for locks then, and learn that they
cannot have them. One that is not there they would wait for."""
_LOCK = struct.Struct("hhqqi4x")
"""`struct flock`: kind, whence, start, length, pid."""
_DYING, _PAUSE = 10.0, 0.02
"""Seconds that are given to who has the database."""
_TEXT = b"cachefs schema "
_MODE = 0o600


class Fence:
    """Held by a daemon around the database at `path`."""

    def __init__(self, path: Path, schema: int, patience: float = _DYING) -> None:
        """Waits `patience` seconds for what others do. OSError: EBUSY if they do not end it."""
        self._fd = os.open(f"{path}-shm", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            _take(self._fd, path, time.monotonic() + patience)
            text = bytes(_TEXT_AT) + _TEXT + str(schema).encode() + b"\n"
            os.pwrite(self._fd, text.ljust(_SIZE, b"\0"), 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others in."""
        os.close(self._fd)


def _lock(kind: int, first: int, count: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, first, count, 0)


def _take(fd: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, _IN_USE, 1))
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, _FIRST, _COUNT))
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                what = "another program is using the database"
                raise OSError(errno.EBUSY, what, str(path)) from None
        time.sleep(_PAUSE)


def fenced_schema(path: Path) -> int | None:
    """The schema of a database that a daemon keeps to itself now; None if none does."""
    with suppress(OSError, ValueError), open(f"{path}-shm", "rb", buffering=0) as file:
        asked = _lock(fcntl.F_RDLCK, _FIRST, _COUNT)
        kind, *_ = _LOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, asked))
        text, *_ = os.pread(file.fileno(), 100, _TEXT_AT).splitlines() or [b""]
        if kind == fcntl.F_WRLCK and text.startswith(_TEXT):
            return int(text.removeprefix(_TEXT))
    return None
