"""The `ObjectStore` protocol and the values it speaks in.

One contract for every store; `tests/store` holds the suite that each implementation passes. Rules
that hold for all methods:

- keys are full keys (prefix included), any UTF-8 without NUL, at most 1,024 bytes;
- errors are `cachefs.errors.StoreError` subclasses; nothing is retried inside, except that a lost
  reply is resolved (did the write happen?) before an error is reported;
- every write is checked: the returned `ObjectInfo` or `PartReceipt` exists only after the store
  confirmed size and, where it can, the checksum. It serves as the proof that bytes arrived;
- every call is idempotent: repeating it after a lost answer, also from another process, does no
  harm;
- instances are thread-safe.

Checksums are CRC64NVME as an unsigned integer over the full object or part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from cachefs.errors import StoreError, UsageError

DELETE_BATCH = 1000
"""Most keys that one batch delete request carries (S3's limit); longer lists are split."""

LIST_PAGE = 1000
"""Most entries of one listing page (S3's limit)."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [start, end) of a local file: how a request's body is named without holding it."""

    path: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.end - self.start


Body: TypeAlias = FileRange | bytes


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as the store knows it."""

    key: str
    size: int
    etag: str
    """Opaque version of the content, without quotes. Empty only in listings of stores that give
    none."""
    mtime_ns: int = 0
    """The store's modification time, nanoseconds since the epoch (S3 has whole seconds)."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """User metadata with lower-case names; empty in listings, which do not carry it."""
    crc64: int | None = None
    """CRC64NVME of the content, where the store knows it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a listing, in key order."""

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]
    """Common prefixes up to and with the delimiter."""
    next_token: str | None = None
    """Continues the listing; None on the last page."""


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """Proof that a part of a multipart upload arrived."""

    number: int
    etag: str
    size: int
    crc64: int | None = None


class Received(NamedTuple):
    """Bytes of an object that were written into a file."""

    size: int
    crc64: int
    """CRC64NVME of just these bytes."""


class UploadInfo(NamedTuple):
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    started_ns: int


Receipts: TypeAlias = list[PartReceipt]
Uploads: TypeAlias = list[UploadInfo]
Failures: TypeAlias = dict[str, StoreError]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store supports, found by trying it."""

    conditional_put: bool
    """If-None-Match and If-Match on put and copy are decided by the store, atomically. When False
    they are emulated by a HEAD before the write: another writer in between goes unnoticed."""
    conditional_complete: bool
    """The same for completing a multipart upload."""
    crc64: bool
    """The store computes CRC64NVME itself and refuses content that differs."""
    copy_part: bool
    """Parts can be copied server-side from a range of another object."""
    conditional_copy: bool = False
    """The same as `conditional_put` for the destination of a copy."""
    note: str = ""
    """One line for status and doctor: what is missing and what stands in for it; empty if nothing
    is."""


class ObjectStore(Protocol):
    """What cachefs asks of a store. See the module docstring for the rules common to all
    methods."""

    url: str

    def probe(self, owner: str = "") -> Capabilities:
        """Reach the store and find out what it supports; remembered after the first success. What
        is written for that has `owner` in its key, so that who it is can tidy up if this is
        interrupted."""

    def adopt(self, capabilities: Capabilities) -> None:
        """Take over what another process's probe of the same store found."""

    def reload(self) -> None:
        """Read credentials and whatever else may have changed anew before the next request."""

    def list(
        self,
        prefix: str,
        *,
        delimiter: str | None = None,
        token: str | None = None,
        limit: int = LIST_PAGE,
    ) -> Listing:
        """One page of keys that start with `prefix`; with a delimiter, one level only."""

    def head(self, key: str) -> ObjectInfo:
        """The object's metadata. Raises NotFound."""

    def get_bytes(
        self, key: str, start: int = 0, end: int | None = None, *, if_match: str | None = None
    ) -> bytes:
        """Bytes [start, end) of a small object, cut at its end. `if_match`: PreconditionFailed if
        the object's etag is another."""

    def get_into(
        self,
        key: str,
        path: str,
        start: int,
        end: int,
        *,
        at: int | None = None,
        if_match: str | None = None,
    ) -> Received:
        """Write bytes [start, end) of the object into the existing file `path`, from offset `at`
        (default `start`) on; returns how many there were. Short content raises Transient."""

    def put(
        self,
        key: str,
        body: Body,
        *,
        metadata: Mapping[str, str] | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
        crc64: int | None = None,
    ) -> ObjectInfo:
        """Store an object in one request. `if_none_match`: only if no object has this key;
        `if_match`: only if the present object has this etag (PreconditionFailed otherwise).
        `crc64`: what the body's checksum is known to be; Corrupt if the bytes read now differ."""

    def copy(
        self,
        src: str,
        dst: str,
        *,
        metadata: Mapping[str, str] | None = None,
        if_source_match: str | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        """Copy an object of any size inside the store. `metadata` None keeps the source's. NotFound
        means that the source is missing."""

    def delete(self, keys: Iterable[str]) -> Failures:
        """Delete many objects; returns the keys that failed with their errors. A missing object
        counts as deleted. Raises only if a whole request failed."""

    def create_upload(self, key: str, metadata: Mapping[str, str] | None = None) -> str:
        """Begin a multipart upload; nothing is visible until it is completed."""

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartReceipt:
        """Send part `number` (from 1 on); sending it again replaces it. Raises NoSuchUpload."""

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        src: str,
        start: int,
        end: int,
        *,
        if_source_match: str | None = None,
    ) -> PartReceipt:
        """Make part `number` from bytes [start, end) of object `src`, server-side."""

    def list_parts(self, key: str, upload_id: str) -> Receipts:
        """All parts that arrived, by number. Some stores list both versions of a part that was sent
        twice; the etags tell which is which. Raises NoSuchUpload."""

    def list_uploads(self, prefix: str) -> Uploads:
        """All unfinished uploads whose keys start with `prefix`."""

    def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[PartReceipt],
        *,
        if_none_match: bool = False,
        if_match: str | None = None,
        crc64: int | None = None,
        size: int | None = None,
    ) -> ObjectInfo:
        """Make the object out of its parts, visible at once as a whole. `size` and `crc64` are what
        the whole must be: Corrupt if the store holds something else. Repeating a complete that
        succeeded but whose reply was lost succeeds; NoSuchUpload means that it did not happen and
        cannot any more. Conditions as for `put`."""

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Forget an upload and its parts. An unknown upload counts as aborted."""


def open_store(settings: Mapping[str, Any]) -> ObjectStore:
    """The store that the settings' `url` names. Keys are those of the config section `store`, as
    plain values (seconds, integers, strings); those a store has no use for are ignored."""
    url = str(settings.get("url", ""))
    if url.startswith("s3://"):
        from cachefs.store.s3 import S3Store  # boto3 takes 0.3 s to import: only who needs it pays

        return S3Store.from_settings(settings)
    if url.startswith("file://"):
        from cachefs.store.directory import DirectoryStore

        return DirectoryStore.from_settings(settings)
    raise UsageError(
        f"store URL {url!r} is not understood", hint="use s3://BUCKET/PREFIX or file:///DIRECTORY"
    )
