"""A store in memory that behaves as S3 does, fails on demand, and shows each of its states.

`MemoryStore` has the methods of `ObjectStore`; `MemoryJobs` carries them out as the mover pool
would, with delays, faults before and after they take effect, and sudden death.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from cachefs.errors import (
    Corrupt,
    NoSuchUpload,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
    Throttled,
    Transient,
)
from cachefs.store.base import (
    Body,
    Capabilities,
    FileRange,
    Listing,
    ObjectInfo,
    PartReceipt,
    Receipts,
    Received,
    UploadInfo,
    Uploads,
)


@dataclass(frozen=True)
class Stored:
    """One object."""

    data: bytes
    metadata: Mapping[str, str]
    etag: str
    stamp: int

    @property
    def crc64(self) -> int:
        return zlib.crc32(self.data)


@dataclass
class Upload:
    """One multipart upload under way."""

    key: str
    metadata: Mapping[str, str]
    started_ns: int
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryStore:
    """Objects and uploads. `on_change` is called after every change of what is visible."""

    url = "memory:"

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.on_change: list[Callable[[], None]] = []
        self._clock = clock
        self._numbers = 0
        self._put_off: list[tuple[str, dict[str, Any]]] = []

    def probe(self, owner: str = "") -> Capabilities:
        return Capabilities(True, True, True, True, True)

    def checksum(self, body: Body) -> int:
        return zlib.crc32(_read(body))  # As the objects here have.

    def list(
        self,
        prefix: str,
        *,
        delimiter: str | None = None,
        token: str | None = None,
        limit: int = 1000,
    ) -> Listing:
        objects, prefixes = [], set()
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                objects.append(self._info(key))
        return Listing(tuple(objects), tuple(sorted(prefixes)))

    def head(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise NotFound(key)
        return self._info(key)

    def get_bytes(
        self, key: str, start: int = 0, end: int | None = None, *, if_match: str | None = None
    ) -> bytes:
        self.head(key)
        self._check(key, False, if_match)
        return self.objects[key].data[start:end]

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
        data = self.get_bytes(key, start, end, if_match=if_match)
        with open(path, "r+b") as file:
            file.seek(start if at is None else at)
            return Received(file.write(data), zlib.crc32(data))

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
        return self._make(key, _read(body), metadata or {}, if_none_match, if_match)

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
        self.head(src)
        self._check(src, False, if_source_match)
        source = self.objects[src]
        tags = source.metadata if metadata is None else metadata
        return self._make(dst, source.data, tags, if_none_match, if_match)

    def delete(self, keys: Iterable[str]) -> dict[str, StoreError]:
        """At once: in which order the keys of one request vanish, nobody relies on."""
        for key in keys:
            self.objects.pop(key, None)
        self._changed()
        return {}

    def create_upload(self, key: str, metadata: Mapping[str, str] | None = None) -> str:
        self._numbers += 1
        upload_id = f"upload-{self._numbers}"
        self.uploads[upload_id] = Upload(key, dict(metadata or {}), self._clock())
        return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartReceipt:
        return self._part(key, upload_id, number, _read(body))

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
        self.head(src)
        self._check(src, False, if_source_match)
        return self._part(key, upload_id, number, self.objects[src].data[start:end])

    def list_parts(self, key: str, upload_id: str) -> Receipts:
        parts = self._upload(key, upload_id).parts
        return [_receipt(number, parts[number]) for number in sorted(parts)]

    def list_uploads(self, prefix: str) -> Uploads:
        return [
            UploadInfo(upload.key, upload_id, upload.started_ns)
            for upload_id, upload in self.uploads.items()
            if upload.key.startswith(prefix)
        ]

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
        if upload_id not in self.uploads:
            present = self.objects.get(key)
            sizes = sum(part.size for part in parts)
            if present is not None and len(present.data) == sizes and _joins(present.data, parts):
                return self._info(key)
        upload = self._upload(key, upload_id)
        data = b""
        for part in parts:
            if _receipt(part.number, upload.parts[part.number]).etag != part.etag:
                raise Refused(f"part {part.number} of {key} is another")
            data += upload.parts[part.number]
        info = self._make(key, data, upload.metadata, if_none_match, if_match, f"-{len(parts)}")
        del self.uploads[upload_id]
        return info

    def abort_upload(self, key: str, upload_id: str) -> None:
        self.uploads.pop(upload_id, None)

    # -- what takes its time ------------------------------------------------------------------

    def put_off(self, method: str, arguments: dict[str, Any]) -> None:
        """A request that nobody waits for any more is still to be carried out."""
        if "body" in arguments:
            arguments = {**arguments, "body": _read(arguments["body"])}
        self._put_off.append((method, arguments))

    def catch_up(self) -> None:
        """Carry out what was put off."""
        while self._put_off:
            method, arguments = self._put_off.pop(0)
            with suppress(StoreError):
                getattr(self, method)(**arguments)

    # -- inside -------------------------------------------------------------------------------

    def _make(
        self,
        key: str,
        data: bytes,
        metadata: Mapping[str, str],
        if_none_match: bool,
        if_match: str | None,
        suffix: str = "",
    ) -> ObjectInfo:
        present = self.objects.get(key)
        try:
            self._check(key, if_none_match, if_match)
        except PreconditionFailed:
            # The contract: a lost reply to the same request is resolved by the store itself.
            if present and present.data == data and dict(present.metadata) == dict(metadata):
                return self._info(key)
            raise
        self._numbers += 1
        etag = f"{zlib.crc32(data):08x}{len(data)}{suffix}"
        self.objects[key] = Stored(data, dict(metadata), etag, self._numbers)
        self._changed()
        return self._info(key)

    def _check(self, key: str, if_none_match: bool, if_match: str | None) -> None:
        present = self.objects.get(key)
        if if_none_match and present is not None:
            raise PreconditionFailed(f"{key} is there")
        if if_match is not None and (present is None or present.etag != if_match):
            raise PreconditionFailed(f"{key} is not {if_match}")

    def _info(self, key: str) -> ObjectInfo:
        stored = self.objects[key]
        return ObjectInfo(
            key, len(stored.data), stored.etag, stored.stamp, stored.metadata, stored.crc64
        )

    def _upload(self, key: str, upload_id: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NoSuchUpload(upload_id)
        return upload

    def _part(self, key: str, upload_id: str, number: int, data: bytes) -> PartReceipt:
        self._upload(key, upload_id).parts[number] = data
        return _receipt(number, data)

    def _changed(self) -> None:
        for watch in self.on_change:
            watch()


def _read(body: Body) -> bytes:
    if not isinstance(body, FileRange):
        return bytes(body)
    data = Path(body.path).read_bytes()[body.start : body.end]
    if len(data) != body.size:
        raise Transient(f"{body.path} is short")
    return data


def _receipt(number: int, data: bytes) -> PartReceipt:
    crc = zlib.crc32(data)
    return PartReceipt(number, f"{crc:08x}", len(data), crc)


def _joins(data: bytes, parts: Sequence[PartReceipt]) -> bool:
    at = 0
    for part in parts:
        if zlib.crc32(data[at : at + part.size]) != part.crc64:
            return False
        at += part.size
    return True


class Killed(BaseException):
    """The process that asked is no more."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request."""

    error: StoreError
    after: bool = False
    """It takes effect first, and only its reply is lost."""
    late: bool = False
    """It takes effect once the store catches up (`MemoryStore.catch_up`)."""


