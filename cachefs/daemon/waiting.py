"""Waiting until paths are safe: `cachefs wait` and `cachefs flush`.

Reacts to the queue's changes. Between two looks it rests for many times as long as a look takes, so
that a crowd of waiters on a long queue leaves the daemon to those who write.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import trio

from cachefs.daemon.awaited import Waitlist
from cachefs.daemon.paths import absolute, locate
from cachefs.daemon.services import Services
from cachefs.daemon.trouble import Troubles
from cachefs.meta.rows import EffectRow
from cachefs.meta.summary import Summary
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.observe.control import Progress
from cachefs.observe.protocol import ControlError

TICK = 0.2
"""Seconds between two reports of progress, and two searches for what is stuck."""
_SYNC_TICK = 0.05
"""The same while cache files are being synced, of which the queue tells nothing."""
_HELD_GRACE_NS = 1_000_000_000
"""A file is renamed an instant after it is closed: only what stays temporary is held."""
_REST = 20.0
_SHORTEST_REST = 0.001


async def wait_until_safe(
    services: Services,
    troubles: Troubles,
    paths: Sequence[object],
    level: Level,
    timeout: float | None,
    progress: Progress,
) -> dict[str, Any]:
    """Return once everything closed so far at `paths` survives what `level` says.

    `timeout` in seconds. Raises ControlError with the exit codes of `cachefs wait`: 1 missing, 4
    time is up, 5 it cannot be reached, 6 removed before it was safe.
    """
    waiter = _Waiter(services, troubles, level)
    began = trio.current_time()
    with trio.move_on_after(math.inf if timeout is None else timeout):
        await waiter.run(paths, progress)
        waitlist = waiter.waitlist
        return {
            "paths": list(paths),
            "files": waitlist.files_total,
            "bytes": waitlist.bytes_total,
            "seconds": trio.current_time() - began,
        }
    why = "; the store is out of reach" if services.degraded() else ""
    raise ControlError(f"time is up: {waiter.what_is_left()}{why}", exit_code=4)


class _Waiter:
    """One request that waits."""

    def __init__(self, services: Services, troubles: Troubles, level: Level) -> None:
        self._services = services
        self._queue = services.queue
        self._troubles = troubles
        self._level = level
        self._summary = Summary(services.meta.db)
        self.waitlist = Waitlist(services, level)

    async def run(self, paths: Sequence[object], progress: Progress) -> None:
        """Until nothing is left to wait for."""
        spots = [await locate(self._services, path) for path in paths]
        self.waitlist = Waitlist(self._services, self._level)
        for spot in spots:
            self.waitlist.add(spot)
        await self._watch(progress)
        if Level.PROCESS < self._level < Level.SITE:
            await self._services.sync_meta()

    async def _watch(self, progress: Progress) -> None:
        next_tick = -math.inf
        while True:
            began = trio.current_time()
            if not self.waitlist.update():
                return
            if began >= next_tick:
                tick = _SYNC_TICK if self._inspect() else TICK
                numbers = self._numbers()
                next_tick = began + max(tick, _REST * (trio.current_time() - began))
                await progress(numbers)
                continue  # Something may have happened while the report was sent.
            rest = max(_SHORTEST_REST, _REST * (trio.current_time() - began))
            with trio.move_on_after(next_tick - began):
                await self._queue.changed()
                await trio.sleep(rest)

    def _inspect(self) -> bool:
        """Look for what will not come by itself; True if cache files are to be synced still."""
        if self.waitlist.local:
            self.waitlist.note_synced()
        if self.waitlist.warm:
            self.waitlist.note_copied()
        self._refuse_stuck()
        self._refuse_named_temporarily()
        self._refuse_held()
        return bool(self.waitlist.local or self.waitlist.warm)

    # -- what cannot be reached ---------------------------------------------------------------

    def _refuse_stuck(self) -> None:
        urgent = self.waitlist.effects.keys() - self.waitlist.local - self.waitlist.warm
        for effect in urgent & self._troubles.guilty():
            self._refuse(effect, effect)
        behind = self._troubles.behind()
        for effect in urgent & behind.keys():
            self._refuse(effect, behind[effect])

    def _refuse(self, effect: int, guilty: int) -> None:
        """Raises, unless the trouble has passed meanwhile."""
        row, culprit = self._queue.effects.get(effect), self._queue.effects.get(guilty)
        word = self._troubles.word(culprit) if culprit is not None else None
        if row is None or culprit is None or word is None:
            return
        if row is culprit:
            raise ControlError(f"{self._path(row)}: {word}: {row.error}", exit_code=5)
        raise ControlError(
            f"{self._path(row)}: blocked behind {self._path(culprit)} ({word}: {culprit.error})",
            exit_code=5,
        )

    def _refuse_held(self) -> None:
        """What came to be held while it was waited for: part of it is lost."""
        wanted = self.waitlist.effects.keys() - self.waitlist.local - self.waitlist.warm
        for gen in self._services.meta.generations.in_states(GenState.HELD) if wanted else ():
            for row in self._queue.of_gen(gen.gen):
                if row.id in wanted:
                    raise ControlError(f"{self._path(row)}: held: {gen.error}", exit_code=5)

    def _refuse_named_temporarily(self) -> None:
        now = time.time_ns()
        for effect in self._troubles.held() & self.waitlist.effects.keys():
            row = self._queue.effects.get(effect)
            if effect in self.waitlist.local or row is None or self._is_open(row):
                continue
            if now - row.queued_ns > _HELD_GRACE_NS and self._queue.standing(effect).held:
                raise ControlError(
                    f"{self._path(row)}: held: it bears a temporary name",
                    exit_code=5,
                    hint="it is uploaded once it is renamed, or after `flush.temp_hold`",
                )

    def _is_open(self, row: EffectRow) -> bool:
        entry = self._services.meta.dentries.by_id(row.dentry or 0)
        return entry is not None and entry.ino in self.waitlist.unsealed

    def _path(self, row: EffectRow) -> str:
        return absolute(self._services, self._queue.standing(row.id).key)

    # -- telling ------------------------------------------------------------------------------

    def _numbers(self) -> dict[str, int]:
        waitlist = self.waitlist
        sent = self._summary.sent()
        sizes = {each.gen: each.size for each in waitlist.effects.values()} if sent else {}
        on_the_way = sum(min(sizes.get(gen, 0), count) for gen, count in sent.items())
        return {
            "files_total": max(waitlist.files_total, waitlist.files_left),
            "files_left": waitlist.files_left,
            "bytes_total": max(waitlist.bytes_total, waitlist.bytes_left),
            "bytes_left": waitlist.bytes_left - on_the_way,
        }

    def what_is_left(self) -> str:
        """For people: how much, and one of them."""
        waitlist = self.waitlist
        keys = [each.key for each in waitlist.effects.values()]
        keys += [each.key for each in waitlist.unsealed.values()]
        if not keys:
            return "the store was asked for a name"
        one = absolute(self._services, keys[0])
        others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        return f"{waitlist.bytes_left} bytes are left in {one}{others}"
