"""What the cache files that are open for writing were like when a program last closed them.

close(2) returns once that is noted, and the release that follows may never be heard of: daemon and
mount may die before. The note then tells a file that was finished from one that was being written.
On the cache file itself (an extended attribute, `cache.marks`) it would wait for the filesystem's
journal, which a busy disk may hold up for long; so it is kept in a table in memory, one file of a
tmpfs for each device, which outlives every process. It need not outlive the machine: what was not
synced before that went down is not trusted anyhow.

Whether it was written to since is told by its size and by the time of its last write. From Linux
6.13 on every write after somebody has looked bears another time. Before that, one within the same
tick of the clock (up to 10 ms) that does not change the size goes unseen.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachefs.cache.system import DeviceKind, device_kind, filesystem_type, memory_places
from cachefs.failpoints import Point, reach

SLOTS = 4096
"""Files that may be open for writing at a time and be noted here."""
_ENTRY = struct.Struct("=QqqQ")
"""Number of the cache file (0: the slot is free), time of its last write and size when it was last
closed, and how often it was (0: never). The tap writes all but the first (`_tap_brief.c`)."""
_MODE = 0o600


class Closed(NamedTuple):
    """A cache file when it was last closed."""

    mtime_ns: int
    size: int


def open_table(name: str, directories: Collection[Path]) -> Closings | None:
    """The table of the device of that name, in the first of `directories` that is in memory and
    this user's; None: there is no such place."""
    for directory in memory_places(directories):
        with suppress(OSError):
            return Closings(directory / f"{name}.closed")
    return None


class Closings:
    """The table of one device. Belongs to whoever has the device's lock."""

    def __init__(self, path: Path) -> None:
        """Made if it is not there. OSError: it cannot be, or `path` is not in memory."""
        if device_kind(filesystem_type(path.parent)) is not DeviceKind.RAM:
            raise OSError(f"{path.parent} is not in memory")
        self.path = path
        self.directory = path.parent
        """In memory."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        try:
            os.ftruncate(fd, SLOTS * _ENTRY.size)
            os.posix_fallocate(fd, 0, SLOTS * _ENTRY.size)  # a store without room is a SIGBUS
            reach(Point.CLOSINGS_AFTER_ALLOCATE)
            self.table = mmap.mmap(fd, SLOTS * _ENTRY.size)
        finally:
            os.close(fd)
        entries = enumerate(_ENTRY.iter_unpack(self.table))
        self._slots = {file: slot for slot, (file, *_) in entries if file}
        used = set(self._slots.values())
        self._free = deque(slot for slot in reversed(range(SLOTS)) if slot not in used)

    def claim(self, file: int) -> int | None:
        """The slot of a cache file that is open for writing; None: there is none left."""
        slot = self._slots.get(file)
        if slot is None and self._free:
            slot = self._slots[file] = self._free.pop()
            _ENTRY.pack_into(self.table, slot * _ENTRY.size, file, 0, 0, 0)
        return slot

    def note(self, file: int, closed: Closed) -> bool:
        """A program closed the file; False: it has no slot."""
        slot = self.claim(file)
        if slot is not None:
            _ENTRY.pack_into(self.table, slot * _ENTRY.size, file, *closed, 1)
        return slot is not None

    def of(self, file: int) -> Closed | None:
        """As it was when a program last closed it; None: not noted."""
        slot = self._slots.get(file)
        if slot is None:
            return None
        _, mtime_ns, size, times = _ENTRY.unpack_from(self.table, slot * _ENTRY.size)
        return Closed(mtime_ns, size) if times else None

    def drop(self, file: int) -> None:
        """It is not open for writing any more, or gone. The slot is the last to be used again."""
        slot = self._slots.pop(file, None)
        if slot is not None:
            _ENTRY.pack_into(self.table, slot * _ENTRY.size, 0, 0, 0, 0)
            self._free.appendleft(slot)

    def keep_only(self, files: Collection[int]) -> None:
        """Drop all others: their daemon was killed before it did."""
        for file in self._slots.keys() - set(files):
            self.drop(file)

    def close(self) -> None:
        """Give it up; the file goes, unless it holds what the next daemon is to know. The mapping
        stays: the tap may know it."""
        if not self._slots:
            self.path.unlink(missing_ok=True)
