"""The warm tier: copies of what is saved, at the same paths, on a parallel or network filesystem.

Works in rounds. A round begins with a snapshot: every name whose present content is sealed and has
no copy yet, and every copy whose name has moved or gone. Then, in this order,

 1. all new copies are staged, several at a time: bytes on the disk, under hidden names;
 2. markers that have moved or gone are taken away, unless their place gets a new one;
 3. other files get their place, in the order in which they were sealed;
 4. then markers and symlinks do; 5. then other files that are gone are removed.

So at every instant a marker in the tier has beside it all that was complete when it was, as in the
bucket, with no other server asked. If content changed between the snapshot and its copy, the round
ends before step 4, and the next one begins with a new snapshot.

Runs on the trio thread; what touches the directory runs in other threads. A row of the table `warm`
is written after what it tells of is on the disk, so a kill at any point repeats work at most.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import trio

from cachefs.cache.device import CacheDevice
from cachefs.cache.warmdir import Attributes, WarmDirectory
from cachefs.errors import CacheError
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.meta.warm import WantedRow, WarmRow, WarmState
from cachefs.model import names

log = structlog.get_logger("cachefs.warm")

_AT_ONCE = 4
"""Files that are staged at a time."""
_PAUSE = 0.2
"""Seconds between two rounds at least: what is saved together is copied together."""
_DUTY = 20.0
_RETRY = 5.0


@dataclass(frozen=True, slots=True)
class _Copy:
    """Something to be shown: a cache file, a symlink, or a copy that has another path now."""

    wanted: WantedRow
    path: str
    old: WarmRow | None
    """The copy that this name had until now."""
    moved: bool = False
    """The old copy has the right content."""


@dataclass(slots=True)
class _Plan:
    """One round."""

    copies: list[_Copy] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    """Paths at which nothing will be."""
    gone: list[WarmRow] = field(default_factory=list)
    renamed: list[WarmRow] = field(default_factory=list)
    """Rows without a copy whose name has another path now."""

    @property
    def empty(self) -> bool:
        return not (self.copies or self.gone or self.renamed)


class WarmTier:
    """Keeps the directory up to date, and answers what is in it.

    `on_copied(nbytes)` is told of each new copy, `on_change()` that some survive more than before;
    neither may raise.
    """

    def __init__(
        self,
        meta: Meta,
        devices: Sequence[CacheDevice],
        directory: WarmDirectory,
        *,
        markers: Sequence[str],
        temps: Sequence[str],
    ) -> None:
        self._meta = meta
        self._devices = devices
        self.directory = directory
        self._markers = markers
        self._temps = temps
        self.problem: str | None = "not looked at yet"
        """Why nothing can be copied at the moment; None when it can."""
        self.on_copied: Callable[[int], None] = lambda nbytes: None
        self.on_change: Callable[[], None] = lambda: None

    # -- questions ----------------------------------------------------------------------------

    def has(self, gen: int) -> bool:
        """Whether a generation's bytes are in the tier, under all names that it has."""
        names_of = {row.dentry for row in self._meta.warm.of_gen(gen)}
        row = self._meta.generations.get(gen)
        if row is None or not names_of:
            return False
        return names_of >= {each.id for each in self._meta.dentries.of_inode(row.ino)}

    def is_needed(self, row: GenerationRow) -> bool:
        """Whether a cache file must stay because the tier still wants it, and works."""
        return self.problem is None and row.sealed_ns is not None and not self._is_settled(row)

    def _is_settled(self, row: GenerationRow) -> bool:
        known = {each.dentry: each.gen for each in self._meta.warm.all_of_inode(row.ino)}
        entries = self._meta.dentries.of_inode(row.ino)
        return all(known.get(each.id) == row.gen for each in entries)

    def note_evicted(self, row: GenerationRow) -> None:
        """A cache file goes though it was never copied: in the transaction that lets it go."""
        if row.sealed_ns is None or self._is_settled(row):
            return
        for entry in self._meta.dentries.of_inode(row.ino):
            path = self._meta.dentries.path(entry.parent, entry.name).decode()
            self._meta.warm.put(WarmRow(entry.id, path, row.gen, row.size, 0, WarmState.MISSED))

    # -- the task -----------------------------------------------------------------------------

    async def run(self, changed: Callable[[], trio.Event]) -> None:
        """Follow the mount until cancelled; `changed` gives an event of the next change."""
        while True:
            event = changed()
            began = trio.current_time()
            try:
                await self._meet()
                while await self.round():
                    pass
            except (OSError, CacheError) as error:
                self._fail(str(error))
                await trio.sleep(_RETRY)
                continue
            await trio.sleep(max(_PAUSE, (trio.current_time() - began) / _DUTY))
            await event.wait()

    async def _meet(self) -> None:
        """Make sure that the directory is the right one, whenever it did not work before."""
        if self.problem is None:
            return
        known = self._meta.setting("warm_id")
        found = await trio.to_thread.run_sync(self.directory.open, known, abandon_on_cancel=True)
        if known is None:
            self._meta.set_setting("warm_id", found)
        self.problem = None
        log.info("the warm tier can be used", directory=str(self.directory.directory))

    def _fail(self, reason: str) -> None:
        if reason != self.problem:
            log.warning("nothing is copied to the warm tier", reason=reason)
        self.problem = reason

    async def round(self) -> bool:
        """One round; whether there may be more to do at once. Raises OSError."""
        plan = self._snapshot()
        if plan.empty:
            return False
        staged = await self._stage_all(plan.copies)
        data = [each for each in plan.copies if not self._is_last(each)]
        whole = staged >= {each.wanted.dentry for each in data}
        if whole:
            await self._remove([path for path in plan.leaving if self._is_marker(path)])
        ready = [each for each in data if each.wanted.dentry in staged]
        await self._show([each for each in ready if whole or each.old is None], plan)
        if whole:
            last = [each for each in plan.copies if self._is_last(each)]
            shown = [e for e in last if e.wanted.dentry in staged and self._may_show(e)]
            await self._show(shown, plan)
            await self._remove([path for path in plan.leaving if not self._is_marker(path)])
            self._settle(plan)
        self.on_change()
        return not whole

    def _snapshot(self) -> _Plan:
        plan = _Plan()
        rows = {row.dentry: row for row in self._meta.warm.all()}
        for wanted in self._meta.warm.wanted():
            path = self._path_of(wanted.dentry)
            if path is not None and not names.is_temp(self._temps, path):
                plan.copies.append(_Copy(wanted, path, rows.pop(wanted.dentry, None)))
        staying = set()
        for row in rows.values():
            path = self._path_of(row.dentry)
            if path is None:
                plan.gone.append(row)
            elif path == row.path:
                staying.add(path)
            elif row.state == WarmState.HELD:
                plan.copies.append(_Copy(self._again(row), path, row, moved=True))
            else:
                row.path = path
                plan.renamed.append(row)
        staying |= {each.path for each in plan.copies}
        old = [each.old for each in plan.copies if each.old is not None]
        left = [row.path for row in (*old, *plan.gone) if row.state == WarmState.HELD]
        plan.leaving = [path for path in dict.fromkeys(left) if path not in staying]
        return plan

    def _again(self, row: WarmRow) -> WantedRow:
        entry = self._meta.dentries.by_id(row.dentry)
        inode = self._meta.inodes.get(entry.ino) if entry is not None else None
        ino, target = (inode.ino, inode.target) if inode is not None else (0, None)
        return WantedRow(row.dentry, ino, row.gen, 0, 0, row.size, target)

    def _path_of(self, dentry: int) -> str | None:
        path = self._meta.dentries.path_of(dentry)
        return path.decode() if path is not None else None

    def _is_marker(self, path: str) -> bool:
        return names.matches(self._markers, path)

    def _is_last(self, copy: _Copy) -> bool:
        """Whether it tells of others, and so waits for them."""
        return copy.wanted.target is not None or self._is_marker(copy.path)

    # -- staging ------------------------------------------------------------------------------

    async def _stage_all(self, copies: Sequence[_Copy]) -> set[int]:
        """The names whose content is staged, and still is what it was in the snapshot.

        After an error nothing more is begun, and it is raised.
        """
        staged: set[int] = set()
        errors: list[OSError] = []
        waiting = iter(copies)

        async def work() -> None:
            for copy in waiting:
                try:
                    if not errors and await self._stage(copy):
                        staged.add(copy.wanted.dentry)
                except OSError as error:
                    errors.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(min(_AT_ONCE, len(copies))):
                nursery.start_soon(work)
        if errors:
            raise errors[0]
        return staged

    async def _stage(self, copy: _Copy) -> bool:
        wanted = copy.wanted
        name = str(wanted.dentry)
        if wanted.target is not None:
            await trio.to_thread.run_sync(self.directory.stage_link, name, wanted.target)
            return True
        if copy.moved:
            assert copy.old is not None
            return await trio.to_thread.run_sync(self._stage_moved, copy.old, copy.path)
        if await self._stage_file(wanted):
            return True
        await trio.to_thread.run_sync(self.directory.drop, name)
        return False

    def _stage_moved(self, row: WarmRow, path: str) -> bool:
        """In a thread. It may have been shown by a daemon that had no time to say so."""
        name = str(row.dentry)
        for place in (row.path, path):
            if self.directory.is_as_written(place, row.size, row.mtime_ns):
                self.directory.stage_again(name, place)
                return True
        return False

    async def _stage_file(self, wanted: WantedRow) -> bool:
        inode = self._meta.inodes.get(wanted.ino)
        if inode is None or not self._is_current(wanted):
            return False
        attributes = Attributes(
            stat.S_IMODE(inode.mode), inode.uid, inode.gid, inode.atime_ns, inode.mtime_ns
        )
        source = self._devices[wanted.device].path(wanted.file)
        stage = self.directory.stage
        try:
            await trio.to_thread.run_sync(
                stage, str(wanted.dentry), source, wanted.size, attributes
            )
        except OSError:
            if self._is_current(wanted):
                raise  # Not because the cache file went away meanwhile.
        return self._is_current(wanted)

    def _is_current(self, wanted: WantedRow) -> bool:
        """Whether the content of the snapshot still is the name's, in the same cache file."""
        gen = self._meta.generations.current(wanted.ino)
        entry = self._meta.dentries.by_id(wanted.dentry)
        if gen is None or entry is None or entry.ino != wanted.ino:
            return False
        return (gen.gen, gen.file, gen.device) == (wanted.gen, wanted.file, wanted.device)

    # -- showing ------------------------------------------------------------------------------

    def _may_show(self, copy: _Copy) -> bool:
        """Whether all that a marker or a symlink tells of is here."""
        folder = posixpath.dirname(copy.path)
        if copy.wanted.target is not None:
            to = posixpath.normpath(posixpath.join(folder, os.fsdecode(copy.wanted.target)))
            return not to.startswith(("/", "..")) and self.directory.holds(to)
        return not self._meta.warm.missed_below(folder)

    async def _show(self, copies: Sequence[_Copy], plan: _Plan) -> None:
        if not copies:
            return
        rows = await trio.to_thread.run_sync(self._show_all, copies, frozenset(plan.leaving))
        with self._meta.transaction():
            for row in rows:
                self._meta.warm.put(row)
        for row in rows:
            self.on_copied(row.size)

    def _show_all(self, copies: Sequence[_Copy], leaving: frozenset[str]) -> list[WarmRow]:
        """In a thread: one after the other, then all names to the disk. What a copy leaves behind
        goes before the new place is on record, or nobody would know of it after a kill."""
        rows = []
        for copy in copies:
            wanted = copy.wanted
            mtime = self.directory.show(str(wanted.dentry), copy.path)
            rows.append(WarmRow(wanted.dentry, copy.path, wanted.gen, wanted.size, mtime))
            if copy.old is not None and copy.old.path in leaving:
                self.directory.remove(copy.old.path)
        self.directory.sync([row.path for row in rows])
        return rows

    async def _remove(self, paths: Sequence[str]) -> None:
        await trio.to_thread.run_sync(self._remove_all, paths)

    def _remove_all(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.directory.remove(path)
        self.directory.sync(paths)

    def _settle(self, plan: _Plan) -> None:
        with self._meta.transaction():
            for row in plan.gone:
                self._meta.warm.forget(row.dentry)
            for row in plan.renamed:
                self._meta.warm.put(row)
