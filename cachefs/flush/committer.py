"""The request that shows something, and what is known of its key before and after.

Conditions: a key that this node knows is overwritten only if it still holds what is known
(If-Match), one that it does not know is written only if it is free (If-None-Match).

Before a request that may show something, an intent is recorded: a row in `object` without an etag.
If the daemon dies or the reply is lost, that row says that the key may hold our bytes, so that a
later rename or delete takes them away.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import trio

from cachefs.errors import Contradiction, NotFound
from cachefs.failpoints import Change
from cachefs.flush.client import StoreClient
from cachefs.flush.queue import EffectQueue
from cachefs.flush.receipt import Intent, intents_of
from cachefs.flush.rescue import Rescue
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, EffectRow, GenerationRow, InodeRow, ObjectRow
from cachefs.model import objectmeta
from cachefs.model.states import Event, GenState, advance
from cachefs.store.base import ObjectInfo

_CONTRADICTIONS = 3
"""Times that a store may say both that a key is taken and that it is free (stores with directories
do, of one that was just emptied) before it is written without a condition."""
_INTENTS = 8
"""Unanswered requests that are remembered for a key."""


class Moot(Exception):
    """The name changed, or must wait again, before the request went out: nothing was shown."""


class Conflict(Exception):
    """The key holds what another writer put there since we last looked."""


class Committer:
    """Shows what an effect shows, under the conditions that keep other writers' work."""

    def __init__(self, meta: Meta, queue: EffectQueue, client: StoreClient) -> None:
        self._meta = meta
        self._queue = queue
        self._client = client
        self._rescue = Rescue(meta, queue, client)
        self._contradictions: Counter[str] = Counter()

    async def _commit(
        self,
        effect: EffectRow,
        dentry: DentryRow,
        gen: GenerationRow | None,
        method: str,
        intent: Intent,
        *,
        sends: int = 0,
        key_argument: str = "key",
        **arguments: Any,
    ) -> ObjectInfo:
        """The request that makes an effect visible, under the entry's key.

        Its turn may take long to come, so what was true before is checked again after it. From
        then on it is not cancelled: an abandoned request might still take place, unrecorded. Nor is
        there any await between its answer and the caller's record of it.
        """
        key = self._queue.key_of(dentry)
        await self._rescue.clear(key, dentry.id)
        with trio.CancelScope() as scope:
            async with self._client.turn(key, sends):
                owner = self._shown_for(effect, key)  # By now perhaps another entry.
                if owner is None or self._rescue.endangered(key, owner):
                    raise Moot
                known = self._intend(owner, key, gen, intent)
                arguments[key_argument] = key
                if not key.endswith("/") and self._contradictions[key] < _CONTRADICTIONS:
                    # A directory's marker holds no bytes that could be lost, and some stores make
                    # markers of their own when something is put below.
                    arguments["if_none_match"] = known is None
                    arguments["if_match"] = known.etag if known else None
                scope.shield = True
                try:
                    with self._queue.under_way.sending(key):
                        info: ObjectInfo = await self._client.send(method, sends=sends, **arguments)
                except Contradiction:
                    self._contradictions[key] += 1
                    raise
        return info

    def _shown_for(self, effect: EffectRow, key: str) -> int | None:
        """The entry that an effect shows something of, if it may still be shown under `key`."""
        row = self._queue.effects.get(effect.id)
        may_go = (
            row is not None
            and self._queue.target_key(row) == key
            and self._queue.may_commit(effect.id)
            and not self._queue.is_held(effect.id)
        )
        return row.dentry if row is not None and may_go else None

    def _intend(
        self, dentry: int, key: str, gen: GenerationRow | None, intent: Intent
    ) -> ObjectRow | None:
        """Record that `key` may show our bytes from now on; returns what it is known to hold."""
        known = self._meta.objects.get(key)
        row = known or ObjectRow(key, dentry, "", 0, None, None, None, None, 0, 1)
        if (
            row.dentry != dentry
        ):  # If this one is removed, whatever the key shows by then has to go.
            row.dentry, row.stale = dentry, 1
        intents = [*intents_of(row), intent][-_INTENTS:]
        row.intents = json.dumps([[each.size, each.metadata] for each in intents])
        with self._meta.transaction(Change.INTEND):
            self._meta.objects.put(row)
            if gen is not None and gen.state == GenState.SEALED:
                gen.state = advance(GenState.SEALED, Event.START)
                self._meta.generations.set_state(gen.gen, gen.state)
        return row if row.etag else None

    async def _settle(
        self, key: str, size: int, crc64: int | None, metadata: dict[str, str]
    ) -> ObjectInfo:
        """A condition failed. Did a try of ours succeed whose answer was lost, or is it a conflict?

        Returns the object if it is what was to be made. Moot: what is known of the key is mended,
        try again. Conflict: it holds what another writer made.
        """
        known = self._meta.objects.get(key)
        try:
            info: ObjectInfo = await self._client.patiently("head", key=key)
        except NotFound:
            if known is None or not known.etag:
                self._contradictions[key] += 1
                raise Contradiction(f"{key} is said to be taken, and to be free") from None
            self._now_known(known, "", 0)
            raise Moot from None
        if Intent(size, metadata).is_in(info) and crc64 in (None, info.crc64):
            return info
        if known is not None and known.etag == info.etag:
            self._contradictions[key] += 1  # Mostly, a request of ours was answered meanwhile.
            raise Contradiction(f"{key} is what it is known to be, and is said not to be") from None
        if known is not None and any(each.is_in(info) for each in intents_of(known)):
            self._now_known(known, info.etag, info.size)
            raise Moot
        raise Conflict(f"{key} was changed by another writer")

    def _now_known(self, known: ObjectRow | None, etag: str, size: int) -> None:
        """The key holds something else than was known, and it is nobody's but ours."""
        if known is not None:
            known.etag, known.size, known.stale, known.parts = etag, size, 1, None
            self._meta.objects.put(known)

    def attributes(self, inode: InodeRow) -> dict[str, str]:
        """The inode's attributes as user metadata."""
        xattrs = self._meta.inodes.xattrs(inode.ino)
        return objectmeta.encode(inode.mode, inode.uid, inode.gid, inode.mtime_ns, xattrs)
