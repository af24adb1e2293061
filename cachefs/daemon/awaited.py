"""What one waiter still waits for, and how it follows what becomes of it.

A waiter is after everything that was closed when it came. Pending effects have numbers, so that is
well defined, but they do not stay as they are: a rewrite supersedes an effect that was not yet
begun, a rename over a name puts another entry in its place, a file that was open is sealed. Each is
followed to what took its place, and only until the bucket shows that content or any newer: someone
who rewrites a file for ever keeps nobody waiting for ever.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from cachefs.daemon import census
from cachefs.daemon.paths import Spot, absolute, entry_at, key_in
from cachefs.daemon.services import Services
from cachefs.meta.rows import DentryRow, EffectRow, GenerationRow, ObjectRow
from cachefs.meta.summary import Summary
from cachefs.model.effects import EffectKind
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.observe.protocol import ControlError

_AGAIN = 3
"""How often a deletion that came up again under the same key is followed: it does when an upload
was under way as the name went, and else only if somebody makes and deletes it all the time."""


@dataclass(slots=True)
class Awaited:
    """One pending effect, as much of it as is needed once it has gone."""

    kind: str
    dentry: int | None
    gen: int | None
    key: str
    size: int
    spot: Spot
    follows: int = 0

    @property
    def files(self) -> int:
        """1, but for a directory's marker."""
        return 0 if self.kind == EffectKind.PUBLISH and self.key.endswith("/") else 1


@dataclass(slots=True)
class Unsealed:
    """One file that is open for writing. `gen` is None until something was written."""

    ino: int
    gen: int | None
    key: str
    size: int
    spot: Spot


