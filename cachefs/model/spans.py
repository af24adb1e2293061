"""Spans: ranges of a file that is being written whose bytes are in the store, under hidden keys.

A span is aligned and larger than the least part of a multipart upload, and so is what lies between
two of them. So whatever is moved out and brought back, the object can be put together from spans,
each copied as a whole, and what the cache file has.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cachefs.model.extents import Extent, ExtentSet

SMALLEST = 8 << 20
"""Bytes of a span at least: more than the 5 MiB that a part must have."""
_USUAL = 16 << 20
_LARGEST = 4 << 30
"""Bytes that one PUT and one copy of a part may have, rounded down."""
_OF_CACHE = 8
"""A span takes one part in so many of the cache at most: several are on their way at a time."""
_OF_ONE_LENGTH = 1024
"""Spans until they get longer: 10,000 parts have to do for any file."""
_SHARED = "#"
"""Between the key of an object that several spans are ranges of, and where in it one begins."""
_JOINED = 1 << 30
"""Bytes of a copy of several of them at most."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a generation, in the store in the version `etag` of an object.

    `key` is the object's, or names a part of one that has the file's bytes at the file's offsets.
    """

    key: str
    gen: int
    start: int
    end: int
    etag: str | None
    crc64: int | None
    asked_ns: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    @property
    def object(self) -> str:
        """Key of the object that has its bytes."""
        return self.key.partition(_SHARED)[0]

    @property
    def is_part(self) -> bool:
        """Whether others may be in the same object."""
        return _SHARED in self.key

    @property
    def offset(self) -> int:
        """Where it begins in its object."""
        return self.start if self.is_part else 0


def part_key(key: str, start: int) -> str:
    """The key of a span that begins at `start` in the object `key`, which has the file's bytes."""
    return f"{key}{_SHARED}{start}"


def joined(spans: Iterable[Span]) -> Iterator[Extent]:
    """What can be copied at a time: each, or several that adjoin in one object."""
    start, last = 0, None
    for span in spans:
        adjoins = last is not None and last.end == span.start and last.is_part
        if last is None or not adjoins or last.object != span.object:
            if last is not None:
                yield start, last.end
            start = span.start
        elif span.end - start > _JOINED:
            yield start, last.end
            start = span.start
        last = span
    if last is not None:
        yield start, last.end


class SpanMap:
    """The spans of one file, in order. They never overlap."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = sorted(spans, key=_start)

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __contains__(self, span: object) -> bool:
        return isinstance(span, Span) and span in self.within(span.start, span.end)

    def add(self, span: Span) -> None:
        """Put one in."""
        self._spans.insert(bisect_left(self._spans, span.start, key=_start), span)

    def remove(self, span: Span) -> None:
        """Take one out."""
        self._spans.remove(span)

    def within(self, start: int, end: int) -> list[Span]:
        """Those that have bytes of [start, end)."""
        low = bisect_right(self._spans, start, key=_end)
        high = bisect_left(self._spans, end, key=_start)
        return self._spans[low:high]

    @property
    def total(self) -> int:
        """Number of bytes in all of them."""
        return sum(span.size for span in self._spans)

    def rest(self, size: int) -> ExtentSet:
        """What of a file of `size` bytes is in none of them."""
        return ExtentSet(ExtentSet((span.start, span.end) for span in self._spans).gaps(0, size))


def _start(span: Span) -> int:
    return span.start


def _end(span: Span) -> int:
    return span.end


def usual_length(limit: int) -> int:
    """Bytes of a span where the cache may take `limit`; 0: it is too small to have any."""
    for length in (_USUAL, SMALLEST):
        if length * _OF_CACHE <= limit:
            return length
    return 0


def places(size: int, usual: int, limit: int) -> Iterator[Extent]:
    """Where a file of `size` bytes may have spans: from its beginning to the last whole one, longer
    ones further on, as far as a cache of `limit` bytes can hold one."""
    start = 0
    while usual:
        length = usual << (start // (usual * _OF_ONE_LENGTH)).bit_length()
        if start + length > size or length > min(_LARGEST, limit // _OF_CACHE):
            return
        yield start, start + length
        start += length
