"""Checkpoints that nobody waits for any more: `checkpoint.supersede = "unstarted"`.

When saves come faster than the store takes them, a checkpoint of which nothing has been sent yet is
skipped once a newer one of its kind is complete. Its files stay as they are on this machine, in the
state `superseded`: they are not in the store and will not be, unless somebody asks for it.

A pointer that was written between the two names the older one. So nothing is skipped before each
such pointer has been rewritten after the newer checkpoint: the versions in between go with it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import structlog

from cachefs.failpoints import Change
from cachefs.flush.queue import PENDING, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow
from cachefs.model import checkpoints
from cachefs.model.checkpoints import Checkpoint
from cachefs.model.effects import EffectClass, EffectKind
from cachefs.model.names import is_temp
from cachefs.model.states import Event, GenState, advance

log = structlog.get_logger("cachefs.flush")

_REASON = "a newer checkpoint is complete"
_REMEMBERED = 10_000
"""Keys whose checkpoint is not looked for again."""


class Superseder:
    """Finds and skips such checkpoints. Synchronous, on the trio thread."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        *,
        patterns: Sequence[str],
        markers: Sequence[str],
        temps: Sequence[str],
        open_keys: Callable[[], Collection[str]],
    ) -> None:
        """`patterns` name checkpoints, `markers` what completes one, `temps` what is unfinished;
        `open_keys`: paths of files that are being written."""
        self._meta = meta
        self._queue = queue
        self._markers = tuple(markers)
        self._temps = tuple(temps)
        self._open_keys = open_keys

        @functools.lru_cache(_REMEMBERED)
        def find(key: str) -> Checkpoint | None:
            return checkpoints.find(key, patterns)

        self._find = find

    def look(self) -> list[str]:
        """Skip what can be skipped; returns the roots of those checkpoints."""
        groups, pointers = self._groups()
        being_written = {self._find(key) for key in self._open_keys()}
        closed = {each: rows for each, rows in groups.items() if each not in being_written}
        complete = {
            each: max(row.end for row in rows)
            for each, rows in closed.items()
            if self._is_complete(each.root, rows)
        }
        skipped = []
        for each, rows in closed.items():
            newer = [end for other, end in complete.items() if _follows(other, each)]
            if not newer or not self._is_unstarted(each.root, rows):
                continue
            if self._may_go(rows, pointers, newer):
                self._skip(each.root, rows)
                skipped.append(each.root)
        return skipped

    def _groups(self) -> tuple[dict[Checkpoint, list[EffectRow]], list[EffectRow]]:
        """(effects by the checkpoint that they belong to, barriers outside of all)."""
        groups: dict[Checkpoint, list[EffectRow]] = defaultdict(list)
        outside = []
        for row in self._queue.effects.values():
            found = self._find(self._queue.standing(row.id).key)
            if found is not None:
                groups[found].append(row)
            elif row.klass == EffectClass.BARRIER and row.kind == EffectKind.PUBLISH:
                outside.append(row)
        return groups, outside

    def _is_complete(self, root: str, rows: Iterable[EffectRow]) -> bool:
        """Its marker is there; what is one file is its own."""
        keys = [self._queue.standing(row.id).key for row in rows]
        if any(is_temp(self._temps, key) for key in keys):
            return False
        names = [key.rpartition("/")[2] for key in keys]
        return root in keys or any(checkpoints.is_marker(name, self._markers) for name in names)

    def _is_unstarted(self, root: str, rows: Iterable[EffectRow]) -> bool:
        for row in rows:
            if row.kind != EffectKind.PUBLISH or row.state != PENDING:
                return False
            if self._queue.is_busy(row.id) or self._queue.is_insisted(row):
                return False
            if row.gen is not None and not self._is_unsent(row, row.gen):
                return False
        below = [*self._meta.objects.below(root + "/"), self._meta.objects.get(root)]
        return not any(known is not None for known in below)

    def _is_unsent(self, row: EffectRow, number: int) -> bool:
        gen = self._meta.generations.get(number)
        return (
            gen is not None
            and gen.state == GenState.SEALED
            and not self._meta.uploads.of_gen(number)
            and all(other.dentry == row.dentry for other in self._queue.of_gen(number))
        )

    def _may_go(
        self, rows: Iterable[EffectRow], pointers: Iterable[EffectRow], newer: Iterable[int]
    ) -> bool:
        """Whether every pointer that may name it was rewritten after one of the newer ones."""
        since, after = min(row.since for row in rows), min(newer)
        for pointer in pointers:
            if pointer.end <= since:
                continue
            if self._queue.is_busy(pointer.id):
                return False
            versions = self._queue.of_dentry(pointer.dentry or 0)
            if versions[-1].end <= after:
                return False
        return self._queue.can_drop_stale(since)

    def _skip(self, root: str, rows: Sequence[EffectRow]) -> None:
        with self._meta.transaction(Change.SUPERSEDE):
            since = min(row.since for row in rows)
            for row in rows:
                gen = self._meta.generations.get(row.gen) if row.gen is not None else None
                if gen is not None:
                    state = advance(GenState(gen.state), Event.SUPERSEDE)
                    self._meta.generations.set_state(gen.gen, state, _REASON)
                self._queue.cancel(row)
            self._queue.drop_stale(since)
        log.info("checkpoint superseded", path=root, files=len(rows))


def _follows(newer: Checkpoint, older: Checkpoint) -> bool:
    """Whether one checkpoint is a later one of the other's kind."""
    if newer.step is None or older.step is None or newer.framework != older.framework:
        return False
    folders = newer.root.rpartition("/")[0], older.root.rpartition("/")[0]
    return folders[0] == folders[1] and newer.step > older.step
