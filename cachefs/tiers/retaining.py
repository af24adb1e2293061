"""Retention in the warm tier: finds the checkpoints there, judges them, removes those that may go.

What a pointer or symlink names stays: one that is in the tier, or is on its way there. Where what
is newer finds no room, older checkpoints that the store has whole give way, and a pointer that
names one of them goes first if its new text waits for what is newer. From the store nothing is
removed but what was removed in the mount.

Tables are gone through a few rows at a time, so that requests are served in between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog
import trio

from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.room import room
from cachefs.meta.warm import MemberRow, WarmRow, WarmState
from cachefs.model import checkpoints
from cachefs.model.retention import Coming, Kept, Rules, Verdict, judge, make_room
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

    async def _look(self, rules: Rules) -> tuple[list[Verdict], _Found]:
        groups, others = await self._groups()
        links = [row for rows in groups.values() for row in rows if row.gen == 0]
        named = await self._named(groups, [row for row in (*links, *others) if _is_held(row)])
        kept = [
            self._describe(root, rows, named.get(root, []))
            async for root, rows in gently(groups.items())
        ]
        verdicts = judge(rules, kept, time.time_ns())
        coming = self._coming_checkpoint()
        if coming is not None and rules.any:
            verdicts = make_room(rules, verdicts, coming)
        return verdicts, _Found(groups, named, coming)

    def _coming_checkpoint(self) -> Coming | None:
        """What found no room in the tier."""
        lacking = self._tier.room.lacking
        if lacking is None:
            return None
        whole = below = False
        if lacking.is_checkpoint:
            whole = self._complete.is_finished(lacking.name)
            below = self._is_below(lacking.name)
        return Coming(lacking.name, lacking.nbytes, lacking.changed_ns, whole, below)

    async def apply(self) -> list[Verdict]:
        """Remove what may go; the verdicts by which that was decided. Raises OSError."""
        async with self._tier.lock:
            verdicts, found = await self._look(self._rules)
            gone = [each for each in verdicts if each.goes and await self._release(each, found)]
            if found.coming is not None:
                freed = sum(each.checkpoint.nbytes for each in gone)
                itself = any(each.checkpoint.root == found.coming.root for each in gone)
                is_made = itself or freed >= found.coming.nbytes
                self._tier.note_judged(is_made=is_made, has_changed=bool(gone))
        return verdicts

    async def _groups(self) -> tuple[dict[str, list[WarmRow]], list[WarmRow]]:
        """(checkpoint -> rows of all its files, where the tier has any; rows of other files)."""
        groups, others = await by_checkpoint(self._meta.warm.all(), self._complete)
        return {root: rows for root, rows in groups.items() if any(map(_is_held, rows))}, others

    def _describe(self, root: str, rows: Sequence[WarmRow], named: Sequence[_Naming]) -> Kept:
        held = [row for row in rows if _is_held(row)]
        lacks = any(row.state == WarmState.LACKING for row in rows)
        below = all(map(self._is_in_store, held)) and self._is_below(root)
        return Kept(
            root,
            checkpoints.step_of(root),
            sum(row.size for row in held),
            max(row.mtime_ns for row in held),
            not lacks
            and self._complete.is_whole(root, [row.path for row in held])
            and below
            and not self._complete.lacks(root),
            f"named by {named[0].path}" if named else "",
            below,
            any(each.outdated is None for each in named),
            below and len(held) < len(rows) and not lacks,
        )

    def _is_below(self, root: str) -> bool:
        """Whether the store has all that there is of a checkpoint, in whatever tier."""
        members = self._complete.members(root)
        return not any(each.is_open or not self._is_member_in_store(each) for each in members)

    def _is_member_in_store(self, member: MemberRow) -> bool:
        if self._queue.of_dentry(member.dentry):
            return False
        gen = self._meta.generations.get(member.gen) if member.gen is not None else None
        if gen is not None:
            return gen.state == GenState.DURABLE
        return member.is_link or any(e.etag for e in self._meta.objects.of_dentry(member.dentry))

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

    async def _named(
        self, roots: Iterable[str], rows: Iterable[WarmRow]
    ) -> dict[str, list[_Naming]]:
        """Checkpoint -> the pointers that name it."""
        named: dict[str, list[_Naming]] = defaultdict(list)
        known = {row.dentry: row for row in rows}
        wanted = {each.dentry for each in self._meta.warm.wanted()}
        signs = [(sign, known[sign.dentry]) for sign in await self._shown(known.values())]
        async for sign, row in gently([*signs, *((each, None) for each in await self._coming())]):
            is_old = sign.dentry in wanted or self._meta.dentries.path_of(sign.dentry) is None
            naming = _Naming(sign.path, row if is_old else None)
            for root in roots:
                if self._names(sign, root):
                    named[root].append(naming)
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

    async def _release(self, verdict: Verdict, found: _Found) -> bool:
        await room(self._meta.db)
        root = verdict.checkpoint.root
        rows = list(filter(_is_held, found.groups.get(root, ())))
        below = verdict.checkpoint.safe or self._is_below(root)
        if not below or not all(map(self._is_in_store, rows)):
            return False  # Written anew while others were removed.
        if not await self._take_pointers(each.outdated for each in found.named.get(root, ())):
            return False
        stuck = await self._tier.remove(rows)  # That is told; the next look tries it again.
        gone = [row for row in rows if row not in stuck]
        with self._meta.transaction():
            for row in (*gone, *self._uncopied(root)):
                row.state = WarmState.RELEASED
                self._meta.warm.put(row)
        if stuck:
            return False
        log.info(
            "removed from the warm tier",
            checkpoint=root,
            reason=verdict.reason,
            files=len(rows),
            nbytes=verdict.checkpoint.nbytes,
        )
        return True

    async def _take_pointers(self, rows: Iterable[WarmRow | None]) -> bool:
        """What names a checkpoint that has to go before what is to be said instead; False: it
        cannot be removed."""
        pointers = [row for row in rows if row is not None]
        if await self._tier.remove(pointers):
            return False
        with self._meta.transaction():
            for row in pointers:
                row.state = WarmState.LACKING
                self._meta.warm.put(row)
        return True

    def _uncopied(self, root: str) -> list[WarmRow]:
        """Rows for the files of a checkpoint of which no copy is to be made any more."""
        names = {each.dentry: each.path for each in self._complete.members(root)}
        wanted = (each for each in self._meta.warm.wanted() if each.dentry in names)
        return [WarmRow(e.dentry, names[e.dentry], e.gen, 0, 0) for e in wanted]


@dataclass(frozen=True, slots=True)
class _Naming:
    """A pointer that names a checkpoint. `outdated`: its copy, if another one is to replace it."""

    path: str
    outdated: WarmRow | None


@dataclass(frozen=True, slots=True)
class _Found:
    """What verdicts were made of."""

    groups: dict[str, list[WarmRow]]
    named: dict[str, list[_Naming]]
    coming: Coming | None


def _is_held(row: WarmRow) -> bool:
    return row.state == WarmState.HELD