Chooser = Callable[[str, dict[str, Any]], Fault | None]


class MemoryJobs:
    """The `Jobs` of a `MemoryStore`."""

    def __init__(
        self,
        store: MemoryStore,
        chance: random.Random | None = None,
        *,
        latency: float = 0.05,
        faults: Chooser = lambda method, arguments: None,
    ) -> None:
        """`latency`: most seconds that a request takes on the way there, and on the way back."""
        self.store = store
        self.faults = faults
        self.latency = latency
        self.dead = False
        self.log: list[tuple[str, str]] = []
        self.failed = 0
        """Requests that something went wrong with."""
        self._chance = chance or random.Random(0)

    async def call(self, method: str, /, **arguments: Any) -> Any:
        fault = self.faults(method, arguments)
        self.failed += fault is not None
        self.log.append((method, str(arguments.get("key") or arguments.get("dst") or "")))
        try:
            await self._travel()
        except BaseException:
            if self._chance.random() < 0.5:
                self._do_for_nobody(method, arguments)
            raise
        if fault is not None and not fault.after:
            if fault.late:
                self.store.put_off(method, arguments)
            raise fault.error
        result = getattr(self.store, method)(**arguments)
        await self._travel()
        if fault is not None:
            raise fault.error
        return result

    async def _travel(self) -> None:
        await trio.sleep(self._chance.uniform(0, self.latency))
        if self.dead:
            raise Killed

    def _do_for_nobody(self, method: str, arguments: dict[str, Any]) -> None:
        """Who asked gave up; the request was on its way."""
        try:
            getattr(self.store, method)(**arguments)
        except (StoreError, OSError):
            pass

    async def restart_clients(self) -> None:
        await trio.lowlevel.checkpoint()


class RandomFaults:
    """Trouble of every kind, by chance, until `calm`."""

    def __init__(self, chance: random.Random, share: float = 0.2) -> None:
        self._chance = chance
        self._share = share
        self.calm = False

    def __call__(self, method: str, arguments: dict[str, Any]) -> Fault | None:
        if self.calm or method == "checksum" or self._chance.random() > self._share:
            return None  # The store has no part in checksums of what is here.
        kind = self._chance.randrange(8)
        if kind < 3:
            return Fault(Transient("no reply"), after=True)
        if kind < 5:
            return Fault(Transient("never arrived"))
        if kind == 5:
            return Fault(Throttled("slow down", retry_after=self._chance.choice([None, 0.5])))
        if kind == 6 and not method.startswith("get"):  # A program would be told.
            return Fault(Refused("no"))
        return Fault(Corrupt("bits fell over"), after=self._chance.random() < 0.5)
