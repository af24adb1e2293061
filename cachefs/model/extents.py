"""Extents: sets of byte positions, kept as sorted disjoint half-open intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Extent = tuple[int, int]
"""[start, end) in bytes."""


class ExtentSet:
    """A set of byte positions. Touching extents are one; empty ones vanish.

    Adding at the tail, as sequential writing does, takes constant time; elsewhere a search and a
    move of what follows. Negative positions and ends before starts raise ValueError.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in extents:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Put [start, end) into the set."""
        ends = self._ends
        if ends and 0 <= start <= end and start >= self._starts[-1] and start <= ends[-1]:
            if end > ends[-1]:
                ends[-1] = end
            return
        if not _proper(start, end):
            return
        if not ends or start > ends[-1]:
            self._starts.append(start)
            ends.append(end)
            return
        self._merge(start, end)

    def remove(self, start: int, end: int) -> None:
        """Take [start, end) out of the set."""
        if not _proper(start, end):
            return
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end)
        if low >= high:
            return
        kept: list[Extent] = []
        if self._starts[low] < start:
            kept.append((self._starts[low], start))
        if self._ends[high - 1] > end:
            kept.append((end, self._ends[high - 1]))
        self._starts[low:high] = [s for s, _ in kept]
        self._ends[low:high] = [e for _, e in kept]

    def covers(self, start: int, end: int) -> bool:
        """Return whether every byte of [start, end) is in the set (an empty range always is)."""
        if not _proper(start, end):
            return True
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._ends[at] >= end

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether any byte of [start, end) is in the set."""
        if not _proper(start, end):
            return False
        at = bisect_right(self._ends, start)
        return at < len(self._starts) and self._starts[at] < end

    def within(self, start: int, end: int) -> Iterator[Extent]:
        """Yield the pieces of [start, end) that are in the set."""
        if not _proper(start, end):
            return
        at = bisect_right(self._ends, start)
        while at < len(self._starts) and self._starts[at] < end:
            yield max(self._starts[at], start), min(self._ends[at], end)
            at += 1

    def gaps(self, start: int, end: int) -> Iterator[Extent]:
        """Yield the pieces of [start, end) that are not in the set."""
        for piece_start, piece_end in self.within(start, end):
            if piece_start > start:
                yield start, piece_start
            start = piece_end
        if start < end:
            yield start, end

    def intersect(self, other: ExtentSet) -> ExtentSet:
        """Return the bytes that are in both sets."""
        few, many = (self, other) if len(self) <= len(other) else (other, self)
        return ExtentSet(piece for extent in few for piece in many.within(*extent))

    def union(self, other: ExtentSet) -> ExtentSet:
        """Return the bytes that are in either set."""
        return ExtentSet(sorted([*self, *other]))

    def difference(self, other: ExtentSet) -> ExtentSet:
        """Return the bytes of this set that are not in the other."""
        return ExtentSet(piece for extent in self for piece in other.gaps(*extent))

    def clip(self, size: int) -> None:
        """Take out everything from ``size`` on, as truncation does."""
        if self._ends and self._ends[-1] > size:
            self.remove(size, self._ends[-1])

    def copy(self) -> ExtentSet:
        """Return an independent copy."""
        twin = ExtentSet()
        twin._starts = self._starts.copy()
        twin._ends = self._ends.copy()
        return twin

    @property
    def total(self) -> int:
        """Number of bytes in the set."""
        return sum(self._ends) - sum(self._starts)

    def pack(self) -> bytes:
        """Return a compact form for storage: gaps and lengths in turn, each as a LEB128 number."""
        packed = bytearray()
        at = 0
        for start, end in self:
            _put_number(packed, start - at)
            _put_number(packed, end - start)
            at = end
        return bytes(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> ExtentSet:
        """Return the set that :meth:`pack` stored. ValueError if ``packed`` is not of that form."""
        numbers = _get_numbers(packed)
        if len(numbers) % 2:
            raise ValueError("packed extents end within an extent")
        extents = cls()
        at = 0
        for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
            if not length or (at and not gap):
                raise ValueError("packed extents are empty or touch")
            extents.add(at + gap, at + gap + length)
            at += gap + length
        return extents

    def __contains__(self, positions: int | range) -> bool:
        if isinstance(positions, range):
            if positions.step != 1:
                raise ValueError("only ranges of step 1 are extents")
            return self.covers(positions.start, max(positions.start, positions.stop))
        return self.covers(positions, positions + 1)

    def __iter__(self) -> Iterator[Extent]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        """Number of extents."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExtentSet):
            return NotImplemented
        return self._starts == other._starts and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ExtentSet({list(self)})"

    def _merge(self, start: int, end: int) -> None:
        """Add an extent that lies before the last end: it takes in all that it meets or touches."""
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]


def _proper(start: int, end: int) -> bool:
    """Return whether [start, end) has bytes. ValueError if it is no extent at all."""
    if start < 0 or end < start:
        raise ValueError(f"not an extent: [{start}, {end})")
    return end > start


def _put_number(packed: bytearray, number: int) -> None:
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)


def _get_numbers(packed: bytes) -> list[int]:
    numbers: list[int] = []
    number = shift = 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    if shift:
        raise ValueError("packed extents end within a number")
    return numbers
