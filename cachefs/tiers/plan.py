"""What one round of the warm tier has to do: compared are names with copies, in the database."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import trio

from cachefs.cache.warmdir import Shown
from cachefs.meta import Meta
from cachefs.meta.warm import WantedRow, WarmRow, WarmState
from cachefs.model import names
from cachefs.tiers.complete import Complete

_AT_A_TIME = 256
"""Rows that are looked at before requests are served again."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Something to be shown: a cache file, a symlink, or a copy that has another path now."""

    wanted: WantedRow
    path: str
    old: WarmRow | None
    """The copy that this name had until now."""
    moved: bool = False
    """The old copy has the right content."""

    @property
    def dentry(self) -> int:
        """The name."""
        return self.wanted.dentry


@dataclass(slots=True)
class Plan:
    """One round."""

    data: list[Copy] = field(default_factory=list)
    signs: list[Copy] = field(default_factory=list)
    """In the order in which they may be shown."""
    gone: list[WarmRow] = field(default_factory=list)
    """Rows whose name is gone."""
    renamed: list[tuple[WarmRow, str]] = field(default_factory=list)
    """Rows without a copy, and the path that the name has now."""
    leaving: list[WarmRow] = field(default_factory=list)
    """Copies at whose paths nothing will be."""
    renewed: list[WarmRow] = field(default_factory=list)
    """Copies of names that are gone, at whose paths others will be."""
    taken: set[str] = field(default_factory=set)
    """Paths at which a copy is now."""
    blocked: list[Copy] = field(default_factory=list)
    """What cannot be shown in this round, because something else is in its place."""
    lacking: bool = False
    """Something will be copied once it is in the cache, which nobody tells of."""

    @property
    def copies(self) -> list[Copy]:
        """All that is to be shown."""
        return [*self.data, *self.signs]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.data or self.signs or self.gone or self.renamed)

    def set_aside(self, names: Collection[int]) -> None:
        """These cannot be shown now: data that has another path stays where it is."""
        self.blocked += [each for each in self.copies if each.dentry in names]
        self.data = [each for each in self.data if each.dentry not in names]
        self.signs = [each for each in self.signs if each.dentry not in names]
        staying = {id(each.old) for each in self.blocked if each.old is not None}
        self.leaving = [row for row in self.leaving if id(row) not in staying]

    def changes(self, copy: Copy) -> bool:
        """Whether a copy replaces another, or leaves its place."""
        return copy.path in self.taken or copy.moved


def shown(row: WarmRow) -> Shown:
    """The copy that a row tells of."""
    return Shown(row.path, row.size, row.mtime_ns)


