"""Multipart uploads, journaled: begun once, gone on with after any interruption.

Nothing of it is visible until the publisher completes it. The journal (tables `upload` and
`upload_part`) holds the upload's id, its planned parts and the receipt of each part that arrived,
so that a later daemon sends only what is missing. A journal that no longer fits (other key, other
plan) is aborted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog
import trio

from cachefs.errors import NoSuchUpload, StoreError, Transient
from cachefs.failpoints import Point, reach
from cachefs.flush.client import StoreClient
from cachefs.flush.lost import LostUploads
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow, ObjectRow, PartRow, UploadRow
from cachefs.model.plan import PartSource, UploadPlan
from cachefs.model.spans import SpanMap, joined
from cachefs.store.base import FileRange, PartReceipt

log = structlog.get_logger("cachefs.flush")


class _Source(NamedTuple):
    """Bytes [start, end) of an object in a version."""

    key: str
    start: int
    end: int
    etag: str | None


class Multipart:
    """Uploads generations part by part."""

    def __init__(self, meta: Meta, client: StoreClient) -> None:
        self._meta = meta
        self._client = client
        self._lost = LostUploads(meta, client)

    async def send_parts(
        self,
        gen: GenerationRow,
        path: str,
        key: str,
        plan: UploadPlan,
        metadata: dict[str, str],
        base: ObjectRow | None,
    ) -> UploadRow:
        """Bring every part of `plan` to the store; returns the upload, ready to be completed.

        Raises StoreError for what patience does not cure: PreconditionFailed when the base object
        changed, Refused and so on. Cancelling it keeps what arrived.
        """
        upload = await self._begin(gen, key, plan, metadata, base)
        reach(Point.SEND_PARTS_AFTER_START)
        try:
            await self._send_missing(upload, path, base)
        except NoSuchUpload:
            self._meta.uploads.remove(upload.id)
            upload = await self._begin(gen, key, plan, metadata, base)
            await self._send_missing(upload, path, base)
        reach(Point.SEND_PARTS_AFTER_ALL)
        return upload

    async def _begin(
        self,
        gen: GenerationRow,
        key: str,
        plan: UploadPlan,
        metadata: dict[str, str],
        base: ObjectRow | None,
    ) -> UploadRow:
        etag = base.etag if base is not None else self._meta.spans.version(gen.gen)
        for known in self._meta.uploads.of_gen(gen.gen):
            if self._fits(known, key, plan, etag):
                return known
            await self.abort(known)
        parts = (
            PartRow(0, part.number, part.start, part.end, part.source, None, None)
            for part in plan.parts
        )
        async with self._lost.asking(key) as request:
            upload_id: str = await self._client.patiently(
                "create_upload", on_failure=request.failed, key=key, metadata=metadata
            )
            now, meta = time.time_ns(), json.dumps(metadata)
            row = UploadRow(0, gen.gen, key, upload_id, plan.size, etag, now, meta)
            self._meta.uploads.add(row, parts)
        return row

    def _fits(self, known: UploadRow, key: str, plan: UploadPlan, etag: str | None) -> bool:
        if known.key != key or known.size != plan.size or known.base_etag != etag:
            return False
        planned = [(p.number, p.start, p.end, str(p.source)) for p in plan.parts]
        journal = self._meta.uploads.parts(known.id)
        return planned == [(p.number, p.start, p.end, p.source) for p in journal]

    async def _send_missing(self, upload: UploadRow, path: str, base: ObjectRow | None) -> None:
        missing = [part for part in self._meta.uploads.parts(upload.id) if part.etag is None]
        try:
            async with trio.open_nursery() as nursery:
                for part in missing:
                    nursery.start_soon(self._send, upload, part, path, base)
        except BaseExceptionGroup as group:
            raise _first_error(group) from None

    async def _send(
        self, upload: UploadRow, part: PartRow, path: str, base: ObjectRow | None
    ) -> None:
        if part.source == PartSource.COPY:
            source = self._source(upload, part, base)
            receipt: PartReceipt = await self._client.patiently(
                "copy_part", key=upload.key, upload_id=upload.upload_id, number=part.number,
                src=source.key, start=source.start, end=source.end, if_source_match=source.etag,
            )  # fmt: skip
        else:
            receipt = await self._client.patiently(
                "upload_part", sends=part.end - part.start, key=upload.key,
                upload_id=upload.upload_id, number=part.number,
                body=FileRange(path, part.start, part.end),
            )  # fmt: skip
        self._meta.uploads.confirm(upload.id, part.number, receipt.etag, receipt.crc64)
        reach(Point.SEND_PARTS_AFTER_CONFIRM)

    def _source(self, upload: UploadRow, part: PartRow, base: ObjectRow | None) -> _Source:
        """What a part is copied from: bytes of the version before, or of a hidden object."""
        if base is not None:
            return _Source(base.key, part.start, part.end, base.etag)
        spans = SpanMap(self._meta.spans.of_gen(upload.gen)).within(part.start, part.end)
        if list(joined(spans)) != [(part.start, part.end)]:
            raise Transient(f"bytes of {upload.key} have moved")
        first = spans[0]
        return _Source(first.object, first.offset, first.offset + part.end - part.start, first.etag)

    @contextmanager
    def completing(self, upload: UploadRow) -> Iterator[None]:
        """Around the request that completes an upload: one that the store does not know any more
        (it expired, or was completed and its object overwritten since) is begun anew."""
        try:
            yield
        except NoSuchUpload as error:
            self._meta.uploads.remove(upload.id)
            raise Transient(f"the upload of {upload.key} is gone: {error}") from error

    def receipts(self, upload: UploadRow) -> list[PartReceipt]:
        """What the store confirmed, part by part: the argument of `complete_upload`."""
        return [
            PartReceipt(part.number, part.etag or "", part.end - part.start, part.crc64)
            for part in self._meta.uploads.parts(upload.id)
        ]

    def checksums(self, upload: UploadRow) -> str:
        """The parts' sizes and checksums, as the `object` table keeps them."""
        parts = self._meta.uploads.parts(upload.id)
        return json.dumps([[part.end - part.start, part.crc64] for part in parts])

    async def sweep(self, is_wanted: Callable[[int], bool]) -> None:
        """Abort the uploads of generations that nobody wants in the store any more, and those whose
        beginning was never confirmed."""
        for upload in self._meta.uploads.all():
            if not upload.upload_id:
                await self._seek(upload)
            elif not is_wanted(upload.gen):
                await self.abort(upload)

    async def _seek(self, note: UploadRow) -> None:
        try:
            await self._lost.seek(note)
        except StoreError as error:
            log.info("uploads could not be looked up; later", key=note.key, reason=str(error))

    async def abort(self, upload: UploadRow) -> None:
        """Forget an upload, here and in the store. A store that is out of reach forgets later:
        the upload stays in the journal and is tried again at the next start."""
        try:
            await self._client.call("abort_upload", key=upload.key, upload_id=upload.upload_id)
        except StoreError:
            self._meta.uploads.disown(upload.id)
            return
        self._meta.uploads.remove(upload.id)
        reach(Point.ABORT_AFTER_FORGET)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group that matters; cancellation goes before all."""
    leaves = [
        _first_error(each) if isinstance(each, BaseExceptionGroup) else each
        for each in group.exceptions
    ]
    return next((leaf for leaf in leaves if not isinstance(leaf, Exception)), leaves[0])
