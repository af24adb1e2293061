"""Copies of cache files that cost as little as the filesystem allows.

A reflink (FICLONE) shares the blocks. Without it the data is copied inside the kernel, extent by
extent, so that holes stay holes; only when even that is refused do bytes pass through this process.
Nothing here calls fsync: whether the copy must survive a power cut is the caller's knowledge.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from typing import Literal

from cachefs.cache.system import write_all

CloneMethod = Literal["reflink", "copy"]

_FICLONE = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h
_COPY_STEP = 64 << 20  # bytes a call: a copy can be interrupted between calls
_BUFFER = 1 << 20

_REFUSED = {
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EPERM,
    errno.EBADF,
}


def clone_file(source: int, target: int) -> CloneMethod:
    """Make the empty file `target` (a descriptor open for writing) equal to the file `source`.

    Raises OSError, ENOSPC above all; then the target's content is unspecified and the caller
    removes it.
    """
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as err:
        if err.errno not in _REFUSED:
            raise
    else:
        return "reflink"
    size = os.fstat(source).st_size
    for start, end in data_extents(source, size):
        copy_range(source, target, start, end)
    os.ftruncate(target, size)  # where the source was cut short meanwhile, too
    return "copy"


def make_equal(source: int, target: int) -> int:
    """Make `target` (a descriptor open for reading and writing) equal to `source`, writing only
    what differs; returns its size. Each byte is at any time what it was or what it is to be."""
    size = os.fstat(source).st_size
    if not os.fstat(target).st_size:
        clone_file(source, target)
        return os.fstat(target).st_size
    for start in range(0, size, _BUFFER):
        wanted = os.pread(source, min(_BUFFER, size - start), start)
        if wanted != os.pread(target, len(wanted), start):
            write_all(target, wanted, start)
    os.ftruncate(target, size)
    return size


def data_extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Extents of the first `size` bytes that are not holes, in order."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:  # only a hole is left
                return
            if err.errno != errno.EINVAL:
                raise
            yield position, size  # a filesystem that knows no holes
            return
        if start >= size:
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, end
        position = end


def copy_range(source: int, target: int, start: int, end: int) -> int:
    """Copy bytes [start, end) to the same place of `target`; returns how many there were.

    Fewer than asked for: the source is shorter. Raises OSError.
    """
    position = start
    while position < end:
        step = min(end - position, _COPY_STEP)
        try:
            count = os.copy_file_range(source, target, step, position, position)
        except OSError as err:
            if err.errno not in _REFUSED:
                raise
            count = 0
        if count == 0:  # Some filesystems say 0 for what they cannot copy.
            return position - start + _copy_through(source, target, position, end)
        position += count
    return position - start


def _copy_through(source: int, target: int, start: int, end: int) -> int:
    position = start
    while position < end:
        chunk = os.pread(source, min(end - position, _BUFFER), position)
        if not chunk:
            break  # truncated meanwhile
        view = memoryview(chunk)
        while view:
            count = os.pwrite(target, view, position)
            view = view[count:]
            position += count
    return position - start
