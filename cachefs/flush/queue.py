"""The effect queue: what the bucket has yet to show, in which order.

It knows names, generations' numbers and keys, and nothing of file content, handles or stores. The
filesystem calls it inside its own transactions (`publish`, `removed`, `renamed`); the flusher
takes from it (`committable`, `blockers`) and reports back (`published`, `relocated`,
`unpublished`). Both happen on the trio thread, and no method awaits, so each is atomic.

Invariants
- The key to be written is computed when asked for, never stored: a rename before upload costs
  nothing.
- A key whose object belongs to no entry has a pending unpublish, or a pending publish or relocate
  of the entry that took the name over (see `flush.oldkeys`).
- An effect that is `busy` is in the flusher's hands: it is never superseded, only cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cachefs.failpoints import Change
from cachefs.flush.pending import (
    BLOCKED,
    CONFLICTED,
    PENDING,
    in_order,
    is_dir_mode,
)
from cachefs.flush.replaced import Replaced
from cachefs.meta.rows import DentryRow, EffectRow, InodeRow, ObjectRow
from cachefs.model.effects import EffectClass, EffectKind
from cachefs.model.states import GenState

__all__ = ["BLOCKED", "CONFLICTED", "PENDING", "EffectQueue", "NewFile"]


_GONE = (None, False, False)
"""What is known of an entry that there is not."""


class NewFile(NamedTuple):
    """A file that is complete and was never shown, under its only name."""

    dentry: DentryRow
    gen: int
    size: int
    """In bytes."""


class _Copy(NamedTuple):
    """An entry whose object is to be copied to its new name."""

    dentry: DentryRow
    klass: EffectClass
    """By the new name."""
    key: str
    """The new name's."""
    before: int
    """The number that it had under the name before; 0: the bucket shows it as it was then."""
    shown_ns: int
    """Since when it does."""


class _Moved(NamedTuple):
    """An effect as it is under its entry's new name."""

    row: EffectRow
    klass: EffectClass
    key: str
    size: int


