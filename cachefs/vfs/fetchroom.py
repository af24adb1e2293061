"""Room for what is fetched: promised before it is asked for, counted as it arrives.

What somebody waits for waits until there is room for it. When there is none to be made soon (all
there is are files that are pinned, or being written, or not in the store yet), NoRoom tells, and
reading goes on without keeping what is read (`cache.unkept`). Where that has happened nobody waits
for long any more: now and then one pass of the reaper is, to find out whether room can be made
again, and what there is in between is taken.

Of each cache file that something is on its way to, what has arrived is counted now and then, by
`Contents.account`: so much less is promised from then on. A fetch may outlive the last descriptor
of its file, and the next one begins a new `Fill`: they share what is known of the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
import trio

from cachefs.cache.device import BLOCK_UNIT
from cachefs.cache.filler import Fill, NoRoom
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.placement import Placement
from cachefs.vfs.opened import OpenInode

log = structlog.get_logger("cachefs.vfs")

_PATIENCE = 5.0
"""Seconds that a fetch waits for room at most."""
_SCARCE = 60.0
"""Seconds from a wait in vain in which the next ones are short."""
_HURRY = 1.0
"""Seconds of such a one at most, and those from one in vain to the next. Short ones take no place
in the line of those who write: what would fit for them is not withheld."""
_LONG = 30.0
"""Seconds that what is to be kept in any case waits for room."""


@dataclass(slots=True)
class _UnderWay:
    """What is on its way to one cache file: bytes, and those that the ledger still promises."""

    ledger: SpaceLedger
    opened: OpenInode
    coming: int = 0
    promised: int = 0

    def keep(self, nbytes: int) -> None:
        """Promise no more than so many bytes any longer."""
        if nbytes < self.promised:
            self.ledger.settle(self.promised - nbytes, 0)
            self.promised = nbytes


class FetchRoom:
    """The filler's `Room`. On the trio thread."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._files: dict[str, _UnderWay] = {}
        self._withheld: dict[str, trio.Event] = {}
        self._in_vain: dict[int, float] = {}
        """Device -> when room was waited for there in vain."""

    @contextmanager
    def withheld(self, path: str) -> Iterator[None]:
        """Meanwhile nothing that is not on its way already is fetched into a cache file."""
        self._withheld[path] = over = trio.Event()
        try:
            yield
        finally:
            del self._withheld[path]
            over.set()

    def left(self, fill: Fill) -> int:
        """Bytes that may be promised now on the device of a fill's file."""
        ledger = self._ledger(fill)
        return ledger.headroom() if not ledger.wanted and fill.path not in self._withheld else 0

    def promise(self, fill: Fill, nbytes: int) -> None:
        """Set room aside that is left."""
        self._ledger(fill).promise(nbytes)
        self._note(fill, nbytes)

    async def wait(self, fill: Fill, nbytes: int) -> None:
        """Set room aside as soon as there is any. NoRoom: none is made soon."""
        while (over := self._withheld.get(fill.path)) is not None:
            await over.wait()
        ledger = self._ledger(fill)
        if not ledger.try_admit(nbytes) and not await self._is_made(ledger, nbytes):
            raise _no_room()
        self._note(fill, nbytes)

    async def wait_long(self, opened: OpenInode, nbytes: int) -> None:
        """Return when so many bytes would have room. NoRoom: they had none for long."""
        ledger, until = self._placement.ledger(opened.device), trio.current_time() + _LONG
        while not await ledger.admit_after_eviction(nbytes):
            if trio.current_time() >= until:
                raise _no_room()
            await trio.sleep(_HURRY)
        ledger.settle(nbytes, 0)

    async def _is_made(self, ledger: SpaceLedger, nbytes: int) -> bool:
        """Wait for room; whether it was there in the end, and is promised."""
        device, now = ledger.device.index, trio.current_time()
        since = now - self._in_vain.get(device, float("-inf"))
        if since < _HURRY or nbytes > ledger.most:
            return False
        made = False
        if since < _SCARCE:
            with trio.move_on_after(_HURRY):
                made = await ledger.admit_after_eviction(nbytes)
        else:
            made = await self._wait_patiently(ledger, nbytes)
        if not made:
            self._in_vain[device] = trio.current_time()
            if since >= _SCARCE:
                log.info("no room for what is read: it is not kept", device=device)
        return made

    async def _wait_patiently(self, ledger: SpaceLedger, nbytes: int) -> bool:
        looked, until = ledger.looked, trio.current_time() + _PATIENCE
        ledger.pressure.set()

        def is_in_vain() -> bool:
            """What is on its way can be read, and go again."""
            stuck = (ledger.exhausted or looked.is_set()) and not ledger.promised
            return stuck or trio.current_time() >= until

        try:
            return await ledger.wait_for_room(nbytes, is_in_vain=is_in_vain)
        except OSError:
            return False

    def settle(self, fill: Fill, nbytes: int) -> None:
        """A fetch of so many promised bytes is over."""
        known = self._files[fill.path]
        self._count(fill.path, known)
        known.coming -= nbytes
        known.keep(known.coming)
        if not known.coming:
            del self._files[fill.path]

    def arrived(self, opened: OpenInode, nbytes: int) -> None:
        """So many bytes more of a file that is being fetched are counted as used."""
        known = self._files.get(opened.fill.path) if opened.fill is not None else None
        if known is not None and nbytes > 0:
            known.keep(max(0, known.promised - nbytes))

    def take_up(self, opened: OpenInode, path: str) -> None:
        """A file was opened anew: from now on it counts what is on its way there."""
        known = self._files.get(path)
        if known is not None:
            opened.accounted, known.opened = known.opened.accounted, opened

    def count(self, path: str) -> None:
        """Count what has arrived in a cache file, before some of it goes."""
        known = self._files.get(path)
        if known is not None:
            self._count(path, known)

    def count_all(self) -> None:
        """Count what has arrived anywhere."""
        for path, known in self._files.items():
            self._count(path, known)

    def shrunk(self, path: str, nbytes: int) -> None:
        """So many bytes of a cache file are gone, and not counted any more."""
        known = self._files.get(path)
        if known is not None:
            known.opened.accounted -= nbytes

    def _ledger(self, fill: Fill) -> SpaceLedger:
        assert isinstance(fill.owner, OpenInode)
        return self._placement.ledger(fill.owner.device)

    def _note(self, fill: Fill, nbytes: int) -> None:
        known = self._files.get(fill.path)
        if known is None:
            assert isinstance(fill.owner, OpenInode)
            known = self._files[fill.path] = _UnderWay(self._ledger(fill), fill.owner)
        known.coming += nbytes
        known.promised += nbytes

    def _count(self, path: str, known: _UnderWay) -> None:
        opened = known.opened
        if opened.device.path(opened.gen.file) != path:
            return  # Its bytes are another file's by now, which is counted.
        with contextlib.suppress(OSError):
            now = os.stat(path).st_blocks * BLOCK_UNIT
            grown, opened.accounted = now - opened.accounted, now
            if grown > 0:
                known.ledger.charge(grown)
                known.keep(max(0, known.promised - grown))
            else:
                known.ledger.credit(-grown)


def _no_room() -> NoRoom:
    return NoRoom(errno.ENOSPC, os.strerror(errno.ENOSPC))
