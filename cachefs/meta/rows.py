"""Row types: one slotted dataclass per table, fields in the order of ``schema.sql``."""

from __future__ import annotations

from dataclasses import dataclass

_SIGN = 1 << 63


def to_signed(value: int | None) -> int | None:
    """An unsigned 64-bit number as SQLite can hold it."""
    return value if value is None or value < _SIGN else value - 2 * _SIGN


def to_unsigned(value: int | None) -> int | None:
    """Inverse of `to_signed`."""
    return value if value is None or value >= 0 else value + 2 * _SIGN


@dataclass(slots=True)
class InodeRow:
    """One inode. Sizes in bytes, times in nanoseconds since the epoch."""

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes | None = None
    blocks: int = 0
    gen: int | None = None
    listed_ns: int | None = None
    attrs_known: int = 1


@dataclass(slots=True)
class DentryRow:
    """One name of an inode."""

    id: int
    parent: int
    name: bytes
    ino: int


@dataclass(slots=True)
class GenerationRow:
    """One version of a file's content; `dirty` and `present` are packed extents."""

    gen: int
    ino: int
    device: int
    file: int
    state: str
    lane: str
    size: int
    dirty: bytes | None
    base: int | None
    present: bytes | None
    crc64: int | None
    created_ns: int
    sealed_ns: int | None
    used_ns: int
    synced: int = 0
    grows: int = 0
    error: str | None = None
    copy_device: int | None = None
    """This and the two that follow are changed by `Generations.set_copy` alone."""
    copy_file: int | None = None
    copy_size: int | None = None
    anchored: int = 0
    """Once it is added: changed by `Generations.set_anchored` and `set_synced` alone."""


@dataclass(slots=True)
class ObjectRow:
    """What the bucket holds under a key, as far as this node knows."""

    key: str
    dentry: int | None
    etag: str
    size: int
    crc64: int | None
    gen: int | None
    parts: str | None
    meta: str | None
    mtime_ns: int
    stale: int = 0
    intents: str | None = None


@dataclass(slots=True)
class EffectRow:
    """One pending change of the bucket."""

    id: int
    kind: str
    dentry: int | None
    gen: int | None
    key: str | None
    klass: str
    since: int
    end: int
    state: str
    error: str | None
    queued_ns: int
    first_ns: int


@dataclass(slots=True)
class UploadRow:
    """One multipart upload under way."""

    id: int
    gen: int
    key: str
    upload_id: str
    size: int
    base_etag: str | None
    started_ns: int
    meta: str | None = None


@dataclass(slots=True)
class PartRow:
    """One part of an upload; `etag` is None until the store confirmed it."""

    upload: int
    number: int
    start: int
    end: int
    source: str
    etag: str | None
    crc64: int | None
