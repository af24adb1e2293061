"""Upload plans: which ranges to send and which to copy inside the store, in parts that S3 accepts.

A plan tiles the file. Ranges that the base object (the version now in the store) holds unchanged
are copied server-side, the rest is sent. As every part but the last has a least size, a small
change in the middle sends some unchanged neighbours with it: the caller must have those bytes at
hand too. The bytes sent are the least that the rules allow, except where the limit on the number
of parts binds (thousands of scattered changes, or sizes within a few parts of the limit): there
the smallest copies give way first.

Rules: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
"""

from __future__ import annotations

import errno
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from cachefs.model.extents import Extent, ExtentSet

MIB = 1 << 20
GIB = 1 << 30


class PartSource(StrEnum):
    """Where a part's bytes come from."""

    UPLOAD = "upload"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a store accepts, in bytes and counts."""

    part_min: int = 5 * MIB
    """Least size of every part but the last."""
    part_max: int = 5 * GIB
    """Largest part, single PUT and single copy."""
    parts_max: int = 10_000

    @property
    def object_max(self) -> int:
        """Largest object, in bytes."""
        return self.part_max * self.parts_max


S3_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class BaseObject:
    """The version in the store that unchanged ranges can be copied from."""

    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, end) of the file, as part ``number`` (from 1) of the upload."""

    number: int
    start: int
    end: int
    source: PartSource

    @property
    def size(self) -> int:
        """Bytes in the part."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The parts that make the new object; they tile it in order.

    ``single``: one request does it all. Its only part is a PUT of the whole file, or, when nothing
    but metadata changed, a copy of the base object onto itself.
    """

    size: int
    single: bool
    parts: tuple[Part, ...]

    @property
    def upload_bytes(self) -> int:
        """Bytes that go over the wire."""
        return sum(p.size for p in self.parts if p.source is PartSource.UPLOAD)

    @property
    def copy_bytes(self) -> int:
        """Bytes that the store copies by itself."""
        return self.size - self.upload_bytes


def plan_upload(
    size: int,
    dirty: ExtentSet | None = None,
    base: BaseObject | None = None,
    limits: Limits = S3_LIMITS,
    preferred_part: int = 16 * MIB,
    *,
    single_put_max: int = 16 * MIB,
    preferred_copy: int = GIB,
) -> UploadPlan:
    """Plan the upload of a file of ``size`` bytes.

    ``dirty``: what differs from ``base``; None when unknown, which sends everything. Bytes beyond
    the end of the base count as dirty. Part sizes are the preferred ones unless the number of
    parts forbids. Raises OSError(EFBIG) when no plan fits the limits.
    """
    if size > limits.object_max:
        raise OSError(errno.EFBIG, f"a file of {size} bytes exceeds the store's limit")
    if dirty is None or base is None:
        base, dirty = None, ExtentSet()
    if base is not None and _same_bytes(size, dirty, base) and 0 < size <= limits.part_max:
        return _single(size, PartSource.COPY)
    if size <= min(single_put_max, limits.part_max):
        return _single(size, PartSource.UPLOAD)
    copies = _choose_copies(size, dirty, base, limits) if base is not None else []
    copies = _fit_count(size, copies, limits)
    parts = _cut(size, copies, limits, preferred_part, preferred_copy)
    if len(parts) == 1 and not copies:
        return _single(size, PartSource.UPLOAD)
    return UploadPlan(size, False, parts)


def plan_assembly(
    size: int, copies: list[Extent], limits: Limits = S3_LIMITS, preferred_part: int = 16 * MIB
) -> UploadPlan:
    """Plan the upload of a file of which ``copies`` are objects of their own in the store, each to
    be copied as a whole, and the rest is here.

    They, and what lies between them, are long enough for parts. Raises OSError(EFBIG) when no plan
    fits the limits.
    """
    parts = _cut(size, copies, limits, preferred_part, limits.part_max)
    if len(parts) > limits.parts_max:
        raise OSError(errno.EFBIG, f"a file of {size} bytes would have {len(parts)} parts")
    return UploadPlan(size, False, parts)


