"""Room for what is fetched: promised before it is asked for, counted as it arrives.

What somebody waits for waits until there is room for it. When there is none to be made (all there
is are files that are being written), it is fetched nevertheless after a while: reading goes on.

Of each cache file that something is on its way to, what has arrived is counted now and then, by
`Contents.account`: so much less is promised from then on. A fetch may outlive the last descriptor
of its file, and the next one begins a new `Fill`: they share what is known of the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from cachefs.cache.device import BLOCK_UNIT
from cachefs.cache.filler import Fill
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.placement import Placement
from cachefs.vfs.opened import OpenInode

_PATIENCE = 5.0
"""Seconds that a fetch waits for room at most."""


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
        """Set room aside as soon as there is any, or when there will be none."""
        while (over := self._withheld.get(fill.path)) is not None:
            await over.wait()
        ledger, until = self._ledger(fill), trio.current_time() + _PATIENCE

        def is_in_vain() -> bool:
            stuck = ledger.exhausted and not ledger.promised
            return stuck or trio.current_time() >= until

        ledger.pressure.set()
        try:
            await ledger.wait_for_room(nbytes, is_in_vain=is_in_vain)
        except OSError:
            ledger.promise(nbytes)
        self._note(fill, nbytes)

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
