"""Cache files that their disk failed to write.

The kernel tells of a write-back that failed once, and takes those bytes for written: the next fsync
says that all is well (https://wiki.postgresql.org/wiki/Fsync_Errors). In memory nothing is missing
until the power goes. So a file that was told of is noted, in an extended attribute of its own, and
never counts as being on the disk again: not with this daemon, and not with the next. After the
machine went down nothing depends on the note: what was not synced is not trusted then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from cachefs.cache.system import wait_for_writes

_MARK = "user.cachefs.doubt"

_unmarked: set[tuple[int, int]] = set()
"""Device and inode of those that could not be marked. What gets the inode later is not trusted
either: that is the safe side."""


def sync(fd: int) -> None:
    """fsync(2) of a cache file. OSError; EIO for ever once the disk failed to write any of it."""
    _ask(os.fsync, fd)


def check(fd: int) -> None:
    """After the whole filesystem was synced, which tells nobody of single files: OSError as
    `sync`."""
    _ask(wait_for_writes, fd)


def _ask(kernel: Callable[[int], None], fd: int) -> None:
    if _is_marked(fd):
        raise OSError(errno.EIO, "the disk failed to write it before")
    try:
        kernel(fd)
    except OSError:
        _mark(fd)
        raise


def _mark(fd: int) -> None:
    try:
        os.setxattr(fd, _MARK, b"1")
    except OSError:
        found = os.fstat(fd)
        _unmarked.add((found.st_dev, found.st_ino))


def _is_marked(fd: int) -> bool:
    if _unmarked:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) in _unmarked:
            return True
    try:
        return bool(os.getxattr(fd, _MARK))
    except OSError:
        return False