def _same_bytes(size: int, dirty: ExtentSet, base: BaseObject) -> bool:
    return size == base.size and not dirty.overlaps(0, size)


def _single(size: int, source: PartSource) -> UploadPlan:
    return UploadPlan(size, True, (Part(1, 0, size, source),))


# -- what to copy: least bytes sent -------------------------------------------------------------


class _Choice(NamedTuple):
    """Copying clean gap ``gap`` from ``start`` on, after the best choices before it."""

    sent: int  # bytes sent before start
    start: int
    gap: int
    earlier: _Choice | None
    earlier_end: int  # where the copy of the earlier gap ends


def _choose_copies(size: int, dirty: ExtentSet, base: BaseObject, limits: Limits) -> list[Extent]:
    """Return the ranges to copy that leave the least to send; sent ranges between are legal parts.

    Goes through the clean gaps from left to right. A sent range between two copies that would be
    too short takes bytes from the left copy as far as that stays legal, then from the right one:
    what a gap keeps on its right matters later, on its left no more. So per gap only those choices
    count that start earlier or have sent less than all others; and of three gaps in a row the
    middle one can always be copied without either neighbour, so one that is used is followed at
    most three gaps later.
    """
    gaps = _usable_gaps(size, dirty, base, limits)
    fronts: list[list[_Choice]] = []
    for index in range(len(gaps)):
        fronts.append(_pareto(_options(index, gaps, fronts, size, limits.part_min)))
    finals = [
        (choice.sent + size - gaps[choice.gap][1], choice)
        for front in fronts[-3:]
        for choice in front
    ]
    sent, best = min(finals, key=lambda f: f[0], default=(size, None))
    if best is None or sent >= size:
        return []
    return _trace(best, gaps[best.gap][1])


def _usable_gaps(size: int, dirty: ExtentSet, base: BaseObject, limits: Limits) -> list[Extent]:
    """Clean ranges long enough to be a part: the largest ones, if there are too many to use all."""
    if base.size <= limits.part_min:  # S3 copies ranges only out of larger objects
        return []
    clean = dirty.gaps(0, min(size, base.size))
    gaps = [(a, b) for a, b in clean if b - a >= limits.part_min or b == size]
    most = (limits.parts_max + 1) // 2
    if len(gaps) > most:
        gaps = sorted(heapq.nlargest(most, gaps, key=lambda g: g[1] - g[0]))
    return gaps


def _options(
    index: int, gaps: list[Extent], fronts: list[list[_Choice]], size: int, least: int
) -> Iterator[_Choice]:
    """Yield the ways to copy from gap ``index``, after each choice for an earlier gap or none."""
    gap_start, gap_end = gaps[index]
    latest = size - 1 if gap_end == size else gap_end - least
    if index < 3:
        start = max(gap_start, least) if gap_start else 0
        if start <= latest:
            yield _Choice(start, start, index, None, 0)
    for front in fronts[max(0, index - 3) : index]:
        for earlier in front:
            earlier_end = max(earlier.start + least, min(gaps[earlier.gap][1], gap_start - least))
            start = max(gap_start, earlier_end + least)
            if start <= latest:
                sent = earlier.sent + start - earlier_end
                yield _Choice(sent, start, index, earlier, earlier_end)


def _pareto(options: Iterator[_Choice]) -> list[_Choice]:
    """Drop every choice to which another one is equal or better both in bytes sent and in start."""
    front: list[_Choice] = []
    for option in sorted(options, key=lambda o: (o.sent, o.start)):
        if not front or option.start < front[-1].start:
            front.append(option)
    return front


def _trace(last: _Choice, end: int) -> list[Extent]:
    copies = [(last.start, end)]
    choice = last
    while choice.earlier is not None:
        copies.append((choice.earlier.start, choice.earlier_end))
        choice = choice.earlier
    return copies[::-1]


# -- the limit on the number of parts -----------------------------------------------------------


def _regions(size: int, copies: Sequence[Extent]) -> Iterator[tuple[int, int, PartSource]]:
    """Yield what tiles the file: the copies, and what is sent before, between and after them."""
    at = 0
    for start, end in copies:
        if at < start:
            yield at, start, PartSource.UPLOAD
        yield start, end, PartSource.COPY
        at = end
    if at < size:
        yield at, size, PartSource.UPLOAD


