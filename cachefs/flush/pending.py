"""Pending effects: their rows, their memory, and the line that they stand in.

`flush.queue` decides what becomes an effect; here is kept which there are. Invariants: every
pending effect is a row and, equally, an entry in memory; after a rollback memory is read from the
rows anew. All of it belongs to the trio thread, and what does not await is atomic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

import trio

from cachefs.failpoints import Change
from cachefs.flush.underway import Doubts, UnderWay
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, EffectRow
from cachefs.model.effects import (
    EffectClass,
    EffectKind,
    OrderRules,
    Pending,
    classify,
    is_unordered,
)
from cachefs.model.names import is_temp, matches
from cachefs.model.order import EffectOrder
from cachefs.model.states import Event, GenState, advance
from cachefs.model.stuck import behind

_Key = TypeVar("_Key", int, str)

PENDING, BLOCKED, CONFLICTED = "pending", "blocked", "conflicted"
_S = 1_000_000_000
_INSISTED = 0
"""`queued_ns` of what a person wants in the store: it has settled long ago, after a restart too."""
_NOT_IN_LINE = 1 << 62
"""Id of an effect that is being considered and has no row yet: behind all that have one."""


class PendingEffects:
    """The effects of one mount that the bucket does not show yet."""

    def __init__(
        self,
        meta: Meta,
        rules: OrderRules,
        *,
        settle: float = 1.0,
        settle_max: float = 10.0,
        temp_hold: float = 3600.0,
        large_from: int = 16 << 20,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`settle`, `settle_max`, `temp_hold` in seconds; `clock` gives nanoseconds. `large` are
        publishes of more than `large_from` bytes, which are worth sending ahead of their turn.
        """
        self._large_from = large_from
        self._meta = meta
        self._rules = rules
        self._settle_ns = int(settle * _S)
        self._settle_max_ns = int(settle_max * _S)
        self._temp_hold_ns = int(temp_hold * _S)
        self._clock = clock
        self.on_unreferenced: Callable[[int], None] = lambda gen: None
        """Called, inside the transaction, for a generation that no effect needs any more."""
        self.may_pass: Callable[[EffectRow], bool] = lambda row: True
        """Asked of a barrier that is about to go out: False while something that ended before it
        is known to be on its way into the queue. Whatever it waits for comes with a `kick`."""
        self.holds_back: Callable[[int], bool] = lambda gen: False
        """Asked of a generation that is about to be shown: True while it has to be somewhere else
        first. When that is over there is a `kick`."""
        self.on_standing: Callable[[EffectRow, str], None] = lambda row, key: None
        """Called with each effect that is queued or has another key than before, and the key."""
        self._wake = trio.Event()
        self.under_way = UnderWay(self.kick)
        self._busy: dict[int, Callable[[], None]] = {}
        self._hurried: set[int] = set()
        self.settles = True
        """False while nothing is to wait for the settle delay (drain)."""
        self.reload()
        self.doubts = Doubts(self._unpublish)
        meta.db.on_rollback.append(self.reload)

    # -- memory -------------------------------------------------------------------------------

    def reload(self) -> None:
        """Read every pending effect from the database."""
        self.effects: dict[int, EffectRow] = {}
        self.large: dict[int, None] = {}
        self.marker_deletions: set[int] = set()
        """Pending deletions of markers: data is not deleted before they are gone."""
        self._by_dentry: dict[int, set[int]] = {}
        self._stacked: set[int] = set()
        """Entries with more than one pending effect."""
        self._by_gen: dict[int, set[int]] = {}
        self._unpublish: dict[str, int] = {}
        self._copies: dict[str, set[int]] = {}
        """Copies made in passing, by the key that they are made from."""
        self._order = EffectOrder()
        self._next = 1
        contents = self._meta.effects.contents()
        for row in self._meta.effects.all():
            key, size = None, None
            if row.id in contents:
                parent, name, size = contents[row.id]
                key = self._meta.dentries.path(parent, name).decode()
            self._remember(row, key, size)
            self._next = max(self._next, row.end + 1)
        for effect in self._busy:
            if effect in self._order:
                self._order.begin(effect)

    def _remember(self, row: EffectRow, key: str | None = None, size: int | None = None) -> None:
        self.effects[row.id] = row
        if row.dentry is not None:
            self._by_dentry.setdefault(row.dentry, set()).add(row.id)
            if len(self._by_dentry[row.dentry]) > 1:
                self._stacked.add(row.dentry)
        if row.gen is not None:
            self._by_gen.setdefault(row.gen, set()).add(row.id)
        if row.kind == EffectKind.UNPUBLISH and row.key is not None:
            self._unpublish[row.key] = row.id
            if matches(self._rules.barrier_patterns, row.key):
                self.marker_deletions.add(row.id)
        if self.is_passing_copy(row) and row.key is not None:
            self._copies.setdefault(row.key, set()).add(row.id)
        pending = self._pending(row, key, size)
        self._order.add(pending)
        self.on_standing(row, pending.key)
        if row.kind == EffectKind.PUBLISH and pending.size > self._large_from:
            self.large[row.id] = None

    def _forget(self, row: EffectRow) -> None:
        del self.effects[row.id]
        self._order.remove(row.id)
        self.large.pop(row.id, None)
        self.marker_deletions.discard(row.id)
        self._hurried.discard(row.id)
        _discard(self._by_dentry, row.dentry, row.id)
        if row.dentry is not None and len(self._by_dentry.get(row.dentry, ())) < 2:
            self._stacked.discard(row.dentry)
        _discard(self._by_gen, row.gen, row.id)
        _discard(self._copies, row.key, row.id)
        if row.kind == EffectKind.UNPUBLISH and row.key is not None:
            self._unpublish.pop(row.key, None)

    def _pending(self, row: EffectRow, key: str | None = None, size: int | None = None) -> Pending:
        """The effect as the order law sees it; `key` and `size` save looking them up."""
        if key is None:
            key = self.target_key(row) or ""
        return Pending(
            id=row.id or _NOT_IN_LINE,
            kind=EffectKind(row.kind),
            klass=EffectClass(row.klass),
            since=row.since,
            end=row.end,
            key=key,
            old_key=self._source_key(row, key),
            is_dir=key.endswith("/"),
            unordered=is_unordered(self._rules, key),
            held=self._is_held(row, self._held_name(row, key)),
            blocked=row.state != PENDING,
            size=self._size(row) if size is None else size,
        )

    def _source_key(self, row: EffectRow, key: str) -> str | None:
        """Where a relocation's bytes are: nobody may overwrite or delete them before it."""
        if row.kind != EffectKind.RELOCATE or row.dentry is None or key.endswith("/"):
            return None
        if row.key is not None:
            return row.key
        objects = self._meta.objects.of_dentry(row.dentry)
        return next((each.key for each in objects if not each.stale and each.key != key), None)

    def _held_name(self, row: EffectRow, key: str) -> str:
        """The name that decides whether an effect is held back: for an old key that a rename left,
        the new one, since its bytes are wanted until they are shown there."""
        if row.kind != EffectKind.UNPUBLISH:
            return key
        dentry = self._meta.dentries.by_id(row.dentry) if row.dentry is not None else None
        return self.key_of(dentry) if dentry is not None else ""

    def _is_held(self, row: EffectRow, key: str) -> bool:
        return (
            is_temp(self._rules.temp_patterns, key)
            and self._clock() - row.first_ns < self._temp_hold_ns
        )

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _insert(self, row: EffectRow, key: str | None = None, size: int | None = None) -> None:
        self._meta.effects.add(row)
        self._remember(row, key, size)
        self._meta.db.after_commit(self.kick)

    def _update(self, row: EffectRow, key: str | None = None, size: int | None = None) -> None:
        self._meta.effects.save(row)
        pending = self._pending(row, key, size)
        self._order.update(pending)
        self.on_standing(row, pending.key)
        self._meta.db.after_commit(self.kick)

    def _reassign(self, row: EffectRow, dentry: int, source: str | None) -> None:
        """An effect goes over to another entry, which has its name now.

        `source`: key that holds what it shows; None for one that shows a generation.
        """
        hurried = row.id in self._hurried
        self._forget(row)
        row.dentry, row.key = dentry, source
        self._meta.effects.save(row)
        self._remember(row)
        if hurried:
            self._hurried.add(row.id)
        if row.id in self._busy:
            self._order.begin(row.id)

    def _drop(self, row: EffectRow) -> None:
        """Remove an effect: done, superseded or cancelled."""
        self._meta.effects.remove(row.id)
        self._forget(row)
        if row.gen is not None and row.gen not in self._by_gen:
            self.on_unreferenced(row.gen)
        cancel = self._busy.get(row.id)
        if cancel is not None:
            self._meta.db.after_commit(cancel)
        self._meta.db.after_commit(self.kick)

    # -- questions ----------------------------------------------------------------------------

    def target_key(self, row: EffectRow) -> str | None:
        """Key that the effect will write or delete, as names are now; None: its name is gone."""
        if row.kind == EffectKind.UNPUBLISH or row.dentry is None:
            return row.key
        dentry = self._meta.dentries.by_id(row.dentry)
        return self.key_of(dentry) if dentry else None

    def key_of(self, dentry: DentryRow, *, is_file: bool = False) -> str:
        """Key of an entry: its path; a directory's ends with a slash. `is_file`: it is none."""
        path = self._meta.dentries.path(dentry.parent, dentry.name).decode()
        if is_file:
            return path
        inode = self._meta.inodes.get(dentry.ino)
        return path + "/" if inode is not None and is_dir_mode(inode.mode) else path

    def of_dentry(self, dentry: int) -> list[EffectRow]:
        """Pending effects of an entry in order."""
        ids = self._by_dentry.get(dentry, ())
        return sorted((self.effects[i] for i in ids), key=in_order)

    def of_gen(self, gen: int) -> list[EffectRow]:
        """Pending effects that publish a generation."""
        return sorted((self.effects[i] for i in self._by_gen.get(gen, ())), key=in_order)

    def is_passing_copy(self, row: EffectRow) -> bool:
        """Whether it shows, in passing, what another file had its entry's name for."""
        return row.kind == EffectKind.RELOCATE and row.key is not None

    def copies_of(self, key: str) -> list[EffectRow]:
        """Copies in passing that are still to be made from a key."""
        return sorted((self.effects[i] for i in self._copies.get(key, ())), key=in_order)

    def copy_from(self, row: EffectRow, key: str) -> None:
        """What a copy in passing is made from has moved. Call inside a transaction."""
        self._reassign(row, row.dentry or 0, key)

    def is_busy(self, effect: int) -> bool:
        """True while the flusher works on it."""
        return effect in self._busy

    def may_show(self, dentry: int) -> bool:
        """Whether the bucket shows something of an entry, or may in a moment."""
        busy = any(row.id in self._busy for row in self.of_dentry(dentry))
        return busy or bool(self._meta.objects.of_dentry(dentry))

    def blockers(self, effect: int, limit: int | None = None) -> list[EffectRow]:
        """The effects that this one waits for directly, the first `limit` of them."""
        found = self._order.blockers(effect, limit)
        return [self.effects[i] for i in found if i in self.effects]

    def behind(self, guilty: Collection[int]) -> dict[int, int]:
        """Effects behind those of `guilty`, at however many removes, each with one of them."""
        return behind(self._order, guilty)

    def in_trouble(self) -> list[EffectRow]:
        """Effects that are blocked or conflicted."""
        return [row for row in self.effects.values() if row.state != PENDING]

    def standing(self, effect: int) -> Pending:
        """An effect as it stands in line: key, size and class without a query. KeyError."""
        return self._order.get(effect)

    def is_shown(self, key: str) -> bool:
        """Whether a key's object is what the entry of that name shows: it is not to be deleted."""
        known = self._meta.objects.get(key)
        if known is None or known.stale or not known.etag or known.dentry is None:
            return False
        dentry = self._meta.dentries.by_id(known.dentry)
        return dentry is not None and self.key_of(dentry) == key

    def unpublish_of(self, key: str) -> EffectRow | None:
        """The pending deletion of a key."""
        effect = self._unpublish.get(key)
        return self.effects[effect] if effect is not None else None

    @property
    def next_number(self) -> int:
        """Number of the next effect: whatever ended so far has a smaller one."""
        return self._next

    @property
    def is_hurried(self) -> bool:
        """True while somebody waits for effects that are pending."""
        return bool(self._hurried)

    def has_work(self) -> bool:
        """False when nothing moves any more: all that is left is held, blocked or behind such."""
        return bool(self._busy) or next(self._order.iter_committable(), None) is not None

    def waiting_since_ns(self) -> int | None:
        """When the oldest pending effect was first queued; None when there is none."""
        return min((row.first_ns for row in self.effects.values()), default=None)

    # -- the flusher's handle ----------------------------------------------------------------

    def kick(self) -> None:
        """Wake whoever waits in `changed`."""
        self._wake.set()
        self._wake = trio.Event()

    def next_change(self) -> trio.Event:
        """Set at the next change of the queue."""
        return self._wake

    async def changed(self) -> None:
        """Return at the next change of the queue."""
        await self._wake.wait()

    def settled_at(self, row: EffectRow) -> int:
        """When an effect may go out, in nanoseconds since the epoch; 0: at once."""
        if row.id in self._hurried or not self.settles:
            return 0
        if row.queued_ns > self._clock():
            return 0  # The clock was set back: by how much is not to be waited for.
        return min(row.queued_ns + self._settle_ns, row.first_ns + self._settle_max_ns)

    def committable(self) -> Iterator[EffectRow]:
        """Effects that the order law lets become visible now, in order, without busy ones and those
        whose key has a request under way.

        Invalid after any change of the queue; stopping early costs nothing.
        """
        rows = (self.effects[i] for i in self._order.iter_committable())
        return (row for row in rows if not self._is_gated(row))

    def _is_gated(self, row: EffectRow) -> bool:
        if self.under_way.is_near(self._order.get(row.id).key):
            return True
        if row.gen is not None and self.holds_back(row.gen):
            return True
        barrier = row.klass == EffectClass.BARRIER and row.kind != EffectKind.UNPUBLISH
        return barrier and not self.may_pass(row)

    def may_commit(self, effect: int) -> bool:
        """True when nothing that ended before it is in its way."""
        return effect in self.effects and not self._order.blockers(effect, limit=1)

    def is_held(self, effect: int) -> bool:
        """True while the effect's name is a temporary one."""
        row = self.effects.get(effect)
        return row is not None and self._pending(row).held

    def release_expired(self) -> None:
        """Names that stayed temporary for longer than `flush.temp_hold` go out as they are."""
        for row in list(self.effects.values()):
            pending = self._pending(row)
            if self._order.get(row.id).held != pending.held:
                self._order.update(pending)
        self.kick()

    def refresh(self, dentry: int) -> None:
        """What an entry's effects copy from has moved. Call inside a transaction."""
        for row in self.of_dentry(dentry):
            self._update(row)

    def hurry(self, effects: Iterable[int]) -> None:
        """Skip the settle delay of these effects and of all that they wait for.

        Nothing waits for what ended after it, so all that came before the last of them is taken.
        """
        chosen = [self.effects[i] for i in effects if i in self.effects]
        last = max((row.end for row in chosen), default=-1)
        self._hurried.update(row.id for row in self.effects.values() if row.since <= last)
        self.kick()

    def insist(self, effects: Iterable[EffectRow]) -> None:
        """A person wants these in the store: they are due at once, and are never skipped."""
        chosen = [row for row in effects if row.id in self.effects]
        with self._meta.transaction(Change.INSIST):
            for row in chosen:
                row.queued_ns = _INSISTED
                self._update(row)
        self.hurry(row.id for row in chosen)

    def is_insisted(self, row: EffectRow) -> bool:
        """Whether a person wants it in the store."""
        return row.queued_ns == _INSISTED

    def begin(self, effect: int, on_cancel: Callable[[], None]) -> None:
        """The flusher starts on an effect; `on_cancel` is called when it becomes pointless."""
        self._busy[effect] = on_cancel
        self._order.begin(effect)

    def finish(self, effect: int) -> None:
        """The flusher let go of an effect, done or not."""
        self._busy.pop(effect, None)
        if effect in self._order:
            self._order.retry(effect)
        self.kick()

    async def stop(self, effect: int) -> None:
        """Make the flusher let go of an effect; returns when it has."""
        cancel = self._busy.get(effect)
        if cancel is not None:
            cancel()
        while effect in self._busy:
            await self.changed()

    def cancel(self, effect: EffectRow) -> None:
        """The effect has nothing to show (any more)."""
        with self._meta.transaction(Change.CANCEL):
            if effect.id in self.effects:
                self._drop(effect)

    def set_state(self, effect: EffectRow, state: str, error: str | None) -> None:
        """Mark an effect blocked or conflicted, or pending again."""
        with self._meta.transaction(Change.SET_STATE):
            current = self.effects.get(effect.id)
            if current is not None:  # Another object than `effect` once something was rolled back.
                current.state, current.error = state, error
                self._update(current)

    def _revive(self, number: int | None) -> None:
        """Content that was not wanted in the store any more is wanted after all."""
        gen = self._meta.generations.get(number) if number is not None else None
        if gen is not None and gen.state == GenState.SUPERSEDED:
            state = advance(GenState.SUPERSEDED, Event.RESOLVE)
            self._meta.generations.set_state(gen.gen, state)

    def _size(self, row: EffectRow) -> int:
        if self.is_passing_copy(row):
            source = self._meta.objects.get(row.key or "")
            return source.size if source is not None else 0
        generation = self._meta.generations.get(row.gen) if row.gen is not None else None
        return generation.size if generation else 0

    def _classify(
        self, kind: EffectKind, key: str, size: int, *, symlink: bool = False
    ) -> EffectClass:
        if symlink or kind != EffectKind.PUBLISH:
            return EffectClass.BARRIER
        known = self._meta.objects.get(key)
        return self._class_of(key, size, new_key=known is None or not known.etag)

    def _class_of(self, key: str, size: int, *, new_key: bool) -> EffectClass:
        """The class of a publish."""
        name = key.rstrip("/").rpartition("/")[2]
        kind = EffectKind.PUBLISH
        return classify(self._rules, kind=kind, name=name, path=key, size=size, new_key=new_key)


def in_order(row: EffectRow) -> tuple[int, int]:
    """Sort key: the order in which effects became complete."""
    return row.end, row.id


def is_dir_mode(mode: int) -> bool:
    """Whether a mode is a directory's."""
    return mode & 0o170000 == 0o040000


def _discard(index: dict[_Key, set[int]], at: _Key | None, member: int) -> None:
    members = index.get(at) if at is not None else None
    if members is None or at is None:
        return
    members.discard(member)
    if not members:
        del index[at]
