"""The warm tier: copies of what is saved, at the same paths, on a parallel or network filesystem.

Works in rounds. A round begins with a plan (`tiers.plan`): every name whose present content is
sealed and has no copy yet, and every copy whose name has moved or gone. Then, in this order,

 1. new copies are staged, several at a time: bytes on the disk, under hidden names;
 2. signs (markers, pointers, symlinks) of checkpoints that the next step changes are taken away,
    where they have moved or gone;
 3. files get their place, in the order in which they were sealed;
 4. then signs do, those of checkpoints first, each only when all that it tells of is there
    (`tiers.complete`); the others are withheld until a later round;
 5. then what is gone is removed, signs first: unless a pointer that is withheld may still name it.

If content changed between the plan and its copy, the round ends before step 2, with files shown
that replace nothing. A name whose place is taken by something else (`tiers.obstacles`) is left out,
and what tells of it is withheld. Only copies that are as they were written are moved or removed:
what somebody has touched is forgotten, and stays where it is.

Runs on the trio thread; what touches the directory runs in other threads. A row of the table `warm`
says that a copy is there once it is on the disk, so a kill at any point repeats work at most.
`lock` is held for a round, and by whoever else removes copies. What is to be recorded waits until
there is room for it: a disk that stalls under the database stops a round, and nobody else.
"""

from __future__ import annotations

import itertools
import math
import posixpath
from collections.abc import Awaitable, Callable, Sequence

import structlog
import trio

from cachefs.cache.device import CacheDevice
from cachefs.cache.warmdir import WarmDirectory
from cachefs.errors import NO_SPACE, CacheError
from cachefs.meta import Meta
from cachefs.meta.room import room
from cachefs.meta.rows import GenerationRow
from cachefs.meta.warm import WarmRow, WarmState, outdated
from cachefs.tiers.complete import Complete, Sign
from cachefs.tiers.obstacles import Obstacles
from cachefs.tiers.placing import Placer
from cachefs.tiers.plan import Copy, Plan, Planner
from cachefs.tiers.room import Room
from cachefs.tiers.staging import Stager

log = structlog.get_logger("cachefs.warm")

_PAUSE = 0.2
"""Seconds between two rounds at least: what is saved together is copied together."""
_DUTY = 20.0
_RETRY = 5.0
"""Seconds until what failed, or was withheld, is tried again though nothing has changed."""
_LONGEST = 60.0
"""The same, where a round costs that much."""
_STUCK = 300.0
"""Seconds without any progress after which nobody waits for the directory any more."""
_PATIENCE = 30.0
"""Seconds that the directory may take to answer at all."""
_UNKNOWN = "not looked at yet"

Files = Sequence[tuple[str, int | None]]
"""(path, size in bytes if known)."""


async def _nothing(root: str) -> Files:
    """Where one node saves alone."""
    return ()