class EffectQueue(Replaced):
    """Pending effects of one mount. See the module docstring for the rules."""

    # -- the filesystem's side ----------------------------------------------------------------

    def publish(
        self,
        dentry: DentryRow,
        gen: int | None,
        size: int,
        *,
        symlink: bool = False,
    ) -> None:
        """The entry's content (`gen`) or, with None, its attributes, link or directory is complete.

        Call inside a transaction. `size` in bytes.
        """
        now = self._clock()
        self._revive(gen)
        key = self.key_of(dentry, is_file=gen is not None)
        number = self._number()
        row = EffectRow(
            0,
            EffectKind.PUBLISH,
            dentry.id,
            gen,
            None,
            EffectClass.BARRIER,
            number,
            number,
            PENDING,
            None,
            now,
            now,
        )
        earlier = [e for e in self.of_dentry(dentry.id) if e.kind == EffectKind.PUBLISH]
        if gen is None and any(e.id not in self._busy for e in earlier):
            return  # The effect that waits already will carry the attributes as they are then.
        row.klass = self._classify(EffectKind.PUBLISH, key, size, symlink=symlink)
        if gen is None and not symlink and self._shows(key):
            row.klass = self._mildest(row.klass)
        for old in earlier:
            self._supersede(old, row, key, size)
        self._take_over(key, dentry.id, row, size)
        self._insert(row, key, size)

    def publish_new(self, files: Sequence[NewFile]) -> None:
        """Many files that nobody knew of before are complete, in this order. Inside a transaction.

        As `publish`, each in its turn, which would look for much that there cannot be of them.
        """
        keys = [self.key_of(each.dentry, is_file=True) for each in files]
        if not self._unpublish.keys().isdisjoint(keys):
            for each in files:
                self.publish(each.dentry, each.gen, each.size)
            return
        now, shown = self._clock(), self._meta.objects.shown_among(keys)
        rows = [
            self._row_of_new(each, self._class_of(key, each.size, new_key=key not in shown), now)
            for key, each in zip(keys, files, strict=True)
        ]
        self._meta.effects.add_all(rows)
        for row, key, each in zip(rows, keys, files, strict=True):
            self._remember(row, key, each.size)
        self._meta.db.after_commit(self.kick)

    def _row_of_new(self, new: NewFile, klass: EffectClass, now: int) -> EffectRow:
        number = self._number()
        return EffectRow(
            0, EffectKind.PUBLISH, new.dentry.id, new.gen, None, klass, number, number, PENDING,
            None, now, now,
        )  # fmt: skip

    def _shows(self, key: str) -> bool:
        known = self._meta.objects.get(key)
        return known is not None and bool(known.etag) and not known.stale

    def _mildest(self, klass: EffectClass) -> EffectClass:
        """New attributes of an object that stays what it is point at nothing: many of them (a tree
        that was copied with its times) need not queue up behind each other."""
        return klass if self._rules.strict else EffectClass.SMALL

    def _supersede(self, old: EffectRow, new: EffectRow, key: str, size: int) -> None:
        """Drop `old` in favour of `new` where the order law allows; else both go out in turn."""
        if old.id in self._busy:
            return
        if self._order.may_supersede(old.id, self._pending(new, key, size)):
            new.since = min(new.since, old.since)
            new.first_ns = min(new.first_ns, old.first_ns)
            self._drop(old)

    def _take_over(self, key: str, dentry: int, row: EffectRow, size: int) -> None:
        """A name that was to be deleted is in use again: overwrite its object instead."""
        pending = self._unpublish.get(key)
        if pending is not None and pending not in self._busy:
            old = self.effects[pending]
            if self._is_source(key, dentry):
                return  # It goes once its bytes are where their name is now.
            if not self._order.may_supersede(old.id, self._pending(row, key, size)):
                return  # Something waits for the deletion itself.
            row.since = min(row.since, old.since)
            self._drop(old)
            self._adopt_object(key, dentry)

    def removed(self, dentry: int) -> None:
        """The name is gone: nothing of it is published any more, and what was is deleted."""
        entry = self._meta.dentries.by_id(dentry)
        if entry is not None:
            self._bequeath(dentry, entry.ino)
        publishes = [row for row in self.of_dentry(dentry) if row.kind == EffectKind.PUBLISH]
        awaited = [row.since for row in publishes if not self._order.get(row.id).held]
        self._drop_showing(dentry)
        if awaited:
            self.drop_stale(min(awaited))
        for key in self._meta.objects.forget_dentry(dentry):
            self.let_go(key, dentry)

    def _bequeath(self, dentry: int, ino: int, *, taken: bool = False) -> None:
        """The object of a name that goes is what another name of the same file has to show: it is
        copied there first. `taken`: another file has the name now."""
        objects = [row for row in self._meta.objects.of_dentry(dentry) if not row.stale]
        names = [name for name in self._meta.dentries.of_inode(ino) if name.id != dentry]
        if not objects or not names:
            return
        if any(not row.stale for row in self._meta.objects.of_inode(ino) if row.dentry != dentry):
            return  # Another name is shown already.
        if taken and self._brings_content(names[0]):
            return  # Nothing is to be copied from what the other file overwrites.
        for row in objects:
            row.dentry = names[0].id
            self._meta.objects.put(row)
        # What that name waits to show keeps its place.
        self._move([names[0].id], self._number(), going=dentry)

    def renamed(self, moved: DentryRow, replaced: DentryRow | None = None) -> None:
        """`moved` (as it is now; a directory stands for all below it) has a new name.

        `replaced` is the entry that had this name before, already removed from the namespace.
        """
        self._drop_replaced(moved)
        if replaced is not None:
            self._bequeath(replaced.id, replaced.ino, taken=True)
            self._take_objects(moved, replaced.id)
        self._move([moved.id, *self._below(moved)])
        if replaced is not None:
            inode = self._meta.inodes.get(moved.ino)
            is_open = inode is not None and self._is_open(inode)
            self._take_effects(moved, replaced.id, is_open=is_open)

    def _take_objects(self, moved: DentryRow, replaced: int) -> None:
        """The replaced entry's object is overwritten by the moved one's, never deleted first."""
        new_key = self.key_of(moved)
        for key in self._meta.objects.forget_dentry(replaced):
            self._adopt_object(key, moved.id)
            if key != new_key:  # It goes when what was beside it there goes, not before.
                self._queue_unpublish(key, moved.id, self._number())
            elif key.endswith("/"):  # A marker with another directory's attributes.
                self.publish(moved, None, 0)

    def _move(
        self, dentries: list[int], place: int | None = None, *, going: int | None = None
    ) -> None:
        """Renumber what the names' move carries along.

        `place`: the number of the effect that made the object which is to move on; `going`: an
        entry that is about to lose its name.

        Data before markers, whether it is copied inside the bucket or still to be uploaded: at
        neither place a marker may stand for data that is not there. The old keys go last.
        """
        copies, left_behind = self._relocations(dentries)
        number = self._number() if place is None else place
        for copy in copies:
            if copy.klass != EffectClass.BARRIER:
                if place is None:  # They would come after it now.
                    self._drop_replaced(copy.dentry)
                self._queue_relocate(copy, number)
        named = dentries if place is None else []  # The others have their numbers.
        markers = [copy for copy in copies if copy.klass == EffectClass.BARRIER]
        self._renumber(named, copies=markers, place=place)
        if left_behind:
            last = self._number()
            for key, dentry_id in left_behind:
                if self._taker(key, going) is None:
                    late = place is not None
                    end = self._number_of_deletion(key, number) if late else last
                    self._queue_unpublish(key, dentry_id, end)

    def _below(self, moved: DentryRow) -> list[int]:
        inode = self._meta.inodes.get(moved.ino)
        if inode is None or not is_dir_mode(inode.mode):
            return []
        return self._meta.dentries.below(moved.ino)

    def exchanged(self, one: DentryRow, other: DentryRow) -> None:
        """Two names were swapped: the bucket cannot, so both are published anew."""
        self._drop_replaced(one)
        self._drop_replaced(other)
        self._renumber([one.id, *self._below(one), other.id, *self._below(other)])
        pairs = ((one, other), (other, one))
        objects = {dentry.id: self._meta.objects.of_dentry(dentry.id) for dentry, _ in pairs}
        for dentry, partner in pairs:
            swapped = self.key_of(partner)
            for row in objects[dentry.id]:
                row.dentry, row.stale = (partner.id if row.key == swapped else None), 1
                self._meta.objects.put(row)
                if row.dentry is None:  # A rename left it behind: its bytes are not wanted now.
                    self._queue_unpublish(row.key, None, self._number())
        for dentry, _ in pairs:
            inode = self._meta.inodes.get(dentry.ino)
            if inode is not None and objects[dentry.id] and not self._is_open(inode):
                link = inode.target is not None
                self.publish(dentry, inode.gen, inode.size, symlink=link)

    def _is_open(self, inode: InodeRow) -> bool:
        """Its content is being written: sealing publishes it."""
        gen = self._meta.generations.get(inode.gen) if inode.gen is not None else None
        return gen is not None and gen.state == GenState.OPEN

    def _renumber(
        self,
        dentries: Iterable[int],
        *,
        copies: Sequence[_Copy] = (),
        place: int | None = None,
    ) -> None:
        """Moved effects get numbers of their own, in the old order, and their class anew: first
        those that are no barriers under the new name, then the others. `copies`, which are
        barriers, stand among these, or at `place`."""
        rows = [row for dentry in dentries for row in self.of_dentry(dentry)]
        showing = [e for e in rows if e.kind == EffectKind.PUBLISH or self.is_passing_copy(e)]
        moved = [self._under_new_name(row) for row in sorted(showing, key=in_order)]
        barriers = [each for each in moved if each.klass == EffectClass.BARRIER]
        for each in moved:
            if each.klass != EffectClass.BARRIER:
                self._renumber_one(each)
        todo: list[_Copy | _Moved] = [*copies, *barriers]
        for one in sorted(todo, key=_old_place):
            if isinstance(one, _Copy):
                self._queue_relocate(one, self._number() if place is None else place)
            else:
                self._renumber_one(one)

    def _under_new_name(self, row: EffectRow) -> _Moved:
        key, size = self.target_key(row) or "", self._size(row)
        return _Moved(row, self._classify(EffectKind.PUBLISH, key, size), key, size)

    def _renumber_one(self, moved: _Moved) -> None:
        row = moved.row
        row.klass, row.end = moved.klass, self._number()
        # Handing over who waits for it is safe only where it cannot close a circle.
        if row.klass != EffectClass.DATA:
            row.since = row.end
        self._update(row, moved.key, moved.size)

    def _relocations(self, dentries: Sequence[int]) -> tuple[list[_Copy], list[tuple[str, int]]]:
        """(entries whose objects are to be copied; old keys that are to go)."""
        wanted: list[_Copy] = []
        left_behind: list[tuple[str, int]] = []
        entries = self._meta.dentries.many(dentries)
        for dentry_id in dentries:
            left_behind += self._sources_in_passing(dentry_id)
            dentry, is_dir, is_shown = entries.get(dentry_id, _GONE)
            # Others only lose objects on the way: who had none has none.
            objects = self._meta.objects.of_dentry(dentry_id) if is_shown else []
            if dentry is None or not objects:
                continue
            key = self.key_of(dentry, is_file=True) + ("/" if is_dir else "")
            left_behind += [(row.key, dentry_id) for row in objects if row.key != key]
            needed = self._needs_relocation(dentry, key, objects)
            before = self._drop_relocations(dentry_id)
            if needed:
                klass = self._classify(EffectKind.PUBLISH, key, max(row.size for row in objects))
                shown = max(row.mtime_ns for row in objects if not row.stale)
                wanted.append(_Copy(dentry, klass, key, before, shown))
        return wanted, left_behind

    def _sources_in_passing(self, dentry: int) -> list[tuple[str, int]]:
        """Keys that are to be deleted once a copy in passing was made from them, wherever in line
        that comes to stand."""
        keys = (row.key for row in self.of_dentry(dentry) if self.is_passing_copy(row))
        return [(key, dentry) for key in keys if key is not None and key in self._unpublish]

    def _needs_relocation(self, dentry: DentryRow, key: str, objects: list[ObjectRow]) -> bool:
        self._cancel_unpublish(key, dentry.id)
        if any(row.key == key and not row.stale for row in objects):
            return False  # Renamed there and back.
        if self._brings_content(dentry):
            return False  # The new content goes to the new key.
        return any(not row.stale for row in objects)

    def _drop_showing(self, dentry: int) -> None:
        """Cancel all that would show an entry; the keys it has left are still to be deleted."""
        for row in self.of_dentry(dentry):
            if row.kind != EffectKind.UNPUBLISH:
                self._drop(row)

    def _drop_relocations(self, dentry: int) -> int:
        """Returns the number that the last of them had."""
        number = 0
        for row in self.of_dentry(dentry):
            if row.kind == EffectKind.RELOCATE and not self.is_passing_copy(row):
                number = row.end
                self._drop(row)
        return number

    def _queue_relocate(self, copy: _Copy, number: int) -> None:
        now = self._clock()
        self._insert(
            EffectRow(
                0, EffectKind.RELOCATE, copy.dentry.id, None, None, copy.klass,
                number, number, PENDING, None, now, now,
            ),
            copy.key,
            0,
        )  # fmt: skip

    # -- the flusher's side -------------------------------------------------------------------

    def published(self, effect: EffectRow, row: ObjectRow) -> None:
        """The bucket shows `row.key` now; correct even if names changed meanwhile."""
        with self._meta.transaction(Change.PUBLISHED):
            dentry = self._meta.dentries.by_id(effect.dentry or 0)
            row.dentry, row.stale = (dentry.id if dentry else None), 0
            row.mtime_ns = self._shown_since(effect, row.key)
            if dentry is not None and self._is_of_replaced(effect, dentry):
                row.stale = 1
            else:
                self._outdate_others(row)
            self._meta.objects.put(row)
            outdated = dentry is not None and self._is_outdated(effect, dentry)
            goes_on = outdated and self._goes_on(effect)
            if effect.id in self.effects:
                self._drop(effect)
            if dentry is None:
                self._queue_unpublish(row.key, None, self._number_of_deletion(row.key))
            elif self.key_of(dentry) == row.key:
                self._cancel_unpublish(row.key, dentry.id)
            elif outdated:
                self._leave(effect, dentry, row, goes_on=goes_on)
            else:
                self._move([dentry.id], effect.end)
                self._inherit(dentry.id, effect.since)

    def _shown_since(self, effect: EffectRow, key: str) -> int:
        """When the bucket came to show what it does under a key: new attributes change nothing."""
        known = self._meta.objects.get(key)
        same = effect.kind == EffectKind.PUBLISH and effect.gen is None
        if same and known is not None and known.etag and not known.stale:
            return known.mtime_ns
        return self._clock()

    def _outdate_others(self, row: ObjectRow) -> None:
        """Keys that a renamed entry has yet to leave show what it was before."""
        for other in self._meta.objects.of_dentry(row.dentry) if row.dentry is not None else ():
            if other.key != row.key and not other.stale:
                other.stale = 1
                self._meta.objects.put(other)
                if other.key not in self._unpublish:
                    self.let_go(other.key)

    def _leave(
        self, effect: EffectRow, dentry: DentryRow, row: ObjectRow, *, goes_on: bool
    ) -> None:
        """An earlier version came out under a name that the entry has no more.

        `goes_on`: it has to be shown under the present one as well, before its successor is.
        """
        if goes_on:
            self._copy_in_passing(effect, row.key)
        number = self._number_of_deletion(row.key, effect.end)
        self._queue_unpublish(row.key, dentry.id, number)
        self._inherit(dentry.id, effect.since)

    def relocated(self, effect: EffectRow, source: str, row: ObjectRow) -> None:
        """The bucket shows a copy of `source` under `row.key`; the source may go now."""
        with self._meta.transaction(Change.RELOCATED):
            known = self._meta.objects.get(source)
            # By now the key may show what has its name since: that stays.
            ours = known is not None and known.dentry in (None, effect.dentry)
            if known is not None and ours and source != row.key:
                known.dentry = None
                self._meta.objects.put(known)
                if source not in self._unpublish:
                    self.let_go(source)
            self.published(effect, row)

    def unpublished(self, effects: Iterable[EffectRow]) -> None:
        """The bucket shows these keys no more."""
        with self._meta.transaction(Change.UNPUBLISHED):
            for effect in effects:
                if effect.key is None:
                    continue
                known = self._meta.objects.get(effect.key)
                # A stale one may have changed hands since: nobody shows anything there meanwhile.
                if known is not None and (known.dentry in (None, effect.dentry) or known.stale):
                    self._deleted(known)
                if effect.id in self.effects:
                    self._drop(effect)


def _old_place(moved: _Copy | _Moved) -> tuple[int, int]:
    if isinstance(moved, _Moved):
        return in_order(moved.row)
    return (moved.before, 0 if moved.before else moved.shown_ns)
