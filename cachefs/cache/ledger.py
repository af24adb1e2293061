"""The space on one cache device: what is taken, what is promised, who may write more.

    capacity = min(limit - lists, used + free on the filesystem)   other users shrink it
    room     = capacity - used - promised - reserved

`lists` is room for what a filesystem allocates after the bytes, and counts as the file's: the
blocks that list where its ranges are. `used` is what cache files allocate. Callers report every
change (`charge`, `credit`), and a scan of the files corrects it now and then. `promised` was
admitted but is not yet written (tracked lane). `reserved` is what passthrough writers may still
write: nobody can slow them down, so their space is set aside before they start, and their growth is
read from their cache files.

Concurrency: the trio thread only. Everything but the `async` methods is synchronous and cannot be
interrupted, so state needs no lock. Waiters are served in the order in which they came, and who
comes later is not admitted past them: a large request is never starved by small ones.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import trio

from cachefs.cache.device import CacheDevice
from cachefs.cache.reserve import MetadataReserve
from cachefs.model.watermark import Watermarks

DEFAULT_FILL = 0.9
"""Part of what is free at first mount that the cache takes when no size is configured."""

# Seconds for which a reading of the filesystem's free space is used. More than the reaper's
# interval: its polls, made in a thread, then spare everybody else the call.
_FREE_VALID = 2.0
_EVICTION_PATIENCE = 5.0  # seconds that a writer who may not wait for the store gives the reaper
_LISTS = 256  # One part in so many: ext4 lists 340 ranges, of a block each at least, in a block.
_RECHECK = 1.0  # seconds after which a waiter looks again: others free space on the disk, too


@dataclass(slots=True)
class Reservation:
    """Space set aside for one passthrough writer: `size` bytes, of which `written` are used."""

    size: int
    written: int = 0
    overrun: bool = False

    @property
    def left(self) -> int:
        """Bytes still set aside."""
        return max(0, self.size - self.written)


class SpaceLedger:
    """Space of `device`, of which the cache may take `limit` bytes.

    `high` and `low` are the watermarks as fractions of the capacity, `meta_reserve` the bytes kept
    for the metadata database (0: it lives on another device).
    """

    def __init__(
        self,
        device: CacheDevice,
        limit: int,
        *,
        high: float = 0.9,
        low: float = 0.8,
        meta_reserve: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device
        self.limit = limit
        self._lists = 0 if device.in_memory else _LISTS
        self._marks = Watermarks(limit, high, low)
        self.used = 0
        self.promised = 0
        self.reserved = 0
        self.wanted = 0
        """Bytes that are waited for."""
        self.overruns_total = 0
        self.exhausted = False
        """Above the high watermark, and nothing left that may be evicted."""
        self.pressure = trio.Event()
        """Set when there is work for the reaper, who replaces it."""
        self.looked = trio.Event()
        """Set at the end of the reaper's next pass, who replaces it when that begins."""
        self.before_scan: Callable[[], None] = lambda: None
        """Called to have everything counted that has grown, which a scan is to see only once."""
        self._clock = clock
        self._reserve_file = MetadataReserve(device.meta_dir / "reserve", meta_reserve)
        self._reservations: dict[int, Reservation] = {}
        self._waiting: deque[object] = deque()
        self._room_made = trio.Event()
        self._listening = 0
        # All growth of `used` corrects a scan; the number of changes tells whether one is due.
        self._grown = 0
        self._changes = 0
        self._changes_scanned = -1
        self._reserve_wanted = False
        self._free = device.free_bytes()
        self._free_until = clock() + _FREE_VALID

    # How full it is

    @property
    def free(self) -> int:
        """Bytes free on the filesystem, as of two seconds ago at most.

        Of a disk only `poll` reads it: this is asked on the event loop, which never waits.
        """
        if self._clock() >= self._free_until and self.device.in_memory:
            self._set_free(self.device.free_bytes())
        return max(0, self._free)

    def _set_free(self, nbytes: int) -> None:
        self._free = nbytes
        self._free_until = self._clock() + _FREE_VALID

    @property
    def most(self) -> int:
        """Bytes that may be given to cache files, however much is free."""
        return self.limit - self.limit // self._lists if self._lists else self.limit

    @property
    def capacity(self) -> int:
        """Bytes that cache files may take at this moment."""
        return min(self.most, self.used + self.free)

    @property
    def above_high(self) -> bool:
        """Whether eviction is due."""
        return self.used + self.promised > self.watermarks.high_bytes

    @property
    def is_tight(self) -> bool:
        """Whether each write is to be counted at once: there is not room for many that are not."""
        return self.headroom() < self.limit // 4

    @property
    def watermarks(self) -> Watermarks:
        """High and low watermark of the present capacity."""
        capacity = self.capacity
        if capacity != self._marks.size:
            self._marks = replace(self._marks, size=capacity)
        return self._marks

    def excess(self) -> int:
        """Bytes to evict now: down to the low watermark once above the high one, else 0. What is
        waited for is to fit."""
        return self.watermarks.excess(self.used + self.promised + self.wanted)

    def headroom(self) -> int:
        """Bytes that nobody has taken, been promised or reserved."""
        return self.watermarks.room(self.used + self.promised, self.reserved)

    # What changes it

    def charge(self, nbytes: int) -> None:
        """Cache files now allocate so many bytes more."""
        self.used += nbytes
        self._grown += nbytes
        self._changes += 1
        self._free -= nbytes
        if not self.exhausted and not self.pressure.is_set() and self.above_high:
            self.pressure.set()

    def credit(self, nbytes: int) -> None:
        """Cache files now allocate so many bytes less: evicted, deleted, punched, truncated."""
        nbytes = min(nbytes, self.used)
        self.used -= nbytes
        self._changes += 1
        self._free += nbytes
        self.announce_room()

    def announce_room(self) -> None:
        """Wake everybody who waits for room, to look again."""
        if self._listening:  # asked after most writes, and a new event is not free
            event, self._room_made = self._room_made, trio.Event()
            event.set()

    def set_exhausted(self, exhausted: bool) -> None:
        """The reaper has done what it could; `exhausted`: and that was not enough."""
        self.exhausted = exhausted
        if not exhausted:
            self.announce_room()

    # Tracked writers: admitted byte by byte

    def try_admit(self, nbytes: int) -> bool:
        """Promise `nbytes` to a writer, who calls `settle` once written.

        False when they do not fit.
        """
        if self._waiting or nbytes > self.headroom():
            return False
        self.promise(nbytes)
        return True

    def promise(self, nbytes: int) -> None:
        """Promise `nbytes` whether or not they fit."""
        self.promised += nbytes

    def settle(self, admitted: int, allocated: int) -> None:
        """The write of `admitted` promised bytes is over.

        It allocated so many (overwriting takes none).
        """
        self.promised -= admitted
        if allocated:
            self.charge(allocated)
        if allocated < admitted:
            self.announce_room()

    async def wait_for_room(
        self,
        nbytes: int,
        cancel: trio.Event | None = None,
        is_in_vain: Callable[[], bool] = lambda: False,
    ) -> bool:
        """As `try_admit`, but wait until it fits; False when `cancel` was set first.

        Raises ENOSPC when `nbytes` could not fit even into the empty cache, and once `is_in_vain`
        (asked each time that there still is no room) says that there never will be.
        """
        if nbytes > self.most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ticket = object()
        self._waiting.append(ticket)
        self.wanted += nbytes
        try:
            while not (self._waiting[0] is ticket and nbytes <= self.headroom()):
                if not await self._wait_a_little(cancel):
                    return False
                if nbytes > self.headroom() and is_in_vain():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.promised += nbytes
            return True
        finally:
            self._waiting.remove(ticket)
            self.wanted -= nbytes
            self.announce_room()

    async def admit_after_eviction(self, nbytes: int) -> bool:
        """As `try_admit`, once the reaper has evicted what it can. Holds up nobody meanwhile."""
        if self.used:
            self.pressure.set()
            self.wanted += nbytes
            try:
                with trio.move_on_after(_EVICTION_PATIENCE):
                    await self.looked.wait()
            finally:
                self.wanted -= nbytes
        return self.try_admit(nbytes)

    # New writers

    def may_open(self) -> bool:
        """Whether a new file may be opened for writing.

        The reaper can still make room, or needs not.
        """
        return not (self.exhausted and self.above_high)

    async def wait_to_open(self, cancel: trio.Event | None = None) -> bool:
        """Wait until `may_open`; False when `cancel` was set first."""
        while not self.may_open():
            if not await self._wait_a_little(cancel):
                return False
        return True

    async def _wait_a_little(self, cancel: trio.Event | None) -> bool:
        """Until room was made somewhere or a second has passed; False when `cancel` is set."""
        self._listening += 1
        try:
            with trio.move_on_after(_RECHECK):
                if cancel is None:
                    await self._room_made.wait()
                else:
                    await _first_of(self._room_made, cancel)
        finally:
            self._listening -= 1
        return cancel is None or not cancel.is_set()

    # Passthrough writers: cannot be slowed down, so they reserve

    def reserve(self, gen: int, nbytes: int) -> bool:
        """Set `nbytes` aside for the passthrough writer of `gen`; False if headroom is less.

        For a generation that has a reservation already this changes its size.
        """
        held = self._reservations.get(gen)
        before = held.left if held else 0
        written = held.written if held else 0
        after = max(0, nbytes - written)
        if after - before > self.headroom():
            return False
        self._reservations[gen] = Reservation(nbytes, written)
        self.reserved += after - before
        return True

    def release(self, gen: int) -> None:
        """The writer of `gen` has closed: nothing is set aside for it any more. Idempotent."""
        held = self._reservations.pop(gen, None)
        if held is not None:
            self.reserved -= held.left
            self.announce_room()

    def reservations(self) -> dict[int, Reservation]:
        """Reservations by generation, a copy."""
        return dict(self._reservations)

    def note_growth(self, gen: int, allocated: int) -> bool:
        """The cache file of a reserved generation allocates this much; True at its first overrun.

        A writer that outgrows its reservation gets a larger one as long as there is headroom.
        To be called once more before `release`. Ignored for a generation without reservation.
        """
        held = self._reservations.get(gen)
        if held is None:
            return False
        before = held.left
        grown, held.written = allocated - held.written, allocated
        self.reserved -= before - held.left
        if grown > 0:
            self.charge(grown)
        elif grown < 0:
            self.credit(-grown)
        if held.overrun or allocated <= held.size or self.reserve(gen, 2 * allocated):
            return False
        held.overrun = True
        self.overruns_total += 1
        return True

    async def poll(self) -> list[int]:
        """Read free space and how far the passthrough writers have come; returns new overruns.

        Raises OSError when the device fails.
        """
        gens = list(self._reservations)
        free, sizes = await trio.to_thread.run_sync(self._measure, gens, abandon_on_cancel=True)
        overruns = [gen for gen in gens if self.note_growth(gen, sizes[gen])]
        self._set_free(free)
        return overruns

    def _measure(self, gens: Sequence[int]) -> tuple[int, dict[int, int]]:
        return self.device.free_bytes(), {gen: self.device.allocated(gen) for gen in gens}

    # Corrections

    async def rescan(self) -> int:
        """Count the cache files anew; returns by how many bytes `used` was wrong.

        What changes during the scan may be counted or not. Growth is added in any case and
        shrinking is not subtracted, so the error is on the careful side, and the next scan mends
        it.
        """
        await self.poll()
        self.before_scan()
        before, self._changes_scanned = self._grown, self._changes
        scan = self.device.allocated_total
        scanned = await trio.to_thread.run_sync(scan, abandon_on_cancel=True)
        corrected = scanned + self._grown - before
        error, self.used = corrected - self.used, corrected
        self._free_until = 0.0
        if error < 0:
            self.announce_room()
        return error

    @property
    def undisturbed(self) -> bool:
        """Whether nothing was charged or credited since the last `rescan` began."""
        return self._changes == self._changes_scanned

    async def rescan_if_changed(self) -> None:
        """`rescan`, unless nothing was charged or credited since the last one."""
        if not self.undisturbed:
            await self.rescan()

    # The database's own room

    def release_reserve(self) -> None:
        """Give the metadata reserve to the filesystem: the database has met ENOSPC."""
        self._reserve_file.release()
        self._reserve_wanted = True
        self._free_until = 0.0

    def restore_reserve(self) -> bool:
        """Take the metadata reserve (again); False while there is no room for it."""
        self._reserve_wanted = not self._reserve_file.restore()
        return not self._reserve_wanted

    async def mend_reserve(self) -> None:
        """Take the metadata reserve again if it was given up and there is room."""
        if self._reserve_wanted and not self.above_high:
            await trio.to_thread.run_sync(self.restore_reserve)

    @property
    def reserve_held(self) -> bool:
        """Whether the metadata reserve is in place."""
        return self._reserve_file.held


def resolve_limits(
    devices: Sequence[CacheDevice],
    size: int | None,
    used: Sequence[int] | None = None,
    *,
    set_aside: int = 0,
) -> list[int]:
    """Bytes that the cache may take on each device, in the order of `devices`.

    `size` is the configured or remembered total; None takes 90 % of what is free, but for what is
    to be `set_aside`. It is divided in
    proportion to the space available to the cache, which is what is free plus what the cache has
    already `used` there, so that the answer does not wander as the cache fills. A device's own
    `size_limit` caps its share.
    """
    taken = list(used) if used is not None else [0] * len(devices)
    available = [device.free_bytes() + mine for device, mine in zip(devices, taken, strict=True)]
    whole = sum(available)
    total = int(DEFAULT_FILL * max(0, whole - set_aside)) if size is None else size
    limits = []
    for device, mine in zip(devices, available, strict=True):
        share = total * mine // whole if whole else total // len(devices)
        limits.append(share if device.size_limit is None else min(share, device.size_limit))
    return limits


async def _first_of(one: trio.Event, other: trio.Event) -> None:
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait, one)
        nursery.start_soon(wait, other)