class Waitlist:
    """All that a waiter still waits for. Synchronous; the trio thread only."""

    def __init__(self, services: Services, level: Level) -> None:
        self._services = services
        self._meta = services.meta
        self._queue = services.queue
        self._summary = Summary(services.meta.db)
        self._level = level
        self._number = services.queue.next_number
        self.effects: dict[int, Awaited] = {}
        self.local: set[int] = set()
        """Those for which it is enough that the cache device holds them safely."""
        self.warm: set[int] = set()
        """Those for which a copy in the warm tier is enough."""
        self.unsealed: dict[int, Unsealed] = {}
        self.files_left = self.files_total = 0
        """Names and open files; a directory counts by what is in it."""
        self.bytes_left = self.bytes_total = 0

    # -- at the call --------------------------------------------------------------------------

    def add(self, spot: Spot) -> None:
        """Everything that is closed at a name and below it, and the end of what is open there.

        Raises ControlError for what is held.
        """
        self._services.table.settle()  # Queues what was closed an instant ago.
        self._await(list(self._below(spot) if spot.is_dir else self._at(spot)), spot)
        for opened in census.open_for_writing(self._services):
            key = key_in(self._meta, spot, opened.ino)
            if key is not None and opened.ino not in self.unsealed:
                opened.refresh()
                gen = opened.gen.gen if opened.writing else None
                self.unsealed[opened.ino] = Unsealed(opened.ino, gen, key, opened.size, spot)
                self._count(1, opened.size)
        self._refuse_held(spot)
        self.files_total, self.bytes_total = self.files_left, self.bytes_left

    def _below(self, spot: Spot) -> Iterator[EffectRow]:
        """In memory but for the keys that renames left behind."""
        for row in self._queue.effects.values():
            standing = self._queue.standing(row.id)
            if standing.is_dir and row.kind == EffectKind.PUBLISH and self._has_no_marker(row):
                continue
            if spot.covers(standing.key) or self._left_by(row, spot):
                yield row

    def _has_no_marker(self, row: EffectRow) -> bool:
        """A plain directory with entries is shown by them: its own effect comes to nothing."""
        entry = self._meta.dentries.by_id(row.dentry or 0)
        inode = self._meta.inodes.get(entry.ino) if entry is not None else None
        mount = self._services.settings.mount
        return (
            inode is not None
            and stat.S_IMODE(inode.mode) == 0o755
            and (inode.uid, inode.gid) == (mount.uid, mount.gid)
            and self._meta.dentries.has_children(inode.ino)
            and not self._meta.inodes.xattrs(inode.ino)
        )

    def _left_by(self, row: EffectRow, spot: Spot) -> bool:
        """The deletion of a key whose entry was renamed into the tree."""
        if row.kind != EffectKind.UNPUBLISH or row.dentry is None:
            return False
        path = self._meta.dentries.path_of(row.dentry)
        return path is not None and spot.covers(path.decode())

    def _at(self, spot: Spot) -> Iterator[EffectRow]:
        """A file is safe when it is under all of its names."""
        for name in self._meta.dentries.of_inode(spot.row.ino):
            yield from self._queue.of_dentry(name.id)
        deletion = self._queue.unpublish_of(spot.path)
        if deletion is not None:
            yield deletion

    def _refuse_held(self, spot: Spot) -> None:
        """Generations that lost their writer, or were superseded, are published by nobody."""
        if self._level <= Level.PROCESS:
            return
        for gen in self._meta.generations.in_states(GenState.SUPERSEDED):
            key = key_in(self._meta, spot, gen.ino)
            inode = self._meta.inodes.get(gen.ino)
            if key is not None and inode is not None and inode.gen == gen.gen:
                self._superseded(key, gen)
        for gen in self._meta.generations.in_states(GenState.HELD):
            key = key_in(self._meta, spot, gen.ino)
            if key is not None:
                raise ControlError(
                    f"{absolute(self._services, key)}: held: {gen.error}", exit_code=5
                )

    def _count(self, files: int, size: int) -> None:
        self.files_left += files
        self.bytes_left += size

    # -- taking up ----------------------------------------------------------------------------

    def _await(self, rows: Iterable[EffectRow], spot: Spot, follows: int = 0) -> None:
        """Wait for these effects too, and let those go out now that the store must have."""
        urgent = []
        for row in rows:
            local = self._is_local(row)
            warm = not local and self._may_be_warm(row)
            if row.id in self.effects or (local and self._needs_no_sync(row)):
                continue
            if warm and self._is_warm(row.gen):
                continue
            standing = self._queue.standing(row.id)
            awaited = Awaited(
                row.kind, row.dentry, row.gen, standing.key, standing.size, spot, follows
            )
            self.effects[row.id] = awaited
            self._count(awaited.files, awaited.size)
            if local:
                self.local.add(row.id)
            elif warm:
                self.warm.add(row.id)
            else:
                urgent.append(row.id)
        if urgent:
            self._queue.hurry(urgent)

    def _is_local(self, row: EffectRow) -> bool:
        """Whether the cache device gives the level. Without its metadata no file is one."""
        if self._level is Level.SITE:
            return False
        levels = [self._services.home.survives]
        gen = self._meta.generations.get(row.gen) if row.gen is not None else None
        if gen is not None:
            levels.append(self._device_level(gen))
        return min(levels) >= self._level

    def _device_level(self, gen: GenerationRow) -> Level:
        """What a cache file survives once it is synced; in RAM, once it is spilled."""
        spiller = self._services.spiller
        if gen.device in spiller.volatile and spiller.problem is None:
            return spiller.level
        return self._services.devices[gen.device].survives

    def _may_be_warm(self, row: EffectRow) -> bool:
        """Whether a copy in the warm tier gives the level, and one will come."""
        tiering = self._services.tiering
        if tiering is None or self._level > Level.INSTANCE or row.gen is None:
            return False
        return tiering.tier.has(row.gen) or tiering.tier.will_have(row.gen)

    def _is_warm(self, gen: int | None) -> bool:
        tiering = self._services.tiering
        return tiering is not None and gen is not None and tiering.tier.has(gen)

    def _needs_no_sync(self, row: EffectRow) -> bool:
        return self._level <= Level.PROCESS or row.gen is None

    # -- following ----------------------------------------------------------------------------

    def update(self) -> bool:
        """Take note of what happened; False once nothing is left to wait for.

        Raises ControlError (exit code 6) when a name that was asked for went before it was safe.
        """
        for effect in self.effects.keys() - self._queue.effects.keys():
            awaited = self._drop(effect)
            self._follow(awaited)
        for unsealed in list(self.unsealed.values()):
            self._look_at(unsealed)
        return bool(self.effects or self.unsealed)

    def note_synced(self) -> None:
        """Forget what only had to reach the device, and has."""
        spiller = self._services.spiller
        unsynced = self._summary.unsynced(spiller.volatile)
        for effect in list(self.local):
            gen = self.effects[effect].gen
            if gen not in unsynced or self._is_warm(gen):
                self._drop(effect)
        failed = not all(each.healthy for each in self._services.devices)
        if self.local and (failed or spiller.problem is not None):
            self._leave_to_the_store()

    def _leave_to_the_store(self) -> None:
        """Nothing leaves RAM, or a device that failed, but by way of the store."""
        spiller, devices = self._services.spiller, self._services.devices
        for effect in list(self.local):
            gen = self._meta.generations.get(self.effects[effect].gen or 0)
            if gen is None:
                continue
            stays = spiller.problem is not None and gen.device in spiller.volatile
            if stays or not devices[gen.device].healthy:
                self.local.discard(effect)
                self._queue.hurry([effect])

    def note_copied(self) -> None:
        """Forget what only had to reach the warm tier, and has; what it cannot take goes to the
        store."""
        for effect in list(self.warm):
            row = self._queue.effects.get(effect)
            if self._is_warm(self.effects[effect].gen):
                self._drop(effect)
            elif row is not None and not self._may_be_warm(row):
                self.warm.discard(effect)
                self._queue.hurry([effect])

    def _drop(self, effect: int) -> Awaited:
        awaited = self.effects.pop(effect)
        self.local.discard(effect)
        self.warm.discard(effect)
        self._count(-awaited.files, -awaited.size)
        return awaited

    def _follow(self, awaited: Awaited) -> None:
        """An effect has gone: it is done, or something else stands for it."""
        if awaited.kind == EffectKind.UNPUBLISH:
            again = self._queue.unpublish_of(awaited.key)
            if again is not None and awaited.follows < _AGAIN:
                self._await([again], awaited.spot, awaited.follows + 1)
            return
        if self._shows(awaited, self._meta.objects.get(awaited.key)):
            return  # What happens to all that nobody touches meanwhile.
        entry = self._meta.dentries.by_id(awaited.dentry or 0) or entry_at(self._meta, awaited.key)
        objects = self._meta.objects.of_dentry(entry.id) if entry is not None else []
        if any(self._shows(awaited, each) for each in objects):
            return
        if entry is not None:
            self._refuse_superseded(entry, awaited.key)
        if entry is None:
            self._refuse_removed(awaited.spot)
        else:
            self._await(self._heir(awaited, entry), awaited.spot)

    def _shows(self, awaited: Awaited, known: ObjectRow | None) -> bool:
        """Whether an object has this content or newer: generations' numbers only grow."""
        if known is None or not known.etag or known.stale:
            return False
        return awaited.gen is not None and known.gen is not None and known.gen >= awaited.gen

    def _heir(self, awaited: Awaited, entry: DentryRow) -> list[EffectRow]:
        """The first effect at the name that stands for the one that has gone, if any does."""
        rows = (row for row in self._queue.of_dentry(entry.id) if row.id not in self.effects)
        return next(([row] for row in rows if self._stands_for(row, awaited)), [])

    def _stands_for(self, row: EffectRow, awaited: Awaited) -> bool:
        if row.kind == EffectKind.UNPUBLISH:
            return False
        if row.dentry != awaited.dentry:
            return True  # Another file was renamed over the name.
        if awaited.gen is None or row.gen is None:
            return row.since < self._number
        return row.gen >= awaited.gen

    def _refuse_superseded(self, entry: DentryRow, key: str) -> None:
        gen = self._meta.generations.current(entry.ino)
        if gen is not None and gen.state == GenState.SUPERSEDED:
            self._superseded(key, gen)

    def _superseded(self, key: str, gen: GenerationRow) -> NoReturn:
        path = absolute(self._services, key)
        hint = f"`cachefs resolve {path} --keep` uploads it nonetheless"
        raise ControlError(f"{path}: superseded: {gen.error}", exit_code=6, hint=hint)

    def _refuse_removed(self, spot: Spot) -> None:
        """What was removed inside of a tree is no loss to the tree; the name itself is."""
        if spot.path and entry_at(self._meta, spot.path) is None:
            path = absolute(self._services, spot.path)
            raise ControlError(f"{path}: removed before it was safe", exit_code=6)

    # -- open files ---------------------------------------------------------------------------

    def _look_at(self, unsealed: Unsealed) -> None:
        opened = self._services.table.inodes.get(unsealed.ino)
        if unsealed.gen is None and opened is not None and opened.writers and not opened.orphaned:
            unsealed.gen = opened.gen.gen if opened.writing else None
            return
        gen = self._meta.generations.get(unsealed.gen) if unsealed.gen is not None else None
        orphaned = opened is None or opened.orphaned
        if gen is not None and gen.state == GenState.OPEN and not orphaned:
            return
        del self.unsealed[unsealed.ino]
        self._count(-1, -unsealed.size)
        self._sealed(unsealed, gen)

    def _sealed(self, unsealed: Unsealed, gen: GenerationRow | None) -> None:
        """The file is closed: from now on its effects are waited for, under all of its names."""
        if gen is not None and gen.state == GenState.HELD and self._level > Level.PROCESS:
            path = absolute(self._services, unsealed.key)
            raise ControlError(f"{path}: held: {gen.error}", exit_code=5)
        rows = self._queue.of_gen(unsealed.gen) if unsealed.gen is not None else []
        if rows:
            self._await(rows, unsealed.spot)
            return
        # Nothing was written, or it was superseded before anybody looked, or it has no name left.
        number, key, spot = unsealed.gen, unsealed.key, unsealed.spot
        names = [name.id for name in self._meta.dentries.of_inode(unsealed.ino)]
        for name in names or (0,):
            self._follow(Awaited(EffectKind.PUBLISH, name, number, key, 0, spot))
