"""What a store sends, on its way into a local file."""

from __future__ import annotations

import os
from typing import Any

from cachefs.store import crc
from cachefs.store.base import Received
from cachefs.store.transfer import BUFFER, check_abandoned, local_error

NOTHING = Received(0, 0)


def receive(stream: Any, path: str, at: int, size: int) -> Received:
    """Write up to `size` bytes of a stream with `read` into the existing file `path` from offset
    `at` on. Their checksum is taken while they are in the processor's cache: to read the file once
    more for it costs as much as the network does. Raises CacheError of a kind for trouble with the
    file."""
    done = value = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise local_error(error, path) from error
    try:
        while done < size:
            check_abandoned()
            piece = stream.read(min(BUFFER, size - done))
            if not piece:
                break
            value = crc.extend(value, piece)
            _write_all(fd, piece, at + done, path)
            done += len(piece)
    finally:
        os.close(fd)
    return Received(done, value)


def _write_all(fd: int, piece: bytes, at: int, path: str) -> None:
    view = memoryview(piece)
    try:
        while view:
            count = os.pwrite(fd, view, at)
            view, at = view[count:], at + count
    except OSError as error:
        raise local_error(error, path) from error
