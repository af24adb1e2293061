"""Retention in the warm tier: finds the checkpoints there, judges them, removes those that may go.

What a pointer or symlink names stays: one that is in the tier, or is on its way there. From the
store nothing is removed but what was removed in the mount.

Tables are gone through a few rows at a time, so that requests are served in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import structlog
import trio

from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.warm import WarmRow, WarmState
from cachefs.model import checkpoints
from cachefs.model.retention import Kept, Rules, Verdict, judge
from cachefs.model.states import GenState
from cachefs.tiers.complete import Complete, Sign
from cachefs.tiers.grouping import by_checkpoint, gently
from cachefs.tiers.plan import Copy
from cachefs.tiers.warm import WarmTier

log = structlog.get_logger("cachefs.warm")

_POINTER_SIZE = 4096
"""Bytes of the largest file that is taken for a pointer."""


class Retention:
    """Applies `rules` to one warm tier."""

    def __init__(
        self, meta: Meta, queue: EffectQueue, tier: WarmTier, complete: Complete, rules: Rules
    ) -> None:
        self._meta = meta
        self._queue = queue
        self._tier = tier
        self._complete = complete
        self._rules = rules

    async def look(self, rules: Rules) -> list[Verdict]:
        """What would become of each checkpoint in the tier now by these rules, newest first. Raises
        OSError."""
        return (await self._look(rules))[0]

    async def _look(self, rules: Rules) -> tuple[list[Verdict], dict[str, list[WarmRow]]]:
        groups, others = await self._groups()
        links = [row for rows in groups.values() for row in rows if row.gen == 0]
        named = await self._named(groups, [row for row in (*links, *others) if _is_held(row)])
        kept = [
            self._describe(root, rows, named.get(root, ""))
            async for root, rows in gently(groups.items())
        ]
        return judge(rules, kept, time.time_ns()), groups

    async def apply(self) -> list[Verdict]:
        """Remove what may go; the verdicts by which that was decided. Raises OSError."""
        async with self._tier.lock:
            verdicts, groups = await self._look(self._rules)
            for verdict in verdicts:
                if verdict.goes:
                    await self._release(verdict, filter(_is_held, groups[verdict.checkpoint.root]))
        return verdicts

    async def _groups(self) -> tuple[dict[str, list[WarmRow]], list[WarmRow]]:
        """(checkpoint -> rows of all its files, where the tier has any; rows of other files)."""
        groups, others = await by_checkpoint(self._meta.warm.all(), self._complete)
        return {root: rows for root, rows in groups.items() if any(map(_is_held, rows))}, others

    def _describe(self, root: str, rows: Sequence[WarmRow], named: str) -> Kept:
        held = [row for row in rows if _is_held(row)]
        lacks = any(row.state == WarmState.LACKING for row in rows)
        return Kept(
            root,
            checkpoints.step_of(root),
            sum(row.size for row in held),
            max(row.mtime_ns for row in held),
            not lacks
            and self._complete.is_whole(root, [row.path for row in held])
            and all(map(self._is_in_store, held))
            and not self._complete.lacks(root),
            named,
        )

    def _is_in_store(self, row: WarmRow) -> bool:
        if self._queue.of_dentry(row.dentry):
            return False
        if row.gen == 0:
            return True  # A symlink without an effect of its own is shown.
        gen = self._meta.generations.get(row.gen)
        if gen is not None:
            return gen.state == GenState.DURABLE
        return any(each.gen == row.gen for each in self._meta.objects.of_dentry(row.dentry))

    # -- pointers -----------------------------------------------------------------------------

    async def _named(self, roots: Iterable[str], rows: Iterable[WarmRow]) -> dict[str, str]:
        """Checkpoint -> what a pointer that names it has to say for it."""
        named: dict[str, str] = {}
        async for sign in gently([*await self._shown(rows), *await self._coming()]):
            for root in roots:
                if self._names(sign, root):
                    named.setdefault(root, f"named by {sign.path}")
        return named

    def _names(self, sign: Sign, root: str) -> bool:
        if checkpoints.is_named_by(root, sign.path, sign.text):
            return True
        if not sign.is_link or self._complete.root(sign.path) == root:
            return False
        paths = checkpoints.named_paths(sign.path, sign.text)
        return any(self._complete.root(path) == root for path in paths[:1])

    async def _shown(self, rows: Iterable[WarmRow]) -> list[Sign]:
        """The pointers that are in the tier."""
        pointers = [
            row
            for row in rows
            if row.size <= _POINTER_SIZE and self._complete.is_sign(row.path, is_link=row.gen == 0)
        ]
        text_of = self._tier.directory.text_of
        texts = await trio.to_thread.run_sync(
            lambda: [text_of(row.path, checkpoints.POINTER_MAX) for row in pointers]
        )
        return [
            Sign(row.dentry, row.path, row.gen, text.decode("utf-8", "replace"))
            for row, text in zip(pointers, texts, strict=True)
        ]

    async def _coming(self) -> list[Sign]:
        """Those of which a copy is still to be shown."""
        copies = []
        async for wanted in gently(self._meta.warm.wanted()):
            path = self._meta.dentries.path_of(wanted.dentry)
            copy = Copy(wanted, path.decode(), None) if path is not None else None
            if copy is not None and wanted.size <= _POINTER_SIZE and self._is_pointer(copy):
                copies.append(copy)
        return await trio.to_thread.run_sync(lambda: list(map(self._tier.stager.read, copies)))

    def _is_pointer(self, copy: Copy) -> bool:
        is_link = copy.wanted.target is not None
        outside = is_link or self._complete.root(copy.path) is None
        return outside and self._complete.is_sign(copy.path, is_link=is_link)

    # -- removing -----------------------------------------------------------------------------

    async def _release(self, verdict: Verdict, held: Iterable[WarmRow]) -> None:
        rows = list(held)
        if not all(map(self._is_in_store, rows)):
            return  # Written anew while others were removed.
        if await self._tier.remove(rows):
            return  # It is told. All counts as there, and is removed again, until the rest goes.
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


def _is_held(row: WarmRow) -> bool:
    return row.state == WarmState.HELD
