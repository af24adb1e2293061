"""Makes room: evicts durable generations, oldest use first, when a device fills.

One task per device. It wakes when the device's `used` passes the high watermark, when somebody says
that more may be evictable now (`nudge`), and once a second. It then evicts down to the low
watermark. What may be evicted is not known here: the `EvictionSource` offers candidates, and
decides again, on the spot, whether one may still go. When they run out above the high watermark the
ledger is marked `exhausted`, and new writers wait.

Besides, the same task reads how far passthrough writers have come, corrects the ledger by a scan
now and then, and takes the metadata reserve again after it had to be given up.

An error of a device or of the source is logged and tried again: eviction must not end the mount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import structlog
import trio

from cachefs.cache.ledger import SpaceLedger
from cachefs.errors import CachefsError

INTERVAL = 1.0
"""Seconds between looks at a device where nothing happens."""
RESCAN_INTERVAL = 60.0
"""Seconds between scans of a device's cache files, if anything has changed there."""

_PAUSE = (
    0.05  # seconds between passes at least: many small files become durable in quick succession
)

log = structlog.get_logger()

Candidate = tuple[int, int]
"""Generation, time of its last use (any unit)."""


class EvictionSource(Protocol):
    """Knows which generations are durable, closed and not pinned, and removes their cache files."""

    def candidates(self, device: int) -> Iterable[Candidate]:
        """What may be evicted from the device of that index, in any order. Consumed at once."""
        ...

    async def evict(self, gen: int, goal: int | None = None) -> int:
        """Forget and remove a cache file, after checking again that it may go; of a huge one, when
        `goal` bytes are wanted, only as much.

        Returns the bytes freed, 0 if it may not. Credits the ledger itself, like every other
        removal of a cache file.
        """
        ...

    async def trim(self, device: int, goal: int) -> int:
        """Take up to `goal` bytes from files that are being read; returns how many."""
        ...


class Reaper:
    """Tends all devices of a cache.

    `on_evicted(device index, bytes)` is called for each eviction, `on_overrun(device index,
    generation)` once for a passthrough writer that outgrows its reservation. Neither may raise.
    """

    def __init__(
        self,
        ledgers: Sequence[SpaceLedger],
        source: EvictionSource,
        *,
        on_evicted: Callable[[int, int], None] | None = None,
        on_overrun: Callable[[int, int], None] | None = None,
        interval: float = INTERVAL,
        rescan_interval: float = RESCAN_INTERVAL,
    ) -> None:
        self._ledgers = tuple(ledgers)
        self._source = source
        self._on_evicted = on_evicted
        self._on_overrun = on_overrun
        self._interval = interval
        self._rescan_interval = rescan_interval

    async def run(self) -> None:
        """Tend the devices until cancelled."""
        async with trio.open_nursery() as nursery:
            for ledger in self._ledgers:
                nursery.start_soon(self._tend, ledger)

    def nudge(self) -> None:
        """Say that more may be evictable than before.

        A generation is durable, closed or unpinned.
        """
        for ledger in self._ledgers:
            if ledger.above_high:
                ledger.pressure.set()

    async def _tend(self, ledger: SpaceLedger) -> None:
        rescan_at = trio.current_time() + self._rescan_interval
        trouble: str | None = None
        while True:
            before, trouble = trouble, None
            try:
                if trio.current_time() >= rescan_at:
                    rescan_at = trio.current_time() + self._rescan_interval
                    await ledger.rescan_if_changed()
                await self.make_room(ledger)
            except (OSError, CachefsError) as err:
                trouble = str(err)
            if trouble is not None and trouble != before:  # once, not every second
                log.warning("cache device not tended", device=ledger.device.index, error=trouble)
            await trio.sleep(_PAUSE)
            with trio.move_on_after(self._interval):
                await ledger.pressure.wait()

    async def make_room(self, ledger: SpaceLedger) -> int:
        """One pass over a device, whether or not it is due; returns the bytes evicted."""
        ledger.pressure, looked, ledger.looked = trio.Event(), ledger.looked, trio.Event()
        for gen in await ledger.poll():
            log.warning("writer outgrew its reservation", device=ledger.device.index, gen=gen)
            if self._on_overrun is not None:
                self._on_overrun(ledger.device.index, gen)
        goal = ledger.excess()
        freed = await self._evict(ledger, goal) if goal else 0
        ledger.set_exhausted(ledger.above_high)
        looked.set()
        await ledger.mend_reserve()
        return freed

    async def _evict(self, ledger: SpaceLedger, goal: int) -> int:
        """Evict oldest uses until `goal` bytes are free or nothing is left that may go."""
        offered = sorted(self._source.candidates(ledger.device.index), key=lambda each: each[1])
        freed = 0
        for gen, _last_use in offered:
            if freed >= goal:
                break
            freed += await self._evict_one(ledger, gen, goal - freed)
        return freed + (await self._trim(ledger, goal - freed) if freed < goal else 0)

    async def _trim(self, ledger: SpaceLedger, goal: int) -> int:
        try:
            freed = await self._source.trim(ledger.device.index, goal)
        except (OSError, CachefsError) as err:
            log.warning("nothing is trimmed", device=ledger.device.index, error=str(err))
            return 0
        if freed and self._on_evicted is not None:
            self._on_evicted(ledger.device.index, freed)
        return freed

    async def _evict_one(self, ledger: SpaceLedger, gen: int, goal: int) -> int:
        try:
            freed = await self._source.evict(gen, goal)
        except (OSError, CachefsError) as err:
            log.warning("not evicted", device=ledger.device.index, gen=gen, error=str(err))
            return 0
        if freed and self._on_evicted is not None:
            self._on_evicted(ledger.device.index, freed)
        return freed
