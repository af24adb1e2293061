"""Room that the metadata database keeps for itself.

Data fills a disk to the last block; the database must be able to record that all the same. So a
file is preallocated beside it, and given back to the filesystem when the database meets ENOSPC. It
is taken again once eviction has made room.
"""

from __future__ import annotations

import os
from pathlib import Path

from cachefs.cache.device import BLOCK_UNIT
from cachefs.failpoints import Point, reach


class MetadataReserve:
    """A preallocated file of `size` bytes at `path`. Nothing ever reads it."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    @property
    def held(self) -> bool:
        """Whether the whole reserve is allocated."""
        try:
            return os.stat(self._path).st_blocks * BLOCK_UNIT >= self._size
        except FileNotFoundError:
            return self._size == 0

    def restore(self) -> bool:
        """Allocate what is missing; False when there is no room for it (then nothing is taken)."""
        if self.held:
            return True
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return False
        reach(Point.RESERVE_AFTER_CREATE)
        try:
            os.posix_fallocate(fd, 0, self._size)
        except OSError:
            os.ftruncate(fd, 0)
            return False
        finally:
            os.close(fd)
        reach(Point.RESERVE_AFTER_ALLOCATE)
        return True

    def release(self) -> None:
        """Give the blocks back, for the database to use."""
        try:
            os.truncate(self._path, 0)
        except FileNotFoundError:
            pass
        reach(Point.RESERVE_AFTER_RELEASE)
