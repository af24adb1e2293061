"""Ranges of files under hidden keys: sent, read, and deleted once nobody needs them.

    .cachefs/spans/<node>/<number>     bytes of one file that is, or was, larger than its cache

A key is noted before anything is sent to it, and never used twice. So what a dead daemon sent is
known, and deleted by the next one, unless a file has it. A request without an answer may still
arrive: its key is deleted when it cannot any more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

import structlog
import trio

from cachefs.errors import Corrupt, StoreError
from cachefs.failpoints import Change
from cachefs.flush.client import StoreClient
from cachefs.flush.lost import GRACE
from cachefs.meta import Meta
from cachefs.model.names import RESERVED
from cachefs.model.spans import Span
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
        with self._meta.transaction(Change.BEGIN_SPAN):
            self._meta.spans.add(span)
        self._under_way.add(key)
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

    def leave(self, span: Span) -> None:
        """Nobody wants what was sent, or is being sent."""
        with self._meta.transaction(Change.LEAVE_SPAN):
            self._meta.spans.answered(span)
        self.swept()

    async def fetch(self, span: Span, start: int, end: int) -> bytes:
        """Bytes [start, end) of the file, all of which are in the span. Raises StoreError."""
        data: bytes = await self._client.patiently(
            "get_bytes", key=span.key, start=start - span.start, end=end - span.start,
            if_match=span.etag,
        )  # fmt: skip
        if len(data) != end - start:
            raise Corrupt(f"{span.key}: {len(data)} bytes came for a range of {end - start}")
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
        failed = await self._client.call("delete", keys=[span.key for span in spans])
        left = {self._client.relative(key) for key in failed}
        with self._meta.transaction(Change.FORGET_SPANS):
            self._meta.spans.remove(span for span in spans if span.key not in left)
