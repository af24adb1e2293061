"""A sorted set of positions in the line of effects, with logarithmic operations.

A list of short sorted lists: additions come almost always at the tail and removals almost always
at the head, where both cost next to nothing; elsewhere they move at most one chunk.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Position = tuple[int, int, int]
"""(number, rank of the class, effect id): a total order that refines the numbers."""

_CHUNK = 512


class Positions:
    """Sorted distinct positions. Iterators are invalid after a change."""

    __slots__ = ("_chunks", "_firsts", "_len")

    def __init__(self) -> None:
        self._chunks: list[list[Position]] = []
        self._firsts: list[Position] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, position: Position) -> bool:
        chunk = self._chunk_of(position)
        if chunk < 0:
            return False
        items = self._chunks[chunk]
        at = bisect_left(items, position)
        return at < len(items) and items[at] == position

    def __iter__(self) -> Iterator[Position]:
        for chunk in self._chunks:
            yield from chunk

    def first(self) -> Position | None:
        """Return the smallest position."""
        return self._firsts[0] if self._firsts else None

    def add(self, position: Position) -> None:
        """Insert ``position``, which must not be in the set."""
        self._len += 1
        if not self._chunks:
            self._chunks.append([position])
            self._firsts.append(position)
            return
        last = self._chunks[-1]
        if position > last[-1] and len(last) < _CHUNK:
            last.append(position)
            return
        chunk = max(self._chunk_of(position), 0)
        items = self._chunks[chunk]
        insort(items, position)
        self._firsts[chunk] = items[0]
        if len(items) > _CHUNK:
            self._split(chunk)

    def remove(self, position: Position) -> None:
        """Take ``position`` out. KeyError if it is not in the set."""
        if position not in self:
            raise KeyError(position)
        self._len -= 1
        chunk = self._chunk_of(position)
        items = self._chunks[chunk]
        del items[bisect_left(items, position)]
        if items:
            self._firsts[chunk] = items[0]
        else:
            del self._chunks[chunk], self._firsts[chunk]

    def before(self, limit: Position) -> Iterator[Position]:
        """Yield the positions smaller than ``limit``, in order."""
        for position in self:
            if position >= limit:
                return
            yield position

    def next_after(self, position: Position) -> Position | None:
        """Return the smallest member larger than ``position``."""
        chunk = max(self._chunk_of(position), 0)
        while chunk < len(self._chunks):
            items = self._chunks[chunk]
            at = bisect_left(items, position)
            if at < len(items) and items[at] == position:
                at += 1
            if at < len(items):
                return items[at]
            chunk += 1
        return None

    def last_before(self, position: Position) -> Position | None:
        """Return the largest member smaller than ``position``."""
        chunk = bisect_left(self._firsts, position) - 1
        if chunk < 0:
            return None
        items = self._chunks[chunk]
        return items[bisect_left(items, position) - 1]

    def _chunk_of(self, position: Position) -> int:
        """Index of the chunk that holds or would hold ``position``; -1 if it precedes all."""
        at = bisect_left(self._firsts, position)
        if at < len(self._firsts) and self._firsts[at] == position:
            return at
        return at - 1

    def _split(self, chunk: int) -> None:
        items = self._chunks[chunk]
        # At the tail, where numbers grow, a full chunk stays full: no half-empty chunks behind.
        cut = len(items) - 1 if chunk == len(self._chunks) - 1 else len(items) // 2
        tail = items[cut:]
        del items[cut:]
        self._chunks.insert(chunk + 1, tail)
        self._firsts.insert(chunk + 1, tail[0])
