"""The warm tier of a mount: made from the settings, connected to who asks for it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog
import trio

from cachefs.cache.device import CacheDevice
from cachefs.cache.warmdir import Shown, WarmDirectory
from cachefs.config import Settings
from cachefs.daemon.keeping import follow, warm_rules
from cachefs.errors import StoreError
from cachefs.flush.commits import Commits
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.retention import Rules, Verdict
from cachefs.observe.metrics import Metrics
from cachefs.tiers.complete import Complete
from cachefs.tiers.plan import shown
from cachefs.tiers.retaining import Retention
from cachefs.tiers.warm import Files, WarmTier
from cachefs.vfs.contents import Contents
from cachefs.vfs.eviction import Eviction
from cachefs.vfs.virtual import Inspector

log = structlog.get_logger("cachefs.warm")

_T = TypeVar("_T")

ReadWarm = Callable[[str, str, int, int, "str | None"], Awaitable[bool]]
"""Bytes [start, end) of an object (key, version) into a file, if the warm tier has them."""


async def read_nothing(key: str, path: str, start: int, end: int, etag: str | None) -> bool:
    """Without a warm tier."""
    return False


class Tiering:
    """One warm tier and what it keeps."""

    def __init__(
        self,
        settings: Settings,
        meta: Meta,
        devices: Sequence[CacheDevice],
        queue: EffectQueue,
        metrics: Metrics,
        complete: Complete,
    ) -> None:
        tiers = settings.tiers
        assert tiers.warm is not None
        self._meta = meta
        self._queue = queue
        self._complete = complete
        directory = WarmDirectory(tiers.warm, settings.node.id)
        self.tier = WarmTier(meta, devices, directory, complete)
        self.rules = warm_rules(tiers)
        self.tier.room.can_be_made = self.rules.any
        self._retention = Retention(meta, queue, self.tier, complete, self.rules)
        self.tier.on_copied = metrics.counter("cachefs_warm_bytes_total").inc
        self.tier.on_change = queue.kick
        if tiers.warm_policy == "before":
            queue.holds_back = self.tier.holds_back

    def attach(
        self, inspector: Inspector, eviction: Eviction, contents: Contents, commits: Commits
    ) -> None:
        """Tell those who have to know of copies here; hear of damage, and of other nodes."""

        async def elsewhere(root: str) -> Files | None:
            try:
                parts = await commits.elsewhere(root)
            except StoreError:
                return None
            return None if parts is None else [(part.key, part.size) for part in parts]

        self.tier.elsewhere = elsewhere
        report = contents.on_damaged

        def damaged(key: str) -> None:
            report(key)
            self._distrust(key)

        contents.on_damaged = damaged
        inspector.in_warm_tier = self.tier.has
        eviction.is_needed = self.tier.is_needed
        eviction.on_leaving = self.tier.note_evicted

    async def look(self) -> str | None:
        """Why nothing can be copied, as far as the directory tells soon."""
        with trio.move_on_after(_FIRST_LOOK):
            await self.tier.look()
        return self.tier.problem

    async def run(self) -> None:
        """Keep the tier up to date; never returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.tier.run, self._queue.next_change)
            nursery.start_soon(self.tier.watch)
            if self.rules.any:
                nursery.start_soon(follow, self._queue.next_change, self.retain)

    async def retain(self) -> list[Verdict]:
        """Apply the rules, if the tier works; the verdict on each checkpoint, newest first."""
        if self.tier.problem is not None:
            return []
        try:
            return await self._retention.apply()
        except OSError as error:
            log.warning("nothing is removed from the warm tier", reason=str(error))
            return []

    async def verdicts(self, rules: Rules) -> list[Verdict]:
        """What rules would do now. Raises OSError."""
        return await self._retention.look(rules)

    def lacks(self, root: str) -> bool:
        """Whether part of a checkpoint is not there, or the tier cannot be asked."""
        return self.tier.trouble is not None or self._complete.lacks(root)

    async def read(self, key: str, path: str, start: int, end: int, etag: str | None) -> bool:
        """See `ReadWarm`. A copy that anybody has touched is not taken."""

        def read(copy: Shown) -> bool:
            return self.tier.directory.read_into(copy, path, start, end)

        return await self._from_copy(key, etag, read) or False

    async def read_bytes(self, key: str, start: int, end: int, etag: str | None) -> bytes | None:
        """The same bytes themselves, if the tier has them."""

        def read(copy: Shown) -> bytes | None:
            return self.tier.directory.read(copy, start, end)

        return await self._from_copy(key, etag, read)

    async def _from_copy(
        self, key: str, etag: str | None, read: Callable[[Shown], _T]
    ) -> _T | None:
        row = self._meta.warm.of_object(key, etag) if etag is not None else None
        if row is None or self.tier.is_silent:
            return None
        try:
            return await trio.to_thread.run_sync(read, shown(row))
        except OSError as error:
            log.warning("a copy cannot be read: asking the store", path=row.path, reason=str(error))
            return None

    def _distrust(self, key: str) -> None:
        """What was read of an object was not what had been saved: it may have come from a copy."""
        found = self._meta.objects.get(key)
        row = self._meta.warm.of_object(key, found.etag) if found is not None else None
        if row is not None:
            log.error("a copy may be damaged: it is not read any more", path=row.path)
            self.tier.distrust(row)

    async def regain(self, row: GenerationRow, path: str) -> bool:
        """The bytes of a generation into a cache file, on the disk, if a copy has them."""
        directory = self.tier.directory

        def copy() -> bool:
            for known in self._meta.warm.of_gen(row.gen):
                if directory.read_into(shown(known), path, 0, row.size):
                    with open(path, "rb+") as file:
                        file.truncate(row.size)
                        os.fsync(file.fileno())
                    return True
            return False

        if self.tier.problem is not None and not await self._comes():
            return False
        try:
            return await trio.to_thread.run_sync(copy, abandon_on_cancel=False)
        except OSError as error:
            log.warning("a copy cannot be read", generation=row.gen, reason=str(error))
            return False

    async def _comes(self) -> bool:
        """Whether the tier can be used soon: it is looked at when the mount begins."""
        with trio.move_on_after(_FIRST_LOOK):
            while self.tier.problem is not None:  # noqa: ASYNC110
                await trio.sleep(0.05)
        return self.tier.problem is None

    def status(self) -> dict[str, Any]:
        """For `status`."""
        files, nbytes = self._meta.warm.totals()
        return {
            "path": str(self.tier.directory.directory),
            "files": files,
            "bytes": nbytes,
            "files_left": len(self._meta.warm.wanted()),
            "files_withheld": len(self.tier.withheld),
            "files_obstructed": len(self.tier.obstacles.all),
            "error": self.tier.trouble,
        }


_FIRST_LOOK = 2.0
"""Seconds that a mount waits for the directory's answer."""
