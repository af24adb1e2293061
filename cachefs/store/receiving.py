"""What a store sends, on its way into a local file."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Protocol

from cachefs.store import crc
from cachefs.store.base import Received
from cachefs.store.transfer import check_abandoned, local_error

BUFFER = 128 << 10
"""Bytes per write: those of all threads together fit a second-level cache, and there are few enough
system calls for none to count."""
NOTHING = Received(0, 0)

_FALLOC_FL_KEEP_SIZE = 0x01
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_current = threading.local()


class Source(Protocol):
    """Where bytes come from."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the buffer, or as much of it as there is until the end; the number of bytes."""


def receive(source: Source, path: str, at: int, size: int) -> Received:
    """Write up to `size` bytes of a source into the existing file `path` from offset `at` on. Their
    checksum is taken while they are in the processor's cache: to read the file once more for it
    costs as much as the network does. Raises CacheError of a kind for trouble with the file."""
    done = value = 0
    buffer = _buffer()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise local_error(error, path) from error
    try:
        _set_aside(fd, at, size)
        while done < size:
            check_abandoned()
            count = source.readinto(buffer[: size - done])
            if not count:
                break
            value = crc.extend(value, buffer[:count])
            _write_all(fd, buffer[:count], at + done, path)
            done += count
    finally:
        os.close(fd)
    return Received(done, value)


def _set_aside(fd: int, at: int, size: int) -> None:
    """Have the filesystem find the blocks once, not for each write, and in one piece beside what
    others write. Where it cannot, or has no room, the writes tell."""
    if size > BUFFER:
        _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, at, size)


def _buffer() -> memoryview:
    """This thread's."""
    view: memoryview | None = getattr(_current, "view", None)
    if view is None:
        view = _current.view = memoryview(bytearray(BUFFER))
    return view


def _write_all(fd: int, view: memoryview, at: int, path: str) -> None:
    try:
        while view:
            count = os.pwrite(fd, view, at)
            view, at = view[count:], at + count
    except OSError as error:
        raise local_error(error, path) from error
