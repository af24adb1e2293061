"""Room for what a program writes in the tracked lane: there, waited for, or found elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence

from cachefs.cache.ledger import SpaceLedger
from cachefs.vfs.opened import OpenInode


class Admission:
    """Lets writers go on when there is room for their bytes."""

    def __init__(self, ledgers: Sequence[SpaceLedger], *, wait_when_full: bool) -> None:
        self._ledgers = ledgers
        self._wait_when_full = wait_when_full
        self.move_away: Callable[[OpenInode], Awaitable[bool]] = _stay
        """Awaited with a file whose device is full; whether it is on another one now."""

    async def admit(self, opened: OpenInode, nbytes: int) -> SpaceLedger:
        """Return once `nbytes` are promised to a writer, with the ledger that they are to be
        settled with. ENOSPC. Its bytes are not being moved then."""
        await opened.settled()
        ledger = self._ledgers[opened.gen.device]
        if ledger.try_admit(nbytes):
            return ledger
        if await self.move_away(opened):
            ledger = self._ledgers[opened.gen.device]
        if not ledger.try_admit(nbytes):
            await self.make_room(ledger, nbytes)
        await opened.settled()
        return ledger

    async def make_room(self, ledger: SpaceLedger, nbytes: int) -> None:
        """Promise `nbytes` once they fit. ENOSPC: they do not, and nobody is to wait for it."""
        if self._wait_when_full:
            ledger.pressure.set()
            await ledger.wait_for_room(nbytes)
        elif not await ledger.admit_after_eviction(nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def _stay(opened: OpenInode) -> bool:
    """There is no other device for it."""
    return False
