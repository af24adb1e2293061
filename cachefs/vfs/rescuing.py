"""Dirty cache files that are lost, and whose bytes are elsewhere: they are had from there.

Of what was in RAM there may be a copy on a disk, made for an fsync or on its way there; of any file
there may be one in another tier. Done when somebody opens such a file, when its upload finds
nothing to read, and once at the start for all that recovery missed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import BLOCKED, PENDING, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import GenState
from cachefs.vfs.contents import Contents

log = structlog.get_logger("cachefs.vfs")

_LOST = (GenState.SEALED, GenState.STALLED)
_CLOSED = (*_LOST, GenState.UPLOADING, GenState.CONFLICTED, GenState.HELD)


class Rescuer:
    """Makes new cache files of what `find` has. On the trio thread."""

    def __init__(self, meta: Meta, queue: EffectQueue, contents: Contents) -> None:
        self._meta = meta
        self._queue = queue
        self._contents = contents
        self._lock = trio.Lock()
        self.find: Callable[[GenerationRow, str], Awaitable[bool]] = _nowhere
        """Brings the bytes of a generation into a file, on the disk; False: they are not to be
        had."""
        self.take_copy: Callable[[GenerationRow], bool] = lambda row: False
        """Goes on with the copy that a generation has on another device; False: it has none."""

    async def run(self) -> None:
        """Rescue what was found missing at the start."""
        for row in self._meta.generations.in_states(*_LOST):
            if not self._is_there(row):
                await self.rescue(row.gen)

    def _is_there(self, row: GenerationRow) -> bool:
        device = self._contents.device(row)
        try:
            return device.healthy and device.stat(row.file).st_size >= row.size
        except OSError:
            return False

    async def rescue(self, gen: int) -> bool:
        """Whether the cache file of a closed generation is there, again or still. OSError."""
        async with self._lock:
            row = self._meta.generations.get(gen)
            if row is None or row.state not in _CLOSED or row.grows:
                return False
            if self._is_there(row):
                return True
            if row.copy_size is not None and self.take_copy(row):
                self._taken(gen)
                return True
            return row.state in _LOST and await self._rescue(row)

    def _taken(self, gen: int) -> None:
        """Its copy is its cache file now. What had been given up for lost is uploaded."""
        row = self._meta.generations.get(gen)
        if row is not None and row.state == GenState.STALLED:
            self._regain(row)
        self._queue.kick()

    async def _rescue(self, row: GenerationRow) -> bool:
        fresh = await self._contents.new_file(row.size)
        device, file = fresh.device, fresh.file
        device.let_go(fresh.fd)
        try:
            found = await self.find(row, device.path(file))
            if found:
                await device.apart.run(device.sync_dir, file)
            reach(Point.RESCUE_AFTER_BYTES)
            found = found and await self._is_sound(row, device.path(file))
            found = found and self._is_lost_still(row)
        except BaseException:
            self._contents.leave(device, file)
            raise
        if not found:
            self._contents.leave(device, file)
            return False
        row.device, row.file, row.synced = device.index, file, 0
        self._regain(row)
        self._contents.on_account(device, device.allocated(file))
        log.info("a lost cache file was had from another tier", generation=row.gen)
        self._queue.kick()
        return True

    async def _is_sound(self, row: GenerationRow, path: str) -> bool:
        """Whether they are the bytes that were closed, as far as that can be told."""
        if row.crc64 is None:
            return True
        return await self._contents.checksum(path, row.size) == row.crc64

    def _is_lost_still(self, row: GenerationRow) -> bool:
        now = self._meta.generations.get(row.gen)
        return (
            now is not None
            and now.state in _LOST
            and (now.device, now.file, now.sealed_ns) == (row.device, row.file, row.sealed_ns)
        )

    def _regain(self, row: GenerationRow) -> None:
        with self._meta.transaction(Change.REGAIN):
            row.state, row.error = GenState.SEALED, None
            self._meta.generations.save(row)
            for effect in self._queue.of_gen(row.gen):
                if effect.state == BLOCKED:
                    self._queue.set_state(effect, PENDING, None)


async def _nowhere(row: GenerationRow, path: str) -> bool:
    """There is no other tier."""
    return False
