"""Retention in the warm tier: finds the checkpoints there, judges them, removes those that may go.

The cache is not retention's affair: there, space decides (`cache.reaper`). From the store nothing
is ever removed but what was removed in the mount.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import structlog
import trio

from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.warm import WarmRow, WarmState
from cachefs.model import checkpoints, names
from cachefs.model.retention import Kept, Rules, Verdict, judge
from cachefs.model.states import GenState
from cachefs.tiers.warm import WarmTier

log = structlog.get_logger("cachefs.warm")


class Retention:
    """Applies `rules` to one warm tier."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        tier: WarmTier,
        rules: Rules,
        *,
        patterns: Sequence[str],
        markers: Sequence[str],
    ) -> None:
        self._meta = meta
        self._queue = queue
        self._tier = tier
        self._rules = rules
        self._patterns = patterns
        self._markers = markers

    def look(self) -> list[Verdict]:
        """What would become of each checkpoint in the tier now, newest first."""
        groups = self._groups()
        kept = [self._describe(root, rows) for root, rows in groups.items()]
        return judge(self._rules, kept, time.time_ns())

    async def apply(self) -> list[Verdict]:
        """Remove what may go; the verdicts by which that was decided. Raises OSError."""
        verdicts = self.look()
        for verdict in verdicts:
            if verdict.goes:
                await self._release(verdict)
        return verdicts

    def _groups(self) -> dict[str, list[WarmRow]]:
        groups: dict[str, list[WarmRow]] = defaultdict(list)
        for row in self._meta.warm.all():
            found = checkpoints.find(row.path, self._patterns)
            if row.state == WarmState.HELD and found is not None:
                groups[found.root].append(row)
        return groups

    def _describe(self, root: str, rows: Sequence[WarmRow]) -> Kept:
        found = checkpoints.find(rows[0].path, self._patterns)
        return Kept(
            root,
            found.step if found is not None else None,
            sum(row.size for row in rows),
            max(row.mtime_ns for row in rows),
            self._is_complete(root, rows) and all(self._is_in_store(row) for row in rows),
        )

    def _is_complete(self, root: str, rows: Sequence[WarmRow]) -> bool:
        paths = [row.path for row in rows]
        return paths == [root] or any(checkpoints.is_marker(p, self._markers) for p in paths)

    def _is_in_store(self, row: WarmRow) -> bool:
        if self._queue.of_dentry(row.dentry):
            return False
        if row.gen == 0:
            return True  # A symlink without an effect of its own is shown.
        gen = self._meta.generations.get(row.gen)
        if gen is not None:
            return gen.state == GenState.DURABLE
        return any(each.gen == row.gen for each in self._meta.objects.of_dentry(row.dentry))

    async def _release(self, verdict: Verdict) -> None:
        """Markers first, so that nobody takes what is left for a checkpoint."""
        rows = self._groups().get(verdict.checkpoint.root, [])
        rows.sort(key=lambda row: (not names.matches(self._markers, row.path), row.path))
        if not all(self._is_in_store(row) for row in rows):
            return  # Written anew while others were removed.
        await trio.to_thread.run_sync(self._remove, rows)
        with self._meta.transaction():
            for row in rows:
                row.state = WarmState.RELEASED
                self._meta.warm.put(row)
        log.info(
            "removed from the warm tier",
            checkpoint=verdict.checkpoint.root,
            reason=verdict.reason,
            files=len(rows),
            nbytes=verdict.checkpoint.nbytes,
        )

    def _remove(self, rows: Sequence[WarmRow]) -> None:
        for row in rows:
            self._tier.directory.remove(row.path)
        self._tier.directory.sync([row.path for row in rows])
