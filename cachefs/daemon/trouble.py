"""What does not go on by itself: stalled, conflicted, and what is behind such."""

from __future__ import annotations

import time

from cachefs.flush.queue import BLOCKED, CONFLICTED, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow
from cachefs.model.states import GenState

_DUTY = 20.0
"""An answer is used for this many times as long as it took to find: 5 % of the time at most."""
_RESTING = (GenState.STALLED, GenState.DURABLE, GenState.CONFLICTED)


class Troubles:
    """Answers shared by all who ask, so that many waiters cost no more than one."""

    def __init__(self, meta: Meta, queue: EffectQueue) -> None:
        self._meta = meta
        self._queue = queue
        self._behind: dict[int, int] = {}
        self._guilty: frozenset[int] = frozenset()
        self._held: frozenset[int] = frozenset()
        self._valid_until = 0.0

    def word(self, row: EffectRow) -> str | None:
        """`stalled` or `conflicted`; None for an effect that is in no trouble of its own.

        An effect is blocked also for as long as its file is being rewritten or copied: that ends
        by itself.
        """
        if row.state == CONFLICTED:
            return "conflicted"
        if row.state != BLOCKED:
            return None
        gen = self._meta.generations.get(row.gen) if row.gen is not None else None
        return "stalled" if gen is None or gen.state in _RESTING else None

    def guilty(self) -> frozenset[int]:
        """Effects that are stalled or conflicted."""
        self._refresh()
        return self._guilty

    def behind(self) -> dict[int, int]:
        """Effects that cannot go out, each with a guilty one that it is behind."""
        self._refresh()
        return self._behind

    def held(self) -> frozenset[int]:
        """Effects that stay out of line for a temporary name."""
        self._refresh()
        return self._held

    def _refresh(self) -> None:
        began = time.monotonic()
        if began < self._valid_until:
            return
        rows, standing = self._queue.in_trouble(), self._queue.standing
        self._guilty = frozenset(row.id for row in rows if self.word(row) is not None)
        self._held = frozenset(i for i in self._queue.effects if standing(i).held)
        self._behind = self._queue.behind(self._guilty) if self._guilty else {}
        now = time.monotonic()
        self._valid_until = now + _DUTY * (now - began)
