"""Bytes that only the bucket has, under a key that another entry is about to take.

Renames that go round in a circle (a to t, b to a, t to b) leave no order in which each copy finds
its source: the object in the way is moved aside first, to a reserved key, and goes from there to
where its name is now.
"""

from __future__ import annotations

from dataclasses import replace

from cachefs.failpoints import Change, Point, reach
from cachefs.flush.client import StoreClient
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import ObjectRow
from cachefs.model.effects import EffectKind
from cachefs.store.base import ObjectInfo

_ASIDE = ".cachefs/moving/"


class Rescue:
    """Moves objects aside that are still to be copied."""

    def __init__(self, meta: Meta, queue: EffectQueue, client: StoreClient) -> None:
        self._meta = meta
        self._queue = queue
        self._client = client

    def endangered(self, key: str, dentry: int) -> ObjectRow | None:
        """What would be lost if `dentry` were shown under `key` now."""
        known = self._meta.objects.get(key)
        if known is None or not known.etag or key.endswith("/"):
            return None  # A directory's marker is made anew.
        return known if self._wanted_by(known, dentry) is not None else None

    def _wanted_by(self, known: ObjectRow, dentry: int) -> int | None:
        """The entry that an object is still to be copied for, other than `dentry` itself."""
        copies = self._queue.copies_of(known.key)
        if copies:
            return copies[0].dentry
        if known.dentry in (None, dentry) or known.stale:
            return None
        effects = self._queue.of_dentry(known.dentry or 0)
        moving = any(each.kind == EffectKind.RELOCATE for each in effects)
        return known.dentry if moving else None

    async def clear(self, key: str, dentry: int) -> None:
        """Make it safe to show `dentry` under `key`. StoreError."""
        known = self.endangered(key, dentry)
        owner = self._wanted_by(known, dentry) if known is not None else None
        if known is None or owner is None:
            return
        copies = self._queue.copies_of(key)
        # What is shown in passing is another version than the entry's own.
        stale = 1 if copies else 0
        aside = f"{_ASIDE}{owner}" + "".join(f"-{each.end}" for each in copies)
        moved = replace(known, key=aside, dentry=owner, intents=None)
        # Whatever happens, it goes with the name that it belongs to.
        self._meta.objects.put(replace(moved, etag="", stale=1))
        reach(Point.RESCUE_AFTER_INTENT)
        info: ObjectInfo = await self._client.patiently(
            "copy", src=key, dst=aside, if_source_match=known.etag
        )
        reach(Point.RESCUE_AFTER_COPY)
        if self.endangered(key, dentry) != known or self._queue.copies_of(key) != copies:
            await self._client.patiently("delete", keys=[aside])
            self._meta.objects.remove(aside)
            return  # Asked again before anything is overwritten.
        with self._meta.transaction(Change.RESCUE):
            self._meta.objects.put(replace(moved, etag=info.etag, stale=stale))
            self._meta.objects.put(replace(known, dentry=known.dentry if copies else None, stale=1))
            if not copies and self._queue.unpublish_of(key) is None:
                self._queue.let_go(key)
            for each in copies:
                self._queue.copy_from(each, aside)
            self._queue.refresh(owner)
