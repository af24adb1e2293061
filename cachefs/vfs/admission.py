"""Room for what a program writes in the tracked lane: there, waited for, or found elsewhere."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from cachefs.cache.ledger import SpaceLedger
from cachefs.meta import Meta
from cachefs.model.states import GenState
from cachefs.vfs.opened import OpenInode


class Admission:
    """Lets writers go on when there is room for their bytes."""

    def __init__(self, meta: Meta, ledgers: Sequence[SpaceLedger], *, wait_when_full: bool) -> None:
        self._meta = meta
        self._ledgers = ledgers
        self._waiting: Counter[int] = Counter()
        """Inode -> its writers that wait for room."""
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
            await self.make_room(ledger, nbytes, opened.ino)
        await opened.settled()
        return ledger

    async def make_room(self, ledger: SpaceLedger, nbytes: int, ino: int) -> None:
        """Promise `nbytes` to an inode once they fit. ENOSPC: they do not, and nobody is to wait
        for it; or it would be for ever, since all there is on the device are files that are being
        written, and their writers wait for each other."""
        if self._wait_when_full:
            ledger.pressure.set()
            self._waiting[ino] += 1
            try:
                await ledger.wait_for_room(nbytes, is_in_vain=lambda: self._is_in_vain(ledger))
            finally:
                self._waiting[ino] -= 1
        elif not await ledger.admit_after_eviction(nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_in_vain(self, ledger: SpaceLedger) -> bool:
        """Whether nothing that is on a device can go, or become what can, while writers wait."""
        if ledger.reservations():
            return False
        return all(
            row.state == GenState.OPEN and self._waiting[row.ino] > 0
            for row in self._meta.generations.on(ledger.device.index)
        )


async def _stay(opened: OpenInode) -> bool:
    """There is no other device for it."""
    return False
