"""The order law: when a pending effect may become visible in the bucket.

Effects stand in a line by the number at which they became complete (``end``; what one rename moved
shares a number, and there data goes before small files before barriers, then by id). An effect
waits for effects before it, by class:

- *data* waits for nothing; *small* for data; *barrier* for everything; unordered effects take no
  part;
- a superseding *data* effect also holds up those that waited for what it superseded (from
  ``since`` on), as long as it waits for nothing itself: so waiting never goes round in a circle;
- structure, whatever the class: effects on the same key, or on keys of which one lies below the
  other, keep their order. A directory's own marker does not hold up what is below it, nor the
  other way round when it is published;
- unpublishes never wait for each other: a run of them is one batch.

Held effects are out of the line; blocked ones stay in it but cannot commit.

Why no deadlock: every wait but one kind leads to an earlier position, and that one kind leads to
data effects that wait for nothing. So the first effect in line that is not blocked is always free
to go unless a blocked one is its culprit, for any set of effects whatsoever.

Cost: waits by class are never stored. Each class keeps its positions sorted, and what may commit
is a prefix found by comparing first elements. Of the waits by structure each effect remembers one
(its watch), and looks for another only when that one goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from cachefs.model.effects import (
    EffectClass,
    EffectKind,
    OrderMode,
    OrderRules,
    Pending,
    classify,
    is_unordered,
)
from cachefs.model.keytree import KeyTree, is_marker, paths_of
from cachefs.model.positions import Position, Positions

__all__ = [
    "EffectClass",
    "EffectKind",
    "EffectOrder",
    "OrderMode",
    "OrderRules",
    "Pending",
    "classify",
    "is_unordered",
    "position",
    "structural",
]

_DATA, _SMALL, _BARRIER, _UNPUBLISH, _LOOSE = range(5)
_LANE = {EffectClass.DATA: _DATA, EffectClass.SMALL: _SMALL, EffectClass.BARRIER: _BARRIER}

# Whom each lane waits for by class.
_WAITS_FOR: tuple[tuple[int, ...], ...] = (
    (),
    (_DATA,),
    (_DATA, _SMALL, _BARRIER, _UNPUBLISH),
    (_DATA, _SMALL, _BARRIER),
    (),
)


def _lane(effect: Pending) -> int:
    if effect.unordered:
        return _LOOSE
    if effect.kind is EffectKind.UNPUBLISH:
        return _UNPUBLISH
    return _LANE[effect.klass]


def position(effect: Pending) -> Position:
    """Return the place in line: by number, then class, then id."""
    rank = _BARRIER if effect.kind is EffectKind.UNPUBLISH else _LANE[effect.klass]
    return (effect.end, rank, effect.id)


def structural(later: Pending, earlier: Pending) -> bool:
    """Return whether the keys of two effects force ``later`` to wait for ``earlier``."""
    if later.kind is EffectKind.UNPUBLISH and earlier.kind is EffectKind.UNPUBLISH:
        return False
    return any(
        _keys_clash(mine, later, theirs, earlier)
        for mine in paths_of(later)
        for theirs in paths_of(earlier)
    )


def _keys_clash(mine: str, later: Pending, theirs: str, earlier: Pending) -> bool:
    if mine == theirs:
        return True
    if mine.startswith(theirs + "/"):
        return not is_marker(earlier)
    return theirs.startswith(mine + "/") and _minds_below(later)


def _same_key(one: Pending, two: Pending) -> bool:
    return paths_of(one) == paths_of(two) and is_marker(one) == is_marker(two)


def _minds_below(effect: Pending) -> bool:
    return effect.kind is not EffectKind.PUBLISH or not is_marker(effect)


class EffectOrder:
    """The line of pending effects. Every operation is logarithmic in its length.

    ``keep_below``: a barrier publish of fewer bytes that is first in line on its key is never
    superseded, so a pointer that is rewritten all the time still reaches the bucket.
    """

    def __init__(self, effects: Iterable[Pending] = (), *, keep_below: int = 1 << 20) -> None:
        self._keep_below = keep_below
        self._pending: dict[int, Pending] = {}
        self._begun: set[int] = set()
        self._blocked: set[int] = set()
        self._tree = KeyTree()
        self._watch: dict[int, int] = {}  # effect -> one effect that it waits for by structure
        self._watchers: dict[int, set[int]] = {}
        self._blocking = tuple(Positions() for _ in range(5))  # unheld, by lane
        self._ready = tuple(Positions() for _ in range(5))  # of those: only class may forbid
        self._last: Position = (-1, 0, 0)
        for effect in sorted(effects, key=position):
            self.add(effect)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, effect_id: int) -> bool:
        return effect_id in self._pending

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def get(self, effect_id: int) -> Pending:
        """Return the pending effect. KeyError if there is none."""
        return self._pending[effect_id]

    # -- changes -----------------------------------------------------------------------------------

    def add(self, effect: Pending) -> None:
        """Put an effect in line. ValueError if its id is there already."""
        if effect.id in self._pending:
            raise ValueError(f"effect {effect.id} is already pending")
        self._pending[effect.id] = effect
        if effect.held:
            return
        if effect.blocked:
            self._blocked.add(effect.id)
        self._set_watch(effect.id, self._find_structural(effect))
        self._tree.add(effect)
        self._enlist(effect)
        place = position(effect)
        if place < self._last:
            self._hold_up_later(effect)
        else:
            self._last = place

    def remove(self, effect_id: int) -> Pending:
        """Take an effect out of line: committed, or cancelled. Who waited for it is freed."""
        effect = self._pending.pop(effect_id)
        if not effect.held:
            self._delist(effect)
            self._tree.discard(effect)
            self._set_watch(effect_id, None)
            for watcher in sorted(self._watchers.pop(effect_id, ())):
                self._rewatch(watcher)
        self._begun.discard(effect_id)
        self._blocked.discard(effect_id)
        return effect

    def update(self, effect: Pending) -> None:
        """Replace the effect of the same id: renamed, reclassified, held, blocked, freed."""
        begun = effect.id in self._begun
        self.remove(effect.id)
        self.add(effect)
        if begun:
            self.begin(effect.id)

    def begin(self, effect_id: int) -> None:
        """Note that the effect is being committed: it still blocks, but is not offered again."""
        effect = self._pending[effect_id]
        self._delist(effect)
        self._begun.add(effect_id)
        self._enlist(effect)

    def retry(self, effect_id: int) -> None:
        """Undo :meth:`begin`: the commit failed and may be tried again."""
        effect = self._pending[effect_id]
        self._delist(effect)
        self._begun.discard(effect_id)
        self._enlist(effect)

    # -- superseding -------------------------------------------------------------------------------

    def may_supersede(self, old_id: int, new: Pending) -> bool:
        """Return whether ``new`` (in line or not yet) may take the place of ``old`` on its key.

        True if nothing in line before ``new`` waits for ``old``, or if ``new`` is data that waits
        for nothing itself: then the waiters can be handed to it without a circle. Never while
        ``old`` is being committed, never for a small barrier that is first in line on its key, nor
        for relocations.
        """
        old = self._pending[old_id]
        if EffectKind.RELOCATE in (old.kind, new.kind) or not _same_key(old, new):
            return False
        if old.held:
            return True
        if old_id in self._begun or self._must_keep(old) or position(new) <= position(old):
            return False
        before = (e for e in self._related(new) if position(e) < position(new))
        related = [e for e in before if e.id not in (old.id, new.id)]
        if any(position(e) > position(old) and structural(e, old) for e in related):
            return False
        if not self._class_waiter_between(old, new):
            return True
        takes_waiters = _lane(new) == _DATA and not new.held
        return takes_waiters and not any(structural(new, e) for e in related)

    def supersede(self, old_id: int, new: Pending) -> Pending:
        """Put ``new`` in line instead of ``old``, with its waiters. Returns what is in line.

        ValueError if :meth:`may_supersede` says no.
        """
        if not self.may_supersede(old_id, new):
            raise ValueError(f"effect {new.id} may not supersede {old_id}")
        old = self.remove(old_id)
        heir = new if old.held else replace(new, since=min(old.since, new.since))
        if heir.id in self._pending:
            self.update(heir)
        else:
            self.add(heir)
        return heir

    def _must_keep(self, old: Pending) -> bool:
        if old.kind is not EffectKind.PUBLISH or _lane(old) != _BARRIER or old.blocked:
            return False
        if old.size >= self._keep_below:
            return False
        here = (e for exact, e in self._tree.at_or_above(paths_of(old)[0]) if exact)
        return not any(e.kind is EffectKind.PUBLISH and position(e) < position(old) for e in here)

    def _class_waiter_between(self, old: Pending, new: Pending) -> bool:
        lane = _lane(old)
        low = (old.since, 0, old.id) if lane == _DATA else position(old)
        high = position(new)
        for waiting, awaited in enumerate(_WAITS_FOR):
            if lane in awaited:
                following = self._blocking[waiting].next_after(low)
                if following is not None and following[2] == old.id:
                    following = self._blocking[waiting].next_after(following)
                if following is not None and following < high:
                    return True
        return False

    def is_awaited_before(self, effect_id: int, later_id: int) -> bool:
        """Return whether anything in line between two effects waits for the first of them."""
        effect, later = self._pending[effect_id], self._pending[later_id]
        between = (e for e in self._related(later) if position(effect) < position(e))
        return self._class_waiter_between(effect, later) or any(
            structural(e, effect) for e in between if position(e) < position(later)
        )

    # -- questions ---------------------------------------------------------------------------------

    def iter_committable(self) -> Iterator[int]:
        """Yield the ids of what may become visible now, in line order. Invalid after any change."""
        lanes = [self._committable_in(lane) for lane in range(5)]
        return (place[2] for place in heapq.merge(*lanes))

    def committable(self, limit: int | None = None) -> list[int]:
        """Return the first ``limit`` ids of what may become visible now, in line order."""
        return list(islice(self.iter_committable(), limit))

    def is_committable(self, effect_id: int) -> bool:
        """Return whether this effect may become visible now."""
        effect = self._pending[effect_id]
        lane = _lane(effect)
        place = position(effect)
        if effect.held or place not in self._ready[lane]:
            return False
        bound = self._bound(lane)
        if bound is not None and place >= bound:
            return False
        return lane != _BARRIER or self._blocking[_BARRIER].first() == place

    def blockers(self, effect_id: int, limit: int | None = None) -> list[int]:
        """Return ids of effects that this one waits for directly: by class, then by structure."""
        effect = self._pending[effect_id]
        if effect.held:
            return []
        by_class = list(islice(self._class_blockers(effect), limit))
        if limit is not None and len(by_class) >= limit:
            return by_class
        seen = dict.fromkeys(by_class)
        for other in self._structural_blockers(effect):
            if limit is not None and len(seen) >= limit:
                break
            seen[other.id] = None
        return list(seen)

    def barriers_between(self, after: int, before: int) -> Iterator[Pending]:
        """Yield barriers that publish or relocate and ended in between."""
        barriers = self._blocking[_BARRIER]
        place = barriers.next_after((after, len(self._blocking), 0))
        while place is not None and place[0] < before:
            yield self._pending[place[2]]
            place = barriers.next_after(place)

    def on_key(self, key: str) -> list[Pending]:
        """Return the effects in line that write, delete or copy from a key."""
        return [each for exact, each in self._tree.at_or_above(key.strip("/")) if exact]

    def in_conflict(self, key: str) -> Iterator[Pending]:
        """Yield what shows something that a store of files cannot hold beside a key: a file and
        what is below its name exclude each other."""
        path, marks = key.strip("/"), key.endswith("/")
        for exact, each in self._tree.at_or_above(path):
            if each.kind is not EffectKind.UNPUBLISH and is_marker(each) is (exact and not marks):
                yield each
        if not marks:
            yield from (e for e in self._tree.below(path) if e.kind is not EffectKind.UNPUBLISH)

    def is_awaited_by_key(self, effect_id: int) -> bool:
        """Return whether a later effect on its key, or above or below it, waits for this one."""
        effect = self._pending[effect_id]
        place = position(effect)
        return any(
            position(other) > place and structural(other, effect)
            for other in self._related(effect)
            if other.id != effect_id
        )

    def culprits(self, effect_id: int) -> list[int]:
        """Return the blocked effects that this one is behind, directly or through others."""
        guilty: set[int] = set()
        seen = {effect_id}
        todo = [effect_id]
        while todo:
            effect = self._pending[todo.pop()]
            suspects = self._blocked | self._watch.keys() | self._barrier_before(effect)
            nexts = {s for s in suspects if self._waits_by_class(effect, self._pending[s])}
            nexts.update(e.id for e in self._structural_blockers(effect))
            guilty |= nexts & self._blocked
            todo.extend(nexts - seen)
            seen |= nexts
        return sorted(guilty, key=lambda i: position(self._pending[i]))

    def _barrier_before(self, effect: Pending) -> set[int]:
        """The barrier that an unpublish may be behind although it waits for no unpublish itself."""
        last = self._blocking[_BARRIER].last_before(position(effect))
        return set() if last is None else {last[2]}

    def _committable_in(self, lane: int) -> Iterator[Position]:
        ready = self._ready[lane]
        bound = self._bound(lane)
        if lane == _BARRIER:
            first = self._blocking[_BARRIER].first()
            if first is None or first not in ready or (bound is not None and first >= bound):
                return iter(())
            return iter((first,))
        return iter(ready) if bound is None else ready.before(bound)

    def _bound(self, lane: int) -> Position | None:
        """First position of the other lanes that this lane waits for."""
        firsts = (self._blocking[i].first() for i in _WAITS_FOR[lane] if i != lane)
        return min((f for f in firsts if f is not None), default=None)

    def _class_blockers(self, effect: Pending) -> Iterator[int]:
        place = position(effect)
        lanes = (self._blocking[i].before(place) for i in _WAITS_FOR[_lane(effect)])
        return (p[2] for p in heapq.merge(*lanes) if p[2] != effect.id)

    def _waits_by_class(self, effect: Pending, other: Pending) -> bool:
        if effect.held or other.held or effect.id == other.id:
            return False
        awaited = _lane(other) in _WAITS_FOR[_lane(effect)]
        return awaited and self._blocks_from(other) < position(effect)

    # -- structure ---------------------------------------------------------------------------------

    def _related(self, effect: Pending, *, loose_only: bool = False) -> Iterator[Pending]:
        """Yield effects at, above and below the keys of ``effect`` (it may yield one twice)."""
        for path in paths_of(effect):
            for _, other in self._tree.at_or_above(path):
                if other.unordered or not loose_only:
                    yield other
            yield from self._tree.below(path, loose_only=loose_only)

    def _structural_blockers(self, effect: Pending) -> Iterator[Pending]:
        if effect.held:
            return
        place = position(effect)
        # What is in line before a barrier it awaits by class already; only the unordered is left.
        loose_only = _lane(effect) in (_BARRIER, _UNPUBLISH)
        for other in self._related(effect, loose_only=loose_only):
            if position(other) < place and structural(effect, other):
                yield other

    def _find_structural(self, effect: Pending) -> int | None:
        """Return one structural blocker: when there are several, rather one that will go last."""
        few = islice(self._structural_blockers(effect), 8)
        last = max(few, key=position, default=None)
        return None if last is None else last.id

    def _hold_up_later(self, effect: Pending) -> None:
        """An effect came in before others: make those that must now wait for it do so."""
        place = position(effect)
        for other in list(self._related(effect)):
            free = other.id not in self._watch and position(other) > place
            loose_only = _lane(other) in (_BARRIER, _UNPUBLISH)
            if free and (effect.unordered or not loose_only) and structural(other, effect):
                self._change_watch(other, effect.id)

    def _rewatch(self, effect_id: int) -> None:
        effect = self._pending[effect_id]
        self._change_watch(effect, self._find_structural(effect))

    def _change_watch(self, effect: Pending, target: int | None) -> None:
        self._delist(effect)
        self._set_watch(effect.id, target)
        self._enlist(effect)

    def _set_watch(self, effect_id: int, target: int | None) -> None:
        before = self._watch.pop(effect_id, None)
        if before is not None and before in self._watchers:
            self._watchers[before].discard(effect_id)
            if not self._watchers[before]:
                del self._watchers[before]
        if target is not None:
            self._watch[effect_id] = target
            self._watchers.setdefault(target, set()).add(effect_id)

    # -- lists -------------------------------------------------------------------------------------

    def _blocks_from(self, effect: Pending) -> Position:
        """Where an effect begins to block: data that waits for nothing, from ``since`` on."""
        if _lane(effect) == _DATA and effect.id not in self._watch:
            return (effect.since, 0, effect.id)
        return position(effect)

    def _is_ready(self, effect: Pending) -> bool:
        """Whether only other classes can forbid the effect to commit."""
        return not (effect.blocked or effect.id in self._begun or effect.id in self._watch)

    def _enlist(self, effect: Pending) -> None:
        if effect.held:
            return
        lane = _lane(effect)
        self._blocking[lane].add(self._blocks_from(effect))
        if self._is_ready(effect):
            self._ready[lane].add(position(effect))

    def _delist(self, effect: Pending) -> None:
        if effect.held:
            return
        lane = _lane(effect)
        self._blocking[lane].remove(self._blocks_from(effect))
        if self._is_ready(effect):
            self._ready[lane].remove(position(effect))