def _fit_count(size: int, copies: list[Extent], limits: Limits) -> list[Extent]:
    """Give up the smallest copies, or odd ends of large ones, until the parts are few enough."""
    most = limits.part_max
    while copies:
        fewest = sum(-(-(end - start) // most) for start, end, _ in _regions(size, copies))
        excess = fewest - limits.parts_max
        if excess <= 0:
            break
        by_loss = sorted(range(len(copies)), key=lambda i: _odd_end(copies[i], most))
        # Each gives back two parts at most.
        giving = set(by_loss[: max(1, excess // 2)])
        shorter = [_trim(c, size, most) if i in giving else c for i, c in enumerate(copies)]
        copies = [(start, end) for start, end in shorter if start < end]
    return copies


def _odd_end(copy: Extent, most: int) -> int:
    """Bytes of a copy beyond as many full parts as leave something."""
    return (copy[1] - copy[0] - 1) % most + 1


def _trim(copy: Extent, size: int, most: int) -> Extent:
    start, end = copy
    odd = _odd_end(copy, most)
    return (start + odd, end) if end == size else (start, end - odd)


# -- cutting into parts -------------------------------------------------------------------------


def _cut(
    size: int, copies: list[Extent], limits: Limits, part: int, copy_part: int
) -> tuple[Part, ...]:
    """Cut all regions into parts of the preferred sizes, larger ones if there are too many."""
    regions = list(_regions(size, copies))
    copied = [r for r in regions if r[2] is PartSource.COPY]
    sent = [r for r in regions if r[2] is PartSource.UPLOAD]
    budget = limits.parts_max
    copy_size = _clamp(copy_part, limits)
    if (
        _count(copied, copy_size, size, limits) + _count(sent, limits.part_max, size, limits)
        > budget
    ):
        copy_size = limits.part_max
    left = budget - _count(copied, copy_size, size, limits)
    sizes = {
        PartSource.COPY: copy_size,
        PartSource.UPLOAD: _part_size(sent, _clamp(part, limits), left, size, limits),
    }
    pieces = [
        (start, end, source)
        for region_start, region_end, source in regions
        for start, end in _pieces(region_start, region_end, sizes[source], size, limits)
    ]
    return tuple(Part(number, *piece) for number, piece in enumerate(pieces, 1))


def _clamp(part: int, limits: Limits) -> int:
    return min(max(part, limits.part_min), limits.part_max)


_Regions = list[tuple[int, int, PartSource]]


def _part_size(sent: _Regions, part: int, budget: int, size: int, limits: Limits) -> int:
    """Return the least part size, not under ``part``, that cuts ``sent`` into ``budget`` parts."""
    low, high = part, limits.part_max
    while low < high:
        middle = (low + high) // 2
        if _count(sent, middle, size, limits) <= budget:
            high = middle
        else:
            low = middle + 1
    if low > part:
        low = min(-(-low // MIB) * MIB, limits.part_max)  # round numbers are easier to reason about
    return low


def _count(regions: _Regions, part: int, size: int, limits: Limits) -> int:
    return sum(_piece_count(end - start, part, end == size, limits) for start, end, _ in regions)


def _piece_count(length: int, part: int, last: bool, limits: Limits) -> int:
    """Number of parts of a region: a rest that is too short joins the part before it if it can."""
    full, rest = divmod(length, part)
    if not rest or (full and _joins(rest, part, last, limits)):
        return full
    return full + 1


def _joins(rest: int, part: int, last: bool, limits: Limits) -> bool:
    return not last and rest < limits.part_min and part + rest <= limits.part_max


def _pieces(start: int, end: int, part: int, size: int, limits: Limits) -> Iterator[Extent]:
    last = end == size
    count = _piece_count(end - start, part, last, limits)
    bounds = [start + i * part for i in range(count)] + [end]
    if count > 1 and not last and bounds[-1] - bounds[-2] < limits.part_min:
        bounds[-2] = (bounds[-3] + end) // 2  # too short alone, too long joined: halve the two
    yield from pairwise(bounds)
