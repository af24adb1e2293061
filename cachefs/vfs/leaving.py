"""Cache files that nobody needs any more, until they may go.

A commit reaches the disk some time after it was made. After a power cut the database may be as it
was before, and then it needs the cache files that it had then: what a rename replaced, what was
deleted or rewritten, what was still to be uploaded. So a cache file goes only once the commit that
gave it up is on the disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.cache.device import CacheDevice
from cachefs.failpoints import Point, reach
from cachefs.vfs.endings import Endings

log = structlog.get_logger("cachefs.vfs")

_DELAY = 0.1
"""Seconds in which files that are given up gather, to leave by one sync."""
_RETRY = 5.0


class Leaving:
    """Removes cache files in time. On the trio thread."""

    def __init__(
        self,
        sync_meta: Callable[[], Awaitable[None]],
        contents: Endings,
        *,
        lasting: bool,
    ) -> None:
        """`sync_meta` makes all commits so far survive a power cut; `lasting`: the database is
        where they can."""
        self._sync_meta = sync_meta
        self._contents = contents
        self._lasting = lasting
        self._files: dict[CacheDevice, list[int]] = defaultdict(list)
        self._some = trio.Event()
        self._swept: set[CacheDevice] = set()
        self._locks: dict[CacheDevice, trio.Lock] = defaultdict(trio.Lock)

    def add(self, device: CacheDevice, file: int) -> None:
        """A cache file that the last commit gave up."""
        forgets = not self._lasting or device.forgets
        if forgets and device.apart.direct:
            self._contents.remove(device, file)
            return
        self._files[device].append(file)
        self._some.set()

    async def sweep(self, device: CacheDevice) -> None:
        """Return once all that was given up so far on a device is removed. OSError: the database
        cannot be synced, and all stays."""
        async with self._locks[device]:
            files = self._files.pop(device, [])
            if not files:
                return
            try:
                await self._sync_meta()
            except BaseException:
                self._files[device] = files + self._files[device]
                raise
            reach(Point.LEAVING_AFTER_SYNC)
            await self._contents.remove_all(device, files)

    async def run(self) -> None:
        """Remove what is given up, some together. A device that is stalled keeps no other."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._some.wait()
                self._some = trio.Event()
                await trio.sleep(_DELAY)
                for device in self._files.keys() - self._swept:
                    self._swept.add(device)
                    nursery.start_soon(self._try_to_sweep, device)

    async def _try_to_sweep(self, device: CacheDevice) -> None:
        try:
            await self.sweep(device)
        except OSError as error:
            log.warning("cache files could not be removed", reason=str(error))
            await trio.sleep(_RETRY)
        self._swept.discard(device)
        if self._files:
            self._some.set()
