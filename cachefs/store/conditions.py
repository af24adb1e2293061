"""Conditions on writes, and telling one's own earlier success from somebody else's object.

A write whose reply was lost is sent again, and then its condition fails on the very object it made.
So a failed condition is settled by looking: if what is there is exactly what was to be written, the
write happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cachefs.errors import Corrupt, PreconditionFailed, StoreError
from cachefs.store import crc
from cachefs.store.base import ObjectInfo, PartReceipt


@dataclass(frozen=True, slots=True)
class Condition:
    """What must be true of the present object for a write to happen."""

    if_none_match: bool = False
    if_match: str | None = None

    def __bool__(self) -> bool:
        return self.if_none_match or self.if_match is not None

    def holds(self, present: ObjectInfo | None) -> bool:
        """Whether the object that is there now (None: there is none) satisfies it."""
        if self.if_none_match:
            return present is None
        if self.if_match is not None:
            return present is not None and present.etag == self.if_match
        return True

    def check(self, present: ObjectInfo | None, key: str) -> None:
        """Raise PreconditionFailed unless it holds."""
        if not self.holds(present):
            what = "does not exist" if present is None else f"has etag {present.etag}"
            wanted = "no object" if self.if_none_match else f"etag {self.if_match}"
            raise PreconditionFailed(f"{key} {what}, expected {wanted}")


@dataclass(frozen=True, slots=True)
class Intent:
    """What a write was to leave behind."""

    size: int
    crc64: int | None
    etag: Callable[[], str]
    """The etag it would have; computed only when there is no checksum to compare."""
    metadata: Mapping[str, str] | None = None
    """None: not known, not compared."""

    @classmethod
    def of(cls, size: int, crc64: int, metadata: Mapping[str, str] | None) -> Intent:
        """Where every object has a checksum, and an etag says no more."""
        return cls(size, crc64, str, metadata)

    def matches(self, present: ObjectInfo) -> bool:
        """Whether `present` is that."""
        if present.size != self.size or not self._same_metadata(present):
            return False
        if present.crc64 is not None and self.crc64 is not None:
            return present.crc64 == self.crc64
        return present.etag == self.etag()

    def _same_metadata(self, present: ObjectInfo) -> bool:
        # Some stores keep no metadata of directory markers; these have no content to lose either.
        if self.metadata is None or present.key.endswith("/"):
            return True
        return dict(self.metadata) == dict(present.metadata)


def settle(
    present: ObjectInfo | None,
    intent: Intent,
    condition: Condition,
    error: StoreError,
    undecided: StoreError,
) -> ObjectInfo:
    """After `error` said that a condition failed: returns the object if it is our own work.
    Otherwise raises `undecided` when nothing stands in the way any more, else `error`."""
    if present is not None and intent.matches(present):
        return present
    raise undecided if condition.holds(present) else error


def whole(
    key: str, parts: Sequence[PartReceipt], size: int | None, crc64: int | None
) -> tuple[int, int | None]:
    """Size and checksum (if known) of what the parts make together. Raises Corrupt if that is not
    what the caller wants."""
    total = sum(part.size for part in parts)
    known = [(part.crc64, part.size) for part in parts if part.crc64 is not None]
    joined = crc.combine(known) if len(known) == len(parts) else None
    if size is not None and size != total:
        raise Corrupt(f"the parts of {key} have {total} bytes, expected {size}")
    if None not in (joined, crc64) and joined != crc64:
        raise Corrupt(f"the parts of {key} have CRC64NVME {joined:016x}, expected {crc64:016x}")
    return total, crc64 if joined is None else joined


def multipart_etag(parts: Sequence[PartReceipt]) -> str:
    """The etag S3 gives to an object made of these parts; empty if theirs are not MD5 sums."""
    try:
        digests = b"".join(bytes.fromhex(part.etag) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
