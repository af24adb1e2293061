"""Whether what was committed is on the disk, on one that fails at times.

The kernel tells of a write-back that failed once, and takes those bytes for written: the next sync
says that all is well (https://wiki.postgresql.org/wiki/Fsync_Errors). So after a failure the log is
in doubt, and nothing of it counts as durable, until it was written anew, all of it, and was found
on the disk. What is written is what the kernel still has in memory; where it has let go of that
the chain of checksums is broken, and the doubt stays. It also stays where SQLite writes the log:
nobody may read it while what is in memory and what is on the disk are compared.

An earlier daemon may have been told of an error, so what it left is looked at before it is opened.

Invariant: all syncs of a log go through one descriptor, one at a time, so that no error is taken
away unseen; the place where failures are counted says that no sync went well while there is doubt.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Protocol

from cachefs.meta import wal

_CHUNK = 1 << 20
_ATTEMPTS = 3


class Log(Protocol):
    """How the log of one database is written."""

    def drain(self) -> None:
        """Wait until the file has all that was committed. OSError."""

    def sync(self) -> None:
        """Wait until the disk has it, too. OSError: it has not, or there is doubt."""

    def doubt(self) -> int:
        """How many syncs had failed when one did that is in doubt; 0: there is no doubt."""

    def trust(self, failures: int) -> None:
        """All was written anew since so many syncs had failed."""

    def renew(self, data: bytes) -> None:
        """Write what the log begins with once more, and see that the disk has it. OSError: EAGAIN
        if it has another header by now."""


class PlainLog:
    """One that SQLite writes itself."""

    def __init__(self, path: Path) -> None:
        """The log of the database at `path`, which is there. OSError."""
        self._path = path
        self._fd = os.open(f"{path}-wal", os.O_RDWR | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._failures = 0

    def drain(self) -> None:
        """SQLite has written it."""

    def sync(self) -> None:
        """See `Log`."""
        with self._lock:
            try:
                os.fdatasync(self._fd)
            except OSError:
                self._failures += 1
                raise

    def doubt(self) -> int:
        """See `Log`."""
        return self._failures

    def trust(self, failures: int) -> None:
        """Never: see `renew`."""

    def renew(self, data: bytes) -> None:
        """See `Log`. It is not done before the database is opened again."""
        what = (
            "the disk failed to write the database; what is in doubt is written at the next mount"
        )
        raise OSError(errno.EIO, what, f"{self._path}-wal")

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """After the last use."""
        os.close(self._fd)


class LogSync:
    """The one place that says that commits are on the disk. Any thread."""

    def __init__(self, path: Path, index: int, log: Log) -> None:
        """`index`: a descriptor of the shared-memory file of the database at `path`, in use."""
        self._path = path
        self._index = index
        self._log = log
        self._lock = threading.Lock()

    def sync(self) -> None:
        """Wait until the disk has all that was committed before. OSError."""
        self.settle()
        self._log.sync()

    def settle(self) -> None:
        """End the doubt that there may be. OSError: it stays."""
        if not self._log.doubt():
            return
        with self._lock:
            for _ in range(_ATTEMPTS):
                doubt = self._log.doubt()
                if not doubt or self._is_renewed():
                    self._log.trust(doubt)
                    return
        raise OSError(errno.EIO, "the log begins anew all the time", f"{self._path}-wal")

    def _is_renewed(self) -> bool:
        """Write all of the log that SQLite knows of once more; False: another round began."""
        count, salts = wal.taken(self._index)
        self._log.drain()
        header = wal.header(self._path)
        if not count:
            return True
        if wal.salts_in(header) != salts:
            return False
        log = wal.examine(self._path)
        frames = [raw for _, raw, _ in islice(wal.chain(self._path, log, 0), count)]
        if len(frames) < count:
            return self._refuse_lost(header, count - len(frames))
        try:
            self._log.renew(header + b"".join(frames))
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return False
        return True

    def _refuse_lost(self, header: bytes, count: int) -> bool:
        """False: another round began, no wonder that the rest of this one is not there."""
        if wal.header(self._path) != header:
            return False
        what = f"the disk failed, and {count} pages of commits are lost"
        raise OSError(errno.EIO, what, f"{self._path}-wal")


def settle_closed(path: Path) -> None:
    """See that what is in the log of the database at `path`, which nobody has open, is on the disk.
    OSError: it is not."""
    with suppress(FileNotFoundError), open(f"{path}-wal", "r+b", buffering=0) as file:
        fd = file.fileno()
        with suppress(OSError):
            os.fdatasync(fd)  # Whatever it says: another one may have been told before.
        for at in range(0, os.fstat(fd).st_size, _CHUNK):
            _settle(fd, at, os.pread(fd, _CHUNK, at))


def _settle(fd: int, at: int, data: bytes) -> None:
    for _ in range(_ATTEMPTS):
        os.posix_fadvise(fd, at, _CHUNK, os.POSIX_FADV_DONTNEED)
        if os.pread(fd, _CHUNK, at) == data:
            return
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], at + done)
        os.fdatasync(fd)
    raise OSError(errno.EIO, "the disk does not keep what is written to it")
