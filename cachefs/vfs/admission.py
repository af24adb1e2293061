"""Room for what a program writes in the tracked lane: there, waited for, or found elsewhere."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import structlog

from cachefs.cache.ledger import SpaceLedger
from cachefs.meta import Meta
from cachefs.model.states import GenState
from cachefs.vfs.opened import OpenInode

log = structlog.get_logger("cachefs.vfs")

Asker = tuple[int, int]
"""(request, thread that waits for its answer); zeros: nobody does."""

_STUCK = (GenState.OPEN, GenState.HELD, GenState.CONFLICTED)
"""States of files that do not make room by themselves."""
_PATIENCE = 30.0
"""Seconds until writers of such files who do something else are not waited for any more."""


class _Moved(Exception):
    """Who waits for room on a device has got it on another."""


class Admission:
    """Lets writers go on when there is room for their bytes.

    `timeout`: seconds that one waits for room when the cache is full; 0: nobody waits.
    """

    def __init__(self, meta: Meta, ledgers: Sequence[SpaceLedger], *, timeout: float) -> None:
        self._meta = meta
        self._ledgers = ledgers
        self._waiting: Counter[int] = Counter()
        """Inode -> its writers that wait for room."""
        self._wanted: Counter[int] = Counter()
        """Device -> bytes that they wait for."""
        self._timeout = timeout
        self.asker: Callable[[], Asker] = lambda: (0, 0)
        """Who made the request at hand. Asked before its handler awaits anything."""
        self.is_given_up: Callable[[Asker], bool] = lambda asker: False
        """Whether who asks is about to die, and its request is all that it waits for."""
        self.move_away: Callable[[OpenInode], Awaitable[bool]] = _stay
        """Awaited with a file whose device is full; whether it is on another one now."""
        self.on_waiting: Callable[[], None] = lambda: None
        """Called when somebody begins to wait for room."""
        self.is_made: Callable[[SpaceLedger], bool] = lambda ledger: False
        """Whether room is being made on a device out of files that are being written."""

    @property
    def waiting(self) -> int:
        """Writers that wait for room."""
        return self._waiting.total()

    @property
    def is_patient(self) -> bool:
        """Whether a writer waits at all when the cache is full."""
        return self._timeout > 0

    def is_waiting(self, ino: int) -> bool:
        """Whether a writer of an inode waits for room."""
        return self._waiting[ino] > 0

    def waits_for(self, ledger: SpaceLedger) -> int:
        """Bytes on a device that are waited for."""
        return self._wanted[ledger.device.index]

    async def admit(self, opened: OpenInode, nbytes: int, asker: Asker) -> SpaceLedger:
        """Return once `nbytes` are promised to a writer, with the ledger that they are to be
        settled with. ENOSPC, EINTR. Its bytes are not being moved then."""
        while True:
            await opened.settled()
            ledger = self._ledgers[opened.gen.device]
            if ledger.try_admit(nbytes):
                return ledger
            if await self.move_away(opened):
                ledger = self._ledgers[opened.gen.device]
            if await self._admit_there(opened, ledger, nbytes, asker):
                return ledger

    async def _admit_there(
        self, opened: OpenInode, ledger: SpaceLedger, nbytes: int, asker: Asker
    ) -> bool:
        """False: the file has moved on meanwhile, and nothing was promised."""

        def has_moved() -> bool:
            return self._ledgers[opened.gen.device] is not ledger

        try:
            if not ledger.try_admit(nbytes):
                await self.make_room(ledger, nbytes, opened.ino, asker, has_moved)
        except _Moved:
            return False
        await opened.settled()
        if has_moved():
            ledger.settle(nbytes, 0)
            return False
        return True

    async def look_for_room(self, opened: OpenInode, nbytes: int) -> None:
        """Return once `nbytes` would fit where a file is that somebody is to write to: it has to be
        fetched before. ENOSPC."""
        ledger = self._ledgers[opened.gen.device]
        await self.make_room(ledger, nbytes, opened.ino)
        ledger.settle(nbytes, 0)

    async def make_room(
        self,
        ledger: SpaceLedger,
        nbytes: int,
        ino: int,
        asker: Asker = (0, 0),
        has_moved: Callable[[], bool] = lambda: False,
    ) -> None:
        """Promise `nbytes` to an inode once they fit. _Moved: it is not there any more.

        ENOSPC: they do not, and nobody is to wait for it; or it has taken too long, or would take
        for ever, since all there is on the device are files that are being written, or wait for
        somebody's decision. EINTR: who asked does not want it any more.
        """
        if not self._timeout:
            if not await ledger.admit_after_eviction(nbytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return
        began = time.monotonic()
        ledger.pressure.set()
        self._waiting[ino] += 1
        self._wanted[ledger.device.index] += nbytes
        self.on_waiting()
        log.info("a writer waits for room", inode=ino, device=str(ledger.device.directory))
        try:
            await ledger.wait_for_room(
                nbytes, is_in_vain=lambda: self._is_in_vain(ledger, began, asker, has_moved)
            )
        finally:
            self._waiting[ino] -= 1
            self._wanted[ledger.device.index] -= nbytes

    def _is_in_vain(
        self, ledger: SpaceLedger, began: float, asker: Asker, has_moved: Callable[[], bool]
    ) -> bool:
        """Whether one who has waited since `began` is to be told that there is no room."""
        if has_moved():
            raise _Moved
        if self.is_given_up(asker):
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))
        waited = time.monotonic() - began
        if waited >= self._timeout:
            return True
        if self.is_made(ledger):
            return False
        patient = waited < _PATIENCE
        if patient and ledger.reservations():
            return False
        return all(
            row.state in _STUCK
            and not (patient and row.state == GenState.OPEN and not self._waiting[row.ino])
            for row in self._meta.generations.on(ledger.device.index)
        )


async def _stay(opened: OpenInode) -> bool:
    """There is no other device for it."""
    return False
