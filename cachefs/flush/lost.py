"""Multipart uploads that were begun, but whose id never arrived.

The answer to the request that begins an upload is the only thing that names it: when that is lost
(a broken connection, a daemon or mover that died, an effect given up) the store keeps an upload
that nobody completes or aborts. So each request is noted before it is made, and a note that is left
over is looked into once the request cannot be on its way any more.

Other writers may upload below the same prefix, even to the same key, and theirs must live. Ours is
told by what only a lost one can be: begun for that key when the request was made (within what
clocks may differ), unknown to the journal, and without any part, for who has no id cannot send
one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cachefs.errors import NoSuchUpload, Refused, StoreError, Throttled
from cachefs.flush.client import StoreClient
from cachefs.meta import Meta
from cachefs.meta.rows import UploadRow
from cachefs.store.base import UploadInfo

_S = 1_000_000_000
GRACE = 60.0
"""Seconds after which a request is not on its way any more, and a living upload has parts."""
_SKEW = 900.0
"""Seconds that the store's clock may be off; S3 refuses requests beyond (RequestTimeTooSkewed)."""


class Request:
    """One wish for an upload, which may take several tries."""

    def __init__(self, note: UploadRow) -> None:
        self.note = note
        self.may_be_lost = False

    def failed(self, error: StoreError) -> None:
        """A try failed; unless the store said no, it may have begun an upload all the same."""
        if not isinstance(error, Refused | Throttled):
            self.may_be_lost = True


class LostUploads:
    """Notes of requests without an answer, and the search for what came of them."""

    def __init__(self, meta: Meta, client: StoreClient) -> None:
        self._meta = meta
        self._client = client
        self._under_way: set[int] = set()

    @asynccontextmanager
    async def asking(self, key: str) -> AsyncIterator[Request]:
        """Around the request that begins an upload of `key`, and the record of its answer."""
        request = Request(UploadRow(0, 0, key, "", 0, None, time.time_ns()))
        self._meta.uploads.add(request.note, ())
        self._under_way.add(request.note.id)
        try:
            yield request
        except Refused:
            self._forget(request)
            raise
        else:
            self._forget(request)
        finally:
            self._under_way.discard(request.note.id)

    def _forget(self, request: Request) -> None:
        if not request.may_be_lost:
            self._meta.uploads.remove(request.note.id)

    async def seek(self, note: UploadRow) -> None:
        """Abort what a request that was noted left behind, if it is time to look. StoreError."""
        age = (time.time_ns() - note.started_ns) / _S
        if note.id in self._under_way or 0 <= age < GRACE:
            return
        found: list[UploadInfo] = await self._client.call("list_uploads", prefix=note.key)
        if self._is_asked_for(note.key):
            return
        for upload_id in self._suspects(note, found):
            if await self._is_empty(note.key, upload_id):
                await self._client.call("abort_upload", key=note.key, upload_id=upload_id)
        self._meta.uploads.remove(note.id)

    def _is_asked_for(self, key: str) -> bool:
        """Whether another request for the key is under way: its upload would look the same."""
        notes = (note for note in self._meta.uploads.all() if note.id in self._under_way)
        return any(note.key == key for note in notes)

    def _suspects(self, note: UploadRow, found: list[UploadInfo]) -> list[str]:
        known = {each.upload_id for each in self._meta.uploads.all()}
        return [
            each.upload_id
            for each in found
            if self._client.relative(each.key) == note.key
            and each.upload_id not in known
            and abs(each.started_ns - note.started_ns) <= _SKEW * _S
        ]

    async def _is_empty(self, key: str, upload_id: str) -> bool:
        try:
            return not await self._client.call("list_parts", key=key, upload_id=upload_id)
        except NoSuchUpload:
            return False