class WarmTier:
    """Keeps the directory up to date, and answers what is in it.

    `on_copied(nbytes)` is told of each new copy, `on_change()` that more is there than before, or
    less to be waited for; neither may raise.
    """

    def __init__(
        self,
        meta: Meta,
        devices: Sequence[CacheDevice],
        directory: WarmDirectory,
        complete: Complete,
    ) -> None:
        self._meta = meta
        self.directory = directory
        self._complete = complete
        self._planner = Planner(meta, complete)
        self.stager = Stager(meta, devices, directory)
        self._placer = Placer(directory)
        self.room = Room(meta, directory, complete, self.stager)
        self.obstacles = Obstacles(directory)
        self.lock = trio.Lock()
        self.problem: str | None = _UNKNOWN
        """Why nothing can be copied at the moment, as far as it has answered; see `trouble`."""
        self._last_sign = math.inf
        """When a round that is under way got on; infinite: there is none."""
        self.stager.on_staged = self._note_life
        self.withheld: frozenset[int] = frozenset()
        """Names of signs that wait for what they tell of."""
        self._waiting: frozenset[int] = frozenset()
        """These, and what is obstructed, when it was last told."""
        self._awaited: set[int] = set()
        """Generations that the store waits for."""
        self._restless = False
        """There is something to be tried again though nothing changes."""
        self.elsewhere: Callable[[str], Awaitable[Files | None]] = _nothing
        """What other nodes have saved of a checkpoint; None while that is not known."""
        self.on_copied: Callable[[int], None] = lambda nbytes: None
        self.on_change: Callable[[], None] = lambda: None

    # -- questions ----------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why nothing is to be expected of the tier now; None: it works."""
        if self.problem is None and self._is_stuck:
            return f"the warm tier {self.directory.directory} has not answered for minutes"
        return self.problem or self.room.trouble

    @property
    def is_silent(self) -> bool:
        """Whether nothing can be read from it either."""
        return self.problem is not None or self._is_stuck

    @property
    def _is_stuck(self) -> bool:
        return trio.current_time() - self._last_sign > _STUCK

    def _note_life(self) -> None:
        self._last_sign = trio.current_time()

    def has(self, gen: int) -> bool:
        """Whether a generation's bytes are in the tier, under all names that it has."""
        places = {row.dentry: row.path for row in self._meta.warm.of_gen(gen)}
        row = self._meta.generations.get(gen)
        if row is None or not places:
            return False
        names_of = [each.id for each in self._meta.dentries.of_inode(row.ino)]
        return all(places.get(each) == self._planner.path_of(each) for each in names_of)

    def will_have(self, gen: int) -> bool:
        """Whether a copy is on its way, and waits for nothing but its turn."""
        wanting = self._meta.warm.wanting(gen) if self.trouble is None else []
        return bool(wanting) and all(self._may_come(each) for each in wanting)

    def _may_come(self, dentry: int) -> bool:
        path = self._planner.path_of(dentry)
        waits = dentry in self.withheld or dentry in self.obstacles.found
        if path is None or waits or self._complete.is_temp(path):
            return False
        # What waits for the store is nothing that the store may wait for.
        is_sign = self._complete.is_sign(path, is_link=False)
        return not (is_sign and self._complete.waits_for_store)

    def holds_back(self, gen: int) -> bool:
        """Whether the store has to wait for a copy of a generation, where that is the policy."""
        if self.trouble is not None:
            return self.problem == _UNKNOWN
        if gen not in self._awaited and self.will_have(gen):
            self._awaited.add(gen)
        return gen in self._awaited

    def is_needed(self, row: GenerationRow) -> bool:
        """Whether a cache file must stay because the tier still wants it, and works. What is
        obstructed may be so for long: nobody who writes waits for room because of it."""
        waiting = self.obstacles.found.keys()
        return self.trouble is None and not self._wanting(row.gen).keys() <= waiting

    def _wanting(self, gen: int) -> dict[int, str]:
        """Names, with their paths, that are to get a copy of a generation."""
        names_of = self._meta.warm.wanting(gen)
        paths = {each: self._planner.path_of(each) for each in names_of}
        return {k: path for k, path in paths.items() if path and not self._complete.is_temp(path)}

    def note_evicted(self, row: GenerationRow) -> None:
        """A cache file goes though it was never copied: in the transaction that lets it go."""
        for dentry, path in self._wanting(row.gen).items():
            old = self._meta.warm.of_dentry(dentry)
            self._put_lacking(old or WarmRow(dentry, path, 0, 0, 0), row.gen)

    def distrust(self, row: WarmRow) -> None:
        """A copy is damaged: it is not read again, and made anew once its content is here."""
        with self._meta.transaction():
            self._put_lacking(row, row.gen)
        self.on_change()

    def _put_lacking(self, row: WarmRow, gen: int) -> None:
        """Where the copy before is stays known, so that it can be removed."""
        row.gen, row.state = gen, WarmState.LACKING
        self._meta.warm.put(row)

    # -- the task -----------------------------------------------------------------------------

    async def run(self, changed: Callable[[], trio.Event]) -> None:
        """Follow the mount until cancelled; `changed` gives an event of the next change."""
        while True:
            event = changed()
            began = trio.current_time()
            try:
                await self._meet()
                async with self.lock:
                    self._note_life()
                    goes_on = await self.round()
            except (OSError, CacheError) as error:
                self._fail(str(error))
                self._last_sign = math.inf
                await trio.sleep(_RETRY)
                continue
            self._last_sign = math.inf
            cost = trio.current_time() - began
            await trio.sleep(max(_PAUSE, cost / _DUTY))
            if not goes_on:
                rest = min(max(_RETRY, cost * _DUTY), _LONGEST)
                with trio.move_on_after(rest if self._restless else math.inf):
                    await event.wait()

    async def look(self) -> None:
        """Find out whether the directory can be used."""
        try:
            await self._meet()
        except (OSError, CacheError) as error:
            self._fail(str(error))

    async def _meet(self) -> None:
        """Make sure that the directory is the right one, whenever it did not work before."""
        if self.problem is None:
            return
        known = self._meta.setting("warm_id")
        found = None
        with trio.move_on_after(_PATIENCE):
            found = await trio.to_thread.run_sync(
                self.directory.open, known, abandon_on_cancel=True
            )
        if found is None:
            raise CacheError(f"the warm tier {self.directory.directory} does not answer")
        if known is None:
            self._meta.set_setting("warm_id", found)
        self.problem = None
        log.info("the warm tier can be used", directory=str(self.directory.directory))
        self.on_change()

    def _fail(self, reason: str) -> None:
        if reason == self.problem:
            return
        log.warning("nothing is copied to the warm tier", reason=reason)
        self.problem = reason
        self.on_change()  # Nobody needs to wait for it any more.

    async def watch(self) -> None:
        """A filesystem may hang for hours: those who wait for it are told to go on without."""
        while True:
            await trio.sleep(_STUCK / 2)
            if self.trouble is not None:
                log.warning("nobody waits for the warm tier", reason=self.trouble)
                self.on_change()

    async def round(self) -> bool:
        """One round, by who holds `lock`; whether it has changed anything. Raises OSError."""
        await room(self._meta.db)
        plan = await self._planner.plan()
        self.stager.begin()
        changed: set[int] = set()
        try:
            changed = await self._work(plan)
            no_room, left = self.stager.no_room, self.stager.left
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            no_room, left = error, [each for each in plan.copies if not each.moved]
            self._restless = True
        if await self.room.note(left, no_room):
            self.on_change()
        return bool(changed)

    def note_judged(self, *, is_made: bool, has_changed: bool) -> None:
        """Whether enough room was made for what found none, and whether any was."""
        if self.room.note_judged(stays=not is_made) or has_changed:
            self.on_change()

    async def _work(self, plan: Plan) -> set[int]:
        moot = self._awaited - {each.wanted.gen for each in plan.copies}
        if self.obstacles.stuck:
            self.obstacles.forget_moot({row.dentry: row.path for row in self._meta.warm.all()})
        if plan.is_empty:
            self._restless = plan.lacking
            self.obstacles.found.clear()
            self._note(plan, moot, frozenset(), set())
            return set()
        await trio.to_thread.run_sync(self.directory.check)
        leaving = {row.path for row in plan.leaving}
        obstructed = await self.obstacles.look(plan.copies, leaving)
        await self._leave_out(plan, [e for e in plan.copies if e.dentry in obstructed])
        plan.data.sort(key=self.room.comes_first, reverse=True)
        moved = [each for each in plan.signs if each.moved]
        staged = await self.stager.stage_all([*plan.data, *moved])
        await self._leave_out(plan, self.stager.left)
        changed = self._forget_touched([e for e in plan.copies if e.moved], staged)
        whole = all(each.dentry in staged for each in plan.data)
        if whole:
            refused = await self.remove(self._planner.first_to_go(plan))
            plan.set_aside(self._planner.told_of_by(plan, refused))
        ready = [each for each in plan.data if each.dentry in staged]
        changed |= await self._show([e for e in ready if whole or not plan.changes(e)], plan)
        withheld = self.withheld
        if whole:
            signs, withheld = await self._ready([e for e in plan.signs if e.dentry not in changed])
            staged |= await self.stager.stage_all([each for each in signs if not each.moved])
            ready = list(itertools.takewhile(lambda each: each.dentry in staged, signs))
            changed |= await self._show(ready, plan)
            changed |= await self._clear(plan, changed)
        waits = withheld or plan.blocked or self.obstacles.all
        self._restless = bool(waits) or plan.lacking or not whole
        self._note(plan, moot, withheld, changed)
        return changed

    def _note(
        self, plan: Plan, moot: set[int], withheld: frozenset[int], changed: set[int]
    ) -> None:
        """Tell those who wait, if a round brought them anything."""
        waiting = withheld | self.obstacles.found.keys()
        more = waiting - self._waiting
        self.withheld, self._waiting = withheld, waiting
        done = changed | waiting
        all_copies = (*plan.copies, *plan.blocked)
        self._awaited -= moot | {e.wanted.gen for e in all_copies if e.dentry in done}
        if changed or moot or more:
            self.on_change()

    # -- showing ------------------------------------------------------------------------------

    def _forget_touched(self, copies: Sequence[Copy], staged: set[int]) -> set[int]:
        """Copies that were to be moved, and are not as they were written: a new one is made."""
        touched = [each for each in copies if each.dentry not in staged]
        with self._meta.transaction():
            for each in touched:
                row = WarmRow(each.dentry, each.path, 0, 0, 0)
                self._put_lacking(row, each.wanted.gen)
        return {each.dentry for each in touched}

    async def _ready(self, copies: Sequence[Copy]) -> tuple[list[Copy], frozenset[int]]:
        """(signs that may be shown, one after the other; names of those that may not)."""
        signs = await trio.to_thread.run_sync(lambda: [self.stager.read(each) for each in copies])
        unshown = {each.dentry for each in copies}
        ready = []
        for copy, sign in zip(copies, signs, strict=True):
            needs = self._complete.needs(sign, unshown)
            if not needs.lacking and await self._has_others(sign, needs.foreign):
                ready.append(copy)
            else:
                unshown.discard(copy.dentry)
                log.debug("withheld from the warm tier", path=copy.path, lacking=needs.lacking[:3])
            await trio.lowlevel.checkpoint()
        return ready, frozenset(each.dentry for each in copies) - unshown

    async def _has_others(self, sign: Sign, foreign: Files) -> bool:
        """Whether all is in the tier that is not known from here alone."""
        files = list(foreign)
        for root in self._complete.roots(sign) if self._complete.waits_for_store else ():
            more = await self.elsewhere(root)
            if more is None:
                return False
            files += more
        has_file = self.directory.has_file
        return not files or await trio.to_thread.run_sync(
            lambda: all(has_file(path, size) for path, size in files)
        )

    async def _show(self, copies: Sequence[Copy], plan: Plan) -> set[int]:
        if not copies:
            return set()
        await self._announce(copies)
        show, in_the_way = self._placer.show, self._planner.in_the_way(plan)
        rows, failed = await trio.to_thread.run_sync(show, copies, plan, in_the_way)
        await room(self._meta.db)
        with self._meta.transaction():
            for row, copy in rows:
                if self.stager.is_rewritten(copy.wanted):
                    row.gen = outdated(row.gen)
                self._meta.warm.put(row)
        for copy, reason in failed:
            self.obstacles.note_failed(copy, reason)
        await self._block([copy for copy, _ in failed])
        shown_now = {copy.dentry for _, copy in rows}
        self.obstacles.note_shown(shown_now)
        for row, _ in rows:
            self.on_copied(row.size)
        return shown_now

    async def _announce(self, copies: Sequence[Copy]) -> None:
        """Where a name has its first copy, that is on record before it is there: after a kill it is
        known whose it is, though the name may have moved or gone by then."""
        new = [each for each in copies if each.old is None]
        mtime = self.directory.staged_mtime
        found = await trio.to_thread.run_sync(lambda: [mtime(str(each.dentry)) for each in new])
        await room(self._meta.db)
        with self._meta.transaction():
            for each, mtime_ns in zip(new, found, strict=True):
                gen, size = each.wanted.gen, each.wanted.size
                row = WarmRow(each.dentry, each.path, gen, size, mtime_ns, WarmState.LACKING)
                self._meta.warm.put(row)

    async def _leave_out(self, plan: Plan, copies: Sequence[Copy]) -> None:
        """They get no place in this round; nothing waits for them but what tells of them."""
        if copies:
            plan.set_aside({each.dentry for each in copies})
            await self._block(copies)

    async def _block(self, copies: Sequence[Copy]) -> None:
        """They cannot have their places. Signs go from where they were, for what they tell of is no
        longer there; other copies that have another path now stay until they can follow."""
        data = [each for each in copies if not each.moved]
        signs = [
            (each, each.old)
            for each in copies
            if each.moved and each.old is not None and self._planner.is_sign(each.old)
        ]
        await self.remove([old for _, old in signs])
        await room(self._meta.db)
        with self._meta.transaction():
            for each, _ in signs:
                self._put_lacking(WarmRow(each.dentry, each.path, 0, 0, 0), each.wanted.gen)
            for each in data:
                old = each.old or WarmRow(each.dentry, each.path, 0, 0, 0)
                if (old.gen, old.state) != (each.wanted.gen, WarmState.LACKING):
                    self._put_lacking(old, each.wanted.gen)

    # -- removing -----------------------------------------------------------------------------

    async def _clear(self, plan: Plan, changed: set[int]) -> set[int]:
        """Remove what is gone; the names of which nothing is known any more. What is still to be
        replaced stays on record."""
        unshown = [e for e in (*plan.signs, *plan.blocked) if e.dentry not in changed]
        pointers = [
            each
            for each in unshown
            if each.path in plan.taken and self._complete.root_of_sign(each.path) is None
        ]
        if self.room.lacking is not None:
            await self._take(plan, pointers)  # What is gone has to make room.
            pointers = []
        folders = tuple({posixpath.dirname(f"/{e.path}").rstrip("/") + "/" for e in pointers})
        waiting = {each.path for each in unshown}
        kept = {
            row.dentry
            for row in plan.gone
            if f"/{row.path}".startswith(folders) or row.path in waiting
        }
        gone = [row for row in plan.gone if row.dentry not in kept]
        over = {row.dentry for row in (*gone, *(row for row, _ in plan.renamed))}
        stuck = await self.remove([row for row in plan.leaving if row.dentry in over])
        over -= {row.dentry for row in stuck}
        await room(self._meta.db)
        with self._meta.transaction():
            for row in gone:
                if row.dentry in over:
                    self._meta.warm.forget(row.dentry)
            for row, path in plan.renamed:
                if row.dentry in over:
                    self._meta.warm.put(WarmRow(row.dentry, path, row.gen, 0, 0, row.state))
        return over

    async def _take(self, plan: Plan, pointers: Sequence[Copy]) -> None:
        """Pointers go that name what is gone, perhaps, and that are to be replaced."""
        paths = {each.path for each in pointers}
        old = [e.old for e in pointers if e.old is not None and e.old.state == WarmState.HELD]
        await self.remove([*old, *(row for row in plan.gone if row.path in paths)])
        with self._meta.transaction():
            for row in old:
                self._put_lacking(row, row.gen)

    async def remove(self, rows: Sequence[WarmRow]) -> list[WarmRow]:
        """Remove copies, by who holds `lock`: signs first, so that nobody takes the rest for whole.
        Those that somebody has touched stay. Returns those that cannot be removed; what a sign
        tells of stays with it. Raises OSError."""
        rows = self._planner.as_they_go(rows)
        signs = [row for row in rows if self._planner.is_sign(row)]
        others = rows[len(signs) :]
        refused: dict[int, str] = {}
        if signs:
            refused |= await trio.to_thread.run_sync(self._placer.remove, signs)
        root_of = self._complete.root_of_sign
        roots = {root_of(row.path) for row in signs if row.dentry in refused} - {None}
        held = [row for row in others if roots and root_of(row.path) in roots]
        free = [row for row in others if row not in held]
        if free:
            refused |= await trio.to_thread.run_sync(self._placer.remove, free)
        self.obstacles.note_removed(rows, refused)
        return [*held, *(row for row in rows if row.dentry in refused)]
