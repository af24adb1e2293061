"""Commits that do not wait for a slow disk.

A layer in C between SQLite and its write-ahead log (`_walvfs.c`) keeps what is committed in a ring
(`meta.ring`) until a thread has written it to the log. A commit waits for that as long as a disk
that is well takes, and is told of its errors; on one that stands still it counts once it is in the
ring, and those after it wait no more until the disk has caught up. Then an error is met by whoever
comes next, and by `sync`; what had counted is kept, and tried again.

Where the layer is not to be had (no compiler when this was installed, a Python with an SQLite of
its own, no memory), commits are made by SQLite itself, and wait.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachefs.meta import ring
from cachefs.meta.fence import Fence

PATIENCE = 0.020
"""Seconds, if nothing else is asked for."""
CROWDED_BYTES = ring.SIZE // 2
"""From here on whoever begins something new should wait until the disk has caught up."""
_INDEX_BYTES = 512 << 10
"""For a log of 256 MiB: 32 KiB for each 4096 pages."""
_LIBRARY = "libsqlite3.so.0"


class Lag(NamedTuple):
    """How far the disk is behind."""

    nbytes: int
    """Bytes that wait in memory."""
    seconds: float
    """Since when some do, without a pause."""
    error: int
    """The errno of the last write, when that failed; it is tried again."""


NO_LAG = Lag(0, 0.0, 0)


class Deferral:
    """The ring of one database, in use."""

    def __init__(self, database: Path, fd: int, patience: float, schema: int) -> None:
        """`fd` is the ring's, and belongs to this. OSError, ImportError."""
        from cachefs.meta import _walvfs

        self._layer = _walvfs
        self._database = database
        self._index_fd = -1
        self.vfs = _walvfs.install(_LIBRARY)
        """What SQLite calls the layer."""
        sqlite3.connect(f"file::memory:?vfs={self.vfs}", uri=True).close()
        self.index = ring.index_of(fd)
        """SQLite's shared-memory file, which is in memory too."""
        log = f"{os.path.realpath(database)}-wal"
        self._fence = Fence(database, schema)
        try:
            self._log = _walvfs.attach(os.fsencode(log), os.fsencode(self.index), fd, patience)
        except BaseException:
            self._fence.close()
            raise

    def reserve_index(self) -> None:
        """Allocate the index, of an open database, for as long a log as there will be: programs may
        fill the memory later, and a commit that needs more of it would fail."""
        fd = os.open(self.index, os.O_RDWR | os.O_CLOEXEC)
        with suppress(OSError):
            os.posix_fallocate(fd, 0, _INDEX_BYTES)
        self._index_fd = fd  # To be closed after the database: that ends SQLite's locks on it.

    @property
    def lag(self) -> Lag:
        """As of now; cheap."""
        return Lag(*self._layer.state(self._log))

    @property
    def crowded(self) -> bool:
        """Whether so much waits that new work should wait too."""
        return self._layer.state(self._log)[0] >= CROWDED_BYTES

    def drain(self) -> None:
        """Wait until the log has all that was committed before. Any thread. OSError: it cannot be
        written; what is pending is kept, and tried again."""
        self._layer.drain(self._log)

    def sync(self) -> None:
        """Wait until the disk has it, too (see `meta.logsync`). Any thread. OSError."""
        self._layer.sync(self._log)

    def doubt(self) -> int:
        """How many syncs had failed when one did that is in doubt; 0: there is no doubt."""
        return self._layer.doubt(self._log)

    def trust(self, failures: int) -> None:
        """All was written anew since so many syncs had failed."""
        self._layer.trust(self._log, failures)

    def renew(self, data: bytes) -> None:
        """Write what the log begins with once more, and see that the disk has it. OSError: EAGAIN
        if it has another header by now."""
        self._layer.renew(self._log, data)

    def close(self) -> None:
        """After the last connection. What the disk has not taken stays for the next daemon."""
        if self._index_fd >= 0:
            os.close(self._index_fd)
        if self._layer.detach(self._log):
            ring.discard(self._database)
        self._fence.close()


def defer(
    database: Path, left: ring.Left, memory: Path, patience: float, schema: int
) -> Deferral | str:
    """Keep commits in the ring that was `left`, or in a new one in `memory`; or why not. `schema`:
    the version that the database has, or is about to get."""
    fd = -1
    try:
        fd, left.fd = left.fd if left.fd is not None else ring.make(database, memory), None
        return Deferral(database, fd, patience, schema)
    except ImportError:
        why = "the extension was not built"
    except sqlite3.Error as error:
        why = f"this Python's SQLite cannot be extended: {error}"
    except OSError as error:
        why = str(error)
    if fd >= 0:
        os.close(fd)
        ring.discard(database)
    return why