class Planner:
    """Makes plans."""

    def __init__(self, meta: Meta, complete: Complete) -> None:
        self._meta = meta
        self._complete = complete

    async def plan(self) -> Plan:
        """Names may change while it is made: what is not in it yet is in the next one."""
        plan = Plan()
        wanted_rows = self._meta.warm.wanted()
        rows = {row.dentry: row for row in self._meta.warm.all()}
        plan.taken = {row.path for row in rows.values() if row.state == WarmState.HELD}
        plan.lacking = any(row.state == WarmState.LACKING for row in rows.values())
        for wanted in wanted_rows:
            path = self.path_of(wanted.dentry)
            if path is not None and not self._complete.is_temp(path):
                self._add(plan, Copy(wanted, path, rows.pop(wanted.dentry, None)))
        staying = set()
        for count, row in enumerate(rows.values()):
            if self._stays(plan, row):
                staying.add(row.path)
            if count % _AT_A_TIME == 0:
                await trio.lowlevel.checkpoint()
        _find_leaving(plan, staying)
        plan.signs.sort(key=self._place)
        return plan

    def path_of(self, dentry: int) -> str | None:
        """A name's path now; None: it is gone."""
        path = self._meta.dentries.path_of(dentry)
        return path.decode() if path is not None else None

    def first_to_go(self, plan: Plan) -> list[WarmRow]:
        """Signs that must not be there while what they tell of changes.

        A pointer that others replace stays until then: what it names is not known here.
        """
        changing = [each for each in plan.data if plan.changes(each)]
        paths = {each.path for each in changing}
        paths |= {each.old.path for each in changing if each.old is not None}
        roots = {self._complete.root(path) for path in paths}
        leaving = [row for row in plan.leaving if roots and self.is_sign(row)]
        root_of = self._complete.root_of_sign
        rows = [row for row in leaving if root_of(row.path) in roots | {None}]
        return rows + [
            row for row in plan.renewed if self.is_sign(row) and root_of(row.path) in roots - {None}
        ]

    def told_of_by(self, plan: Plan, signs: Iterable[WarmRow]) -> set[int]:
        """Names in the checkpoints of signs that cannot be taken away."""
        roots = {self._complete.root_of_sign(row.path) for row in signs} - {None}
        found = set()
        for copy in plan.copies if roots else ():
            paths = [copy.path] if copy.old is None else [copy.path, copy.old.path]
            if not roots.isdisjoint(self._complete.root_of_sign(path) for path in paths):
                found.add(copy.dentry)
        return found

    def in_the_way(self, plan: Plan) -> dict[int, list[WarmRow]]:
        """Name -> copies that leave, and are above the path where that is to be shown, or below it:
        a file has become a directory there, or a directory a file."""
        leaving = {row.path: row for row in plan.leaving}
        paths = sorted(leaving)
        found = {}
        for copy in plan.copies if leaving else ():
            # "0" is the character that follows "/".
            begin, end = (bisect_left(paths, copy.path + each) for each in "/0")
            around = (*names.above(copy.path), *paths[begin:end])
            rows = [leaving[path] for path in around if path in leaving]
            if rows:
                found[copy.dentry] = self.as_they_go(rows)
        return found

    def as_they_go(self, rows: Iterable[WarmRow]) -> list[WarmRow]:
        """Copies in the order in which they have to be removed, the reverse of that in which they
        came: pointers, then markers, the last one first, since each may tell of those before it,
        then the rest."""

        def place(row: WarmRow) -> tuple[bool, bool, int]:
            is_sign = self.is_sign(row)
            is_part = is_sign and self._complete.root_of_sign(row.path) is not None
            return not is_sign, is_part, -abs(row.gen)

        return sorted(rows, key=place)

    def is_sign(self, row: WarmRow) -> bool:
        """Whether a copy tells of others."""
        return self._complete.is_sign(row.path, is_link=row.gen == 0)

    def _add(self, plan: Plan, copy: Copy) -> None:
        is_sign = self._complete.is_sign(copy.path, is_link=copy.wanted.target is not None)
        (plan.signs if is_sign else plan.data).append(copy)

    def _stays(self, plan: Plan, row: WarmRow) -> bool:
        """Whether a copy is where its name is; what is not so goes into the plan."""
        path = self.path_of(row.dentry)
        if path is None:
            plan.gone.append(row)
        elif path == row.path:
            return row.state == WarmState.HELD
        elif row.state == WarmState.HELD:
            self._add(plan, Copy(self._again(row), path, row, moved=True))
        else:
            plan.renamed.append((row, path))
        return False

    def _again(self, row: WarmRow) -> WantedRow:
        entry = self._meta.dentries.by_id(row.dentry)
        inode = self._meta.inodes.get(entry.ino) if entry is not None else None
        ino, target = (inode.ino, inode.target) if inode is not None else (0, None)
        gen = self._meta.generations.get(row.gen)
        ended_ns = gen.sealed_ns or 0 if gen is not None else 0
        return WantedRow(row.dentry, ino, row.gen, 0, 0, row.size, target, ended_ns)

    def _place(self, sign: Copy) -> tuple[bool, int, int]:
        """Signs of checkpoints before those that may name them, each in the order of their ends."""
        is_outside = self._complete.root_of_sign(sign.path) is None
        return is_outside, sign.wanted.ended_ns, sign.dentry


def _find_leaving(plan: Plan, staying: Iterable[str]) -> None:
    coming = {each.path for each in plan.copies}
    used = coming.union(staying)
    old = [each.old for each in plan.copies if each.old is not None]
    rows = [*old, *plan.gone, *(row for row, _ in plan.renamed)]
    for row in rows:
        if row.state != WarmState.RELEASED and row.path not in used:
            plan.leaving.append(row)
    plan.renewed = [row for row in plan.gone if row.state == WarmState.HELD and row.path in coming]
