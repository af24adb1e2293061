"""Retention in the cache: which checkpoints leave it before there is need of room.

Only what was written here, and whole checkpoints: all their files closed, in the store, and in the
warm tier where there is one. So whatever a kill or a pinned file leaves behind in the cache, the
next tier has the checkpoint complete. What was fetched, by readers or because a person wanted it,
stays until there is need of room (`cache.reaper`): retention would take it from under a restore. A
pointer keeps nothing in the cache, since what it names can be read all the same.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog
import trio

from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.cached import CachedRow, cached_files
from cachefs.meta.rows import GenerationRow
from cachefs.model import checkpoints
from cachefs.model.retention import Kept, Rules, Verdict, judge
from cachefs.tiers.complete import Complete
from cachefs.tiers.grouping import by_checkpoint, gently

log = structlog.get_logger("cachefs.cache")

_STAYS = {"open": "it is in use", "pinned": "it is pinned"}
"""Why a cache file stays -> what that means for its checkpoint."""


class HotRetention:
    """Finds the checkpoints in the cache, judges them, lets go of those that may go."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        complete: Complete,
        *,
        keeps: Callable[[GenerationRow], str | None],
        evict: Callable[[int], Awaitable[int]],
        lacks: Callable[[str], bool],
    ) -> None:
        """`keeps`: why a generation may not leave the cache now (`dirty`, `open`, `uncopied`,
        `pinned`); `evict`: forgets its cache file, if it still may go, and returns the bytes;
        `lacks`: whether the next tier lacks part of a checkpoint, or is not there to be asked."""
        self._meta = meta
        self._queue = queue
        self._complete = complete
        self._keeps = keeps
        self._evict = evict
        self._lacks = lacks

    async def look(self, rules: Rules) -> list[Verdict]:
        """What would become of each checkpoint in the cache now, newest first."""
        return (await self._look(rules))[0]

    async def apply(self, rules: Rules) -> list[Verdict]:
        """Let go of what may go; the verdicts by which that was decided."""
        verdicts, groups = await self._look(rules)
        for verdict in verdicts:
            if verdict.goes:
                await self._release(verdict, groups[verdict.checkpoint.root])
        return verdicts

    async def _look(self, rules: Rules) -> tuple[list[Verdict], dict[str, list[CachedRow]]]:
        rows = cached_files(self._meta.db, self._meta.dentries)
        groups, _ = await by_checkpoint(rows, self._complete)
        kept: list[Kept] = []
        fetched: list[Kept] = []
        async for root, members in gently(groups.items()):
            was_fetched = any(row.was_fetched for row in members)
            (fetched if was_fetched else kept).append(self._describe(root, members))
        verdicts = judge(rules, kept, time.time_ns())
        verdicts += [Verdict(each, False, "it was fetched again") for each in fetched]
        return verdicts, groups

    def _describe(self, root: str, rows: Sequence[CachedRow]) -> Kept:
        reasons = {self._why_kept(row) for row in rows} - {None}
        stays = next((_STAYS[each] for each in sorted(_STAYS) if each in reasons), "")
        return Kept(
            root,
            checkpoints.step_of(root),
            sum(row.size for row in rows),
            max(row.changed_ns for row in rows),
            not reasons and self._is_finished(root),
            stays,
        )

    def _why_kept(self, row: CachedRow) -> str | None:
        gen = self._meta.generations.get(row.gen)
        return self._keeps(gen) if gen is not None else None

    def _is_finished(self, root: str) -> bool:
        """Whether the checkpoint is whole, and the next tier and the store show all of it as it is
        here; what is not in the cache any more is nowhere else."""
        return (
            self._complete.is_finished(root)
            and not self._pending({each.dentry for each in self._complete.members(root)})
            and not self._lacks(root)
        )

    def _pending(self, dentries: Collection[int]) -> bool:
        return any(self._queue.of_dentry(each) for each in dentries)

    async def _release(self, verdict: Verdict, rows: Sequence[CachedRow]) -> None:
        if any(map(self._why_kept, rows)) or not self._is_finished(verdict.checkpoint.root):
            return  # Somebody uses it, or has written to it, while others were let go.
        files = nbytes = 0
        for row in rows:
            freed = await self._evict(row.gen)
            files, nbytes = files + 1, nbytes + freed
            await trio.lowlevel.checkpoint()
        log.info(
            "removed from the cache",
            checkpoint=verdict.checkpoint.root,
            reason=verdict.reason,
            files=files,
            nbytes=nbytes,
        )
