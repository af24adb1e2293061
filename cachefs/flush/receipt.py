"""Proof that the store holds what it should, and what a key may hold without proof."""

from __future__ import annotations

import json
from dataclasses import dataclass

from cachefs.errors import Corrupt
from cachefs.meta.rows import ObjectRow
from cachefs.store.base import ObjectInfo


@dataclass(frozen=True, slots=True)
class UploadReceipt:
    """The store confirmed key, etag, size and, where it can, checksum of a whole object.

    Made by `confirm` alone; whoever marks something durable asks for one.
    """

    key: str
    etag: str
    size: int
    crc64: int | None
    mtime_ns: int

    def object_row(self, gen: int | None, parts: str | None, meta: str | None) -> ObjectRow:
        """The row that records it."""
        return ObjectRow(
            self.key, None, self.etag, self.size, self.crc64, gen, parts, meta, self.mtime_ns
        )


def confirm(key: str, info: ObjectInfo, size: int, crc64: int | None = None) -> UploadReceipt:
    """The receipt for `key` (relative), if the store's answer fits. Raises Corrupt."""
    if info.size != size:
        raise Corrupt(f"{key}: the store holds {info.size} bytes, {size} were sent")
    if crc64 is not None and info.crc64 is not None and info.crc64 != crc64:
        raise Corrupt(f"{key}: the store's checksum differs from that of the bytes sent")
    if not info.etag:
        raise Corrupt(f"{key}: the store gave no etag")
    return UploadReceipt(key, info.etag, info.size, info.crc64 or crc64, info.mtime_ns)


@dataclass(frozen=True, slots=True)
class Intent:
    """What a request is to make of a key: bytes and user metadata, the time of writing among it."""

    size: int
    metadata: dict[str, str]

    def is_in(self, info: ObjectInfo) -> bool:
        """Whether an object is what the request would have made."""
        same = all(info.metadata.get(name) == value for name, value in self.metadata.items())
        return info.size == self.size and same and bool(self.metadata)


def intents_of(row: ObjectRow) -> list[Intent]:
    """What was sent to a key without an answer so far."""
    return [Intent(size, metadata) for size, metadata in json.loads(row.intents or "[]")]
