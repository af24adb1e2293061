"""Cache files of which not all bytes are here: what lacks is fetched, compared, counted.

What a reader wants is kept if it has room. If not, it is read all the same, through memory. Who
writes to such a file, and who asked for it to be in the cache, needs it here, and waits for room.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.cache.filler import CHUNK, Fill, Filler, NoRoom
from cachefs.cache.placement import Placement
from cachefs.cache.unkept import Damaged, Unkept
from cachefs.errors import StoreError
from cachefs.failpoints import Point, reach
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.vfs.fetchroom import FetchRoom
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.opened import OpenInode
from cachefs.vfs.remote import RemoteView
from cachefs.vfs.sealing import Sealing

_FETCH_STEP = 128 << 20


class Filling(Sealing):
    """Fills cache files from the store."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        devices: Sequence[CacheDevice],
        placement: Placement,
        filler: Filler,
        remote: RemoteView,
        lanes: LaneKeeper,
    ) -> None:
        super().__init__(meta, queue, devices)
        self._placement = placement
        self._filler = filler
        self.fetches = filler.room = FetchRoom(placement)
        self._remote = remote
        self._lanes = lanes
        self.unkept = Unkept(_unknown)
        """What is read and not kept."""
        self.room_to_write: Callable[[OpenInode, int], Awaitable[None]] = self.fetches.wait_long
        """Awaited until so many bytes would have room. ENOSPC."""
        self.fetched: Callable[[Fill], Awaitable[int]] = _unknown
        """CRC64NVME of what was fetched."""
        self.on_damaged: Callable[[str], None] = lambda key: None
        """Called with the key of what was fetched and had not the checksum that it should have."""
        self.while_wanted: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around what is waited for: EINTR when who asks is being killed."""

    async def ensure(self, opened: OpenInode, start: int, end: int) -> None:
        """Return once the cache file holds [start, end) of the object's bytes."""
        while opened.fill is not None:
            fill = opened.fill
            fill.owner = opened
            try:
                with self.while_wanted():
                    await self._filler.ensure(fill, start, min(end, fill.size))
            except (OSError, StoreError):
                if not self._has_moved(opened, fill):
                    raise
                continue
            if opened.fill is not fill:
                continue
            if not fill.complete:
                fill.served = True
                self.account(opened)
                return
            await self._complete(opened, fill)

    async def _complete(self, opened: OpenInode, fill: Fill) -> None:
        """All bytes are here: compare them with the store's checksum. What differs is fetched once
        more (by whoever comes next), then EIO. So is what somebody has read of it meanwhile."""
        async with fill.checking:
            if opened.fill is not fill or not fill.complete:
                return
            trims = fill.trims
            found = None if fill.crc64 is None else await self.fetched(fill)
            if opened.fill is not fill or fill.trims != trims:
                return  # Some of it has left the cache meanwhile.
            if found == fill.crc64:
                self.filled(opened)
                if fill.failures and fill.served:
                    raise OSError(errno.EIO, "what was read of the file before was damaged")
                return
            self._lanes.take_back(opened)
            fill.spoiled()
            self.on_damaged(fill.key)
            if fill.failures > 1:
                fill.failures = 0
                raise OSError(errno.EIO, "the object has not the checksum that it was stored with")

    async def read(self, opened: OpenInode, start: int, end: int) -> bytes | None:
        """As `ensure`, but None then; where there is no room for them the bytes themselves, as far
        as the object reaches, which are not kept."""
        while (fill := opened.fill) is not None and start < (stop := min(end, fill.size)):
            data = self.unkept.at_hand(fill, start, stop)
            if data is not None:
                return data
            try:
                await self.ensure(opened, start, stop)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # A disk that others fill has no room, either.
                    raise
            else:
                return None
            if opened.fill is fill:
                try:
                    return await self._read_unkept(opened, fill, start, stop)
                except (OSError, StoreError):
                    if not self._has_moved(opened, fill):
                        raise
        return None

    async def _read_unkept(self, opened: OpenInode, fill: Fill, start: int, end: int) -> bytes:
        fill.served = True
        try:
            with self.while_wanted():
                return await self.unkept.read(fill, start, end)
        except Damaged:  # Whoever comes next has it fetched once more.
            self._lanes.take_back(opened)
            fill.spoiled()
            self.unkept.forget(fill.path)
            self.on_damaged(fill.key)
            raise

    async def fetch(self, opened: OpenInode) -> None:
        """Return once the cache file holds all of the object's bytes; counts them as they come.
        NoRoom: there was none for long."""
        for start in range(0, opened.size, _FETCH_STEP):
            await self._keep(opened, start, start + _FETCH_STEP, self.fetches.wait_long)
            self.account(opened)

    async def fetch_to_write(self, opened: OpenInode, start: int) -> None:
        """Return once the cache file holds what follows on `start`, for somebody who writes to it.
        ENOSPC, EINTR: as for any writer."""
        await self._keep(opened, start, opened.size, self.room_to_write)

    async def _keep(
        self,
        opened: OpenInode,
        start: int,
        end: int,
        room: Callable[[OpenInode, int], Awaitable[None]],
    ) -> None:
        while True:
            try:
                return await self.ensure(opened, start, end)
            except NoRoom:
                lacking = opened.fill.lacking(start, end) if opened.fill is not None else 0
                if lacking > self._placement.ledger(opened.device).most:
                    raise
                with self.while_wanted():
                    await room(opened, min(lacking, CHUNK))

    def _has_moved(self, opened: OpenInode, fill: Fill) -> bool:
        """True when a rename or a change of attributes of ours made a new object of it: its bytes
        are there now."""
        inode = self._meta.inodes.get(opened.ino)
        if inode is None:
            return False
        try:
            source = self._remote.object_of(inode)
        except OSError:
            return False
        same = (source.key, source.etag) == (fill.key, fill.etag)
        if same or source.gen != opened.gen.gen:
            return False
        fill.key, fill.etag, fill.stale = source.key, source.etag, False
        return True

    def filled(self, opened: OpenInode) -> None:
        """All bytes of the object are here."""
        self._lanes.take_back(opened)
        if opened.fill is not None:
            opened.trimmed += opened.fill.trims
        opened.fill = None
        opened.gen.present = None
        self._meta.generations.save(opened.gen)
        reach(Point.FILLED_AFTER_SAVE)
        self.account(opened)

    def save_progress(self, opened: OpenInode) -> None:
        """Remember which ranges of the object are here already."""
        if opened.fill is not None:
            opened.gen.present = opened.fill.present.pack()
            self._meta.generations.save(opened.gen)

    def account(self, opened: OpenInode) -> None:
        """Tell the ledger what the cache file takes now."""
        now = os.fstat(opened.fd).st_blocks * BLOCK_UNIT
        grown, opened.accounted = now - opened.accounted, now
        self.on_account(opened.device, grown)
        self.fetches.arrived(opened, grown)


async def _unknown(*_: object) -> NoReturn:
    raise NotImplementedError
