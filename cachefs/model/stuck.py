"""What cannot go out until somebody intervenes: effects behind refused or conflicted ones.

`EffectOrder.culprits` answers for one effect by walking back from it. Here all are answered in one
pass forward along the line, which is what a status page or somebody who waits for ten thousand
files needs: a stuck effect passes its trouble on to all that wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from cachefs.model.effects import EffectClass, EffectKind, Pending
from cachefs.model.keytree import paths_of
from cachefs.model.order import EffectOrder, position, structural
from cachefs.model.positions import Position

_DATA, _SMALL, _BARRIER, _UNPUBLISH = range(4)
_LANES = {EffectClass.DATA: _DATA, EffectClass.SMALL: _SMALL, EffectClass.BARRIER: _BARRIER}
_WAITS_FOR = ((), (_DATA,), (_DATA, _SMALL, _BARRIER, _UNPUBLISH), (_DATA, _SMALL, _BARRIER))


def behind(order: EffectOrder, guilty: Collection[int]) -> dict[int, int]:
    """Return each effect that is behind a guilty one, directly or not, with one such culprit.

    The guilty themselves are left out. Linear in the length of the line, but for sorting it.
    """
    trouble = _Trouble()
    for number in guilty:
        effect = order.get(number)
        if not effect.held:
            trouble.add(effect, number, _blocks_from(order, effect))
    found: dict[int, int] = {}
    for effect in sorted((e for e in order if not e.held), key=position):
        culprit = None if effect.id in guilty else trouble.reaches(effect)
        if culprit is not None:
            found[effect.id] = culprit
            # Stuck data waits for something itself, so it blocks from its own place on.
            trouble.add(effect, culprit, position(effect))
    return found


def _blocks_from(order: EffectOrder, effect: Pending) -> Position:
    if _lane(effect) == _DATA and not order.blockers(effect.id, limit=1):
        return (effect.since, 0, effect.id)
    return position(effect)


def _lane(effect: Pending) -> int:
    return _UNPUBLISH if effect.kind is EffectKind.UNPUBLISH else _LANES[effect.klass]


class _Trouble:
    """Stuck effects so far, each with its culprit, by class and by place in the tree of keys."""

    def __init__(self) -> None:
        self._first: list[tuple[Position, int] | None] = [None] * 4
        self._at: dict[str, list[tuple[Pending, int]]] = {}
        self._under: dict[str, list[tuple[Pending, int]]] = {}

    def add(self, effect: Pending, culprit: int, start: Position) -> None:
        """`effect` cannot go out; it holds up others from `start` on."""
        if not effect.unordered:
            first = self._first[_lane(effect)]
            if first is None or start < first[0]:
                self._first[_lane(effect)] = (start, culprit)
        for path in paths_of(effect):
            self._at.setdefault(path, []).append((effect, culprit))
            for above in _ancestors(path):
                self._under.setdefault(above, []).append((effect, culprit))

    def reaches(self, effect: Pending) -> int | None:
        """The culprit that `effect` is behind, if any."""
        place = position(effect)
        if not effect.unordered:
            for lane in _WAITS_FOR[_lane(effect)]:
                first = self._first[lane]
                if first is not None and first[0] < place:
                    return first[1]
        for other, culprit in self._near(effect):
            if position(other) < place and structural(effect, other):
                return culprit
        return None

    def _near(self, effect: Pending) -> Iterator[tuple[Pending, int]]:
        for path in paths_of(effect):
            yield from self._at.get(path, ())
            for above in _ancestors(path):
                yield from self._at.get(above, ())
            yield from self._under.get(path, ())


def _ancestors(path: str) -> Iterator[str]:
    while (cut := path.rfind("/")) > 0:
        path = path[:cut]
        yield path
