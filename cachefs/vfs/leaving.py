"""Cache files that nobody needs any more, until they may go.

A commit reaches the disk some time after it was made. After a power cut the database may be as it
was before, and then it needs the cache files that it had then: what a rename replaced, what was
deleted or rewritten, what was still to be uploaded. So a cache file goes only once the commit that
gave it up is on the disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.cache.device import CacheDevice
from cachefs.model.survival import Level

log = structlog.get_logger("cachefs.vfs")

_DELAY = 0.1
"""Seconds in which files that are given up gather, to leave by one sync."""
_RETRY = 5.0


class Leaving:
    """Removes cache files in time. On the trio thread."""

    def __init__(
        self,
        sync_meta: Callable[[], Awaitable[None]],
        remove: Callable[[CacheDevice, int], None],
        *,
        lasting: bool,
    ) -> None:
        """`sync_meta` makes all commits so far survive a power cut; `lasting`: the database is
        where they can."""
        self._sync_meta = sync_meta
        self._remove = remove
        self._lasting = lasting
        self._files: list[tuple[CacheDevice, int]] = []
        self._some = trio.Event()
        self._lock = trio.Lock()

    def add(self, device: CacheDevice, file: int) -> None:
        """A cache file that the last commit gave up."""
        if not self._lasting or device.survives <= Level.PROCESS:
            self._remove(device, file)
            return
        self._files.append((device, file))
        self._some.set()

    async def sweep(self) -> None:
        """Return once all that was given up so far is removed. OSError: the database cannot be
        synced, and all stays."""
        async with self._lock:
            files, self._files = self._files, []
            if not files:
                return
            try:
                await self._sync_meta()
            except BaseException:
                self._files = files + self._files
                raise
            for device, file in files:
                self._remove(device, file)

    async def run(self) -> None:
        """Remove what is given up, some together."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            await trio.sleep(_DELAY)
            try:
                await self.sweep()
            except OSError as error:
                log.warning("the database could not be synced", reason=str(error))
                self._some.set()
                await trio.sleep(_RETRY)
