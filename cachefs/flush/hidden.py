"""Ranges of files under hidden keys: sent, read, and deleted once nobody needs them.

    .cachefs/spans/<node>/<number>     bytes of one file that is, or was, larger than its cache

Most are one range each. When a file of the bucket that the cache cannot hold is opened for writing,
one is a copy of its object, made by the store, and several spans are ranges of it: it goes with the
last of them. Whatever becomes of the object meanwhile, the file has the bytes that it had.

A key is noted before anything is sent to it, and never used twice. So what a dead daemon sent is
known, and deleted by the next one, unless a file has it. A request without an answer may still
arrive: its key is deleted when it cannot any more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog
import trio

from cachefs.errors import Corrupt, StoreError
from cachefs.failpoints import Change
from cachefs.flush.client import StoreClient
from cachefs.flush.lost import GRACE
from cachefs.meta import Meta
from cachefs.model.extents import Extent
from cachefs.model.names import RESERVED
from cachefs.model.spans import Span, part_key
from cachefs.store.base import DELETE_BATCH, FileRange, ObjectInfo

log = structlog.get_logger("cachefs.flush")

_SPANS = f"{RESERVED}spans/"
_INTERVAL = 15.0
"""Seconds between looks for what is to be deleted, when nobody says that there is something."""
_PAUSE = 0.5
_S = 1_000_000_000


class HiddenSpans:
    """The store's side of `vfs.streaming`."""

    def __init__(self, meta: Meta, client: StoreClient, node: str) -> None:
        self._meta = meta
        self._client = client
        self._node = node
        self._under_way: set[str] = set()
        self._some = trio.Event()

    async def send(self, gen: int, path: str, start: int, end: int) -> Span:
        """Bytes [start, end) of a file into the store, patiently; nothing counts on them yet.

        Raises StoreError for what patience does not cure, CacheError when the file lacks them.
        """
        key = f"{_SPANS}{self._node}/{uuid.uuid4().hex}"
        span = Span(key, gen, start, end, None, None, time.time_ns())
        self._note([span])
        try:
            info: ObjectInfo = await self._client.patiently(
                "put", sends=span.size, key=key, body=FileRange(path, start, end), metadata={}
            )
            if info.size != span.size:
                raise Corrupt(f"{key} has {info.size} bytes of {span.size}")
        except BaseException:
            self.leave(span)
            raise
        finally:
            self._under_way.discard(key)
        return replace(span, etag=info.etag, crc64=info.crc64)

    async def borrow(self, key: str, etag: str, size: int, places: Sequence[Extent]) -> list[Span]:
        """Have the store copy an object of `size` bytes, in the version `etag`; the spans that are
        at `places` of it.

        They are noted, but nobody's until `Spans.adopt`; then the caller says `taken`, or `leave`.
        Raises StoreError.
        """
        copy, now = f"{_SPANS}{self._node}/{uuid.uuid4().hex}", time.time_ns()
        spans = [Span(part_key(copy, a), 0, a, b, None, None, now) for a, b in places]
        self._note(spans)
        try:
            info: ObjectInfo = await self._client.patiently(
                "copy", src=key, dst=copy, metadata={}, if_source_match=etag
            )
            if info.size != size:
                raise Corrupt(f"{copy} has {info.size} bytes of {size}")
        except BaseException:
            self.leave(*spans)
            raise
        return [replace(span, etag=info.etag) for span in spans]

    def _note(self, spans: Sequence[Span]) -> None:
        """They are about to be asked for."""
        with self._meta.transaction(Change.BEGIN_SPAN):
            for span in spans:
                self._meta.spans.add(span)
        self._under_way.update(span.key for span in spans)

    def taken(self, spans: Iterable[Span]) -> None:
        """What was borrowed is somebody's."""
        self._under_way.difference_update(span.key for span in spans)

    def leave(self, *spans: Span) -> None:
        """Nobody wants what was sent, or is being sent."""
        self.taken(spans)
        with self._meta.transaction(Change.LEAVE_SPAN):
            for span in spans:
                self._meta.spans.answered(span)
        self.swept()

    async def fetch(self, span: Span, start: int, end: int) -> bytes:
        """Bytes [start, end) of the file, all of which are in the span. Raises StoreError."""
        first = span.offset + start - span.start
        data: bytes = await self._client.patiently(
            "get_bytes", key=span.object, start=first, end=first + end - start, if_match=span.etag
        )
        if len(data) != end - start:
            raise Corrupt(f"{span.object}: {len(data)} bytes came for a range of {end - start}")
        return data

    async def is_sound(self, span: Span, path: str) -> bool:
        """Whether a file has a span's bytes in their place, as far as anybody knows. CacheError."""
        if span.crc64 is None:
            return True
        return await self._client.checksum(FileRange(path, span.start, span.end)) == span.crc64

    def swept(self) -> None:
        """There is something to be deleted."""
        self._some.set()

    async def run(self) -> None:
        """Delete what nobody needs, until cancelled."""
        while True:
            try:
                await self.sweep()
            except StoreError as error:
                log.info("hidden objects could not be deleted; later", reason=str(error))
            await trio.sleep(_PAUSE)
            with trio.move_on_after(_INTERVAL):
                await self._some.wait()

    async def sweep(self) -> None:
        """Delete what may be deleted now. The client syncs the database before. StoreError."""
        self._some = trio.Event()
        due = [span for span in self._meta.spans.given_up() if self._is_due(span)]
        for first in range(0, len(due), DELETE_BATCH):
            await self._delete(due[first : first + DELETE_BATCH])

    def _is_due(self, span: Span) -> bool:
        age = (time.time_ns() - span.asked_ns) / _S
        is_late = span.etag is None and 0 <= age < GRACE
        return span.key not in self._under_way and not is_late

    async def _delete(self, spans: Sequence[Span]) -> None:
        keys = {span.object for span in spans}
        gone = [key for key in keys if not self._meta.spans.is_used(key)]
        failed = await self._client.call("delete", keys=gone) if gone else ()
        left = {self._client.relative(key) for key in failed}
        with self._meta.transaction(Change.FORGET_SPANS):
            self._meta.spans.remove(span for span in spans if span.object not in left)
