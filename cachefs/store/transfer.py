"""Moving bytes between local files and requests, with bounded memory.

Bodies are read again for each purpose (checksum, sending, sending once more) instead of being held:
the page cache makes that cheap, and a mover's memory stays at one buffer per thread whatever the
part size. Buffers are plain reads, not mappings: a cache file that is cut off under a reader must
be an error, and with a mapping it would be a SIGBUS.

A transfer can be abandoned from outside: `abandon_when` gives the current thread an event, and the
next buffer after it is set raises Abandoned. It derives from BaseException so that no HTTP library
takes it for a network error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

from cachefs.errors import NO_SPACE, CacheError, CacheFileLost, CacheFull
from cachefs.store.base import Body, FileRange

BUFFER = 256 * 1024
"""Bytes per read: fits the second-level cache, and one system call moves it in about 25 us."""

_current = threading.local()


class Abandoned(BaseException):
    """Nobody waits for this transfer any more."""


@contextlib.contextmanager
def abandon_when(event: threading.Event) -> Iterator[None]:
    """Transfers of this thread end with Abandoned once `event` is set."""
    _current.event = event
    try:
        yield
    finally:
        _current.event = None


def check_abandoned() -> None:
    """Called once per buffer by whatever moves bytes."""
    event = getattr(_current, "event", None)
    if event is not None and event.is_set():
        raise Abandoned


def local_error(error: OSError, path: str) -> CacheError:
    """What an OS error on a local file means."""
    if error.errno in NO_SPACE:
        return CacheFull(f"no room left for {path}")
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return CacheFileLost(f"{path} is gone")
    return CacheError(f"{path}: {error.strerror}")


class RangeReader:
    """A file range as a request body: file-like, seekable, and so sendable again as a whole.

    `read` may return more than asked for: HTTP clients ask for 16 KiB at a time and pass on what
    they get, and bigger pieces cost fewer rounds. The view it returns is valid until the next read.
    """

    def __init__(self, source: FileRange) -> None:
        self._source = source
        self._position = 0
        self._view = memoryview(bytearray(min(BUFFER, source.size)))
        try:
            self._fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise local_error(error, source.path) from error

    def __len__(self) -> int:
        return self._source.size

    def tell(self) -> int:
        """Position in the range."""
        return self._position

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move within the range; returns the new position."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self)}[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1) -> memoryview | bytes:
        """The next piece, empty at the end; with a negative size, all that is left."""
        if size < 0:
            return b"".join(bytes(piece) for piece in iter(self._piece, b""))
        return self._piece()

    def _piece(self) -> memoryview:
        check_abandoned()
        source = self._source
        view = self._view[: max(0, source.size - self._position)]
        try:
            count = os.preadv(self._fd, [view], source.start + self._position) if view else 0
        except OSError as error:
            raise local_error(error, source.path) from error
        if count == 0 and view:
            end = source.start + self._position
            raise CacheFileLost(f"{source.path} ends at {end}, expected {source.end}")
        self._position += count
        return view[:count]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def size_of(body: Body) -> int:
    """Length of a body in bytes."""
    return body.size if isinstance(body, FileRange) else len(body)


def pieces(body: Body) -> Iterator[memoryview | bytes]:
    """The body buffer by buffer; each is valid until the next. Raises CacheFileLost when the file
    is missing or shorter than the range."""
    if not isinstance(body, FileRange):
        yield body
        return
    with RangeReader(body) as reader:
        while piece := reader.read(BUFFER):
            yield piece


def load(body: Body) -> bytes:
    """All of a small body."""
    return body if isinstance(body, bytes) else b"".join(bytes(piece) for piece in pieces(body))
