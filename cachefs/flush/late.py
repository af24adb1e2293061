"""Requests without an answer that may land after the deletion of what they show.

A reply was lost, or the daemon died while a request was on its way, and then the name was deleted.
The conditions of such a request (see `flush.committer`) let it do no harm to whatever else the key
holds, but a key that was just emptied is free. So the row of a deleted key stays while requests for
it are unanswered, with the time of the deletion, and the key is looked at again once they cannot be
on their way any more: what it holds then, if it is what one of them was to make, is deleted.
"""

from __future__ import annotations

import time

import structlog

from cachefs.errors import NotFound, StoreError
from cachefs.flush.client import StoreClient
from cachefs.flush.lost import GRACE
from cachefs.flush.queue import EffectQueue
from cachefs.flush.receipt import intents_of
from cachefs.meta import Meta
from cachefs.meta.rows import ObjectRow
from cachefs.store.base import ObjectInfo

log = structlog.get_logger("cachefs.flush")

_S = 1_000_000_000


class LateRequests:
    """Looks at such keys."""

    def __init__(self, meta: Meta, queue: EffectQueue, client: StoreClient) -> None:
        self._meta = meta
        self._queue = queue
        self._client = client

    async def sweep(self) -> None:
        """Look at all for which it is time."""
        for row in self._meta.objects.unanswered():
            age = (time.time_ns() - row.mtime_ns) / _S
            if 0 <= age < GRACE or not self._is_unused(row):
                continue
            try:
                await self._clear(row)
            except StoreError as error:
                log.info(
                    "a deleted key could not be looked at; later", key=row.key, reason=str(error)
                )

    def _is_unused(self, row: ObjectRow) -> bool:
        """Whether nothing has happened to the key, nor is about to."""
        return self._meta.objects.get(row.key) == row and self._queue.is_unused(row.key)

    async def _clear(self, row: ObjectRow) -> None:
        with self._queue.under_way.sending(row.key):  # Who wants the key now waits.
            if await self._holds_ours(row) and self._is_unused(row):
                with self._queue.doubts.deleting([row.key]):
                    await self._client.call("delete", keys=[row.key])
                log.info("deleted what came after its deletion", key=row.key)
            if self._is_unused(row):
                self._meta.objects.remove(row.key)

    async def _holds_ours(self, row: ObjectRow) -> bool:
        try:
            info: ObjectInfo = await self._client.call("head", key=row.key)
        except NotFound:
            return False
        return any(each.is_in(info) for each in intents_of(row))
