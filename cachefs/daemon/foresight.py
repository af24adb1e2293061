"""Tells that the next checkpoint will not fit into the cache, before it is saved."""

from __future__ import annotations

import time

import structlog
import trio

from cachefs.daemon import census
from cachefs.daemon.checkpoints import CheckpointIndex
from cachefs.daemon.services import Services
from cachefs.meta.cached import cached_files
from cachefs.model.foresight import Forecast, Save, foresee

log = structlog.get_logger("cachefs.daemon")

_INTERVAL = 1.0
"""Seconds between two looks at least."""
_LONGEST = 60.0
_DUTY = 50.0


class Foresight:
    """Keeps `Services.forecast` up to date, and logs when it changes for the worse."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._checkpoints = CheckpointIndex(services)

    async def run(self) -> None:
        """Never returns."""
        while True:
            event = self._services.queue.next_change()
            began = trio.current_time()
            await self.look()
            await trio.sleep(max(_INTERVAL, _DUTY * (trio.current_time() - began)))
            with trio.move_on_after(self._rest()):
                await event.wait()

    async def look(self) -> None:
        """Look now."""
        points = await self._checkpoints.newest()
        saves = [Save(each["bytes"], each["changed_ns"], each["complete"]) for each in points]
        capacity = sum(ledger.capacity for ledger in self._services.ledgers)
        found = foresee(
            saves,
            room=max(0, capacity - self._needed()),
            capacity=capacity,
            now_ns=time.time_ns(),
        )
        self._tell(found)
        self._services.forecast = found

    def _needed(self) -> int:
        """Bytes that cannot be evicted: what the store lacks, and what is pinned."""
        meta = self._services.meta
        pinned = (
            row.size
            for row in (cached_files(meta.db, meta.dentries) if meta.pins else ())
            if row.is_durable and meta.pins.over(row.path) is not None
        )
        return census.take(self._services).bytes + sum(pinned)

    def _tell(self, found: Forecast | None) -> None:
        before = self._services.forecast
        if found is None or found.fits is (before is None or before.fits):
            return
        words = {"expected": found.nbytes, "room": found.room}
        if found.fits:
            log.info("the next checkpoint fits into the cache again", **words)
        else:
            log.warning("the next checkpoint will not fit: its writer will wait", **words)

    def _rest(self) -> float:
        """Seconds after which the answer may be another one by itself."""
        found = self._services.forecast
        left = (found.look_again_ns - time.time_ns()) / 1e9 if found is not None else 0.0
        return min(_LONGEST, left) if left > 0 else _LONGEST
