"""Room from huge files: ranges of what the store holds leave the cache, the rest stays.

For files that are larger than the room that is wanted, and for those that are being read and
are not all here: what lies behind every reader goes first. The cache file keeps its size, and gets
holes.

A hole must never be read as bytes. So a range is first taken out of what is present, in memory and
in the database, which is synced: only then it is punched, and only what nobody has begun to fetch
again meanwhile; who begins while it is punched waits for the end of that. A read that was under way
looks, when it has its bytes, whether anything went (`Fill.trims`), and begins anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

from cachefs.cache.device import CacheDevice
from cachefs.cache.filler import CHUNK, Fill
from cachefs.failpoints import Change, Point, reach
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.extents import Extent, ExtentSet
from cachefs.vfs.contents import Contents
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.opened import OpenInode, OpenTable

HUGE = 1 << 30
"""Bytes from which a file is not evicted as a whole when less is wanted."""


class Trimmer:
    """Takes ranges out of cache files. On the trio thread."""

    def __init__(
        self,
        meta: Meta,
        table: OpenTable,
        contents: Contents,
        lanes: LaneKeeper,
        *,
        sync_meta: Callable[[], Awaitable[None]],
    ) -> None:
        self._meta = meta
        self._table = table
        self._contents = contents
        self._lanes = lanes
        self._sync_meta = sync_meta
        self.is_waited_for: Callable[[int], bool] = lambda device: False
        """Whether somebody waits for room on a device."""
        self.is_pressing: Callable[[int], bool] = lambda device: False
        """Whether a writer does."""

    async def trim_open(self, device: int, goal: int, is_kept: Callable[[int], bool]) -> int:
        """Take up to `goal` bytes from files that are being read, but for inodes that `is_kept`;
        returns how many. OSError."""
        freed = 0
        for opened in list(self._table.inodes.values()):
            mine = opened.device.index == device and not is_kept(opened.ino)
            if freed < goal and mine and self._is_read_only(opened):
                freed += await self._trim(opened, goal - freed)
        return freed

    def _is_read_only(self, opened: OpenInode) -> bool:
        """Whether nobody writes to it, or waits for all of it in order to."""
        busy = opened.writers or opened.writing or opened.lock.statistics().locked
        return opened.fill is not None and not busy

    async def _trim(self, opened: OpenInode, goal: int) -> int:
        fill = opened.fill
        chosen = self._chosen(fill, goal, opened.device.index) if fill is not None else []
        if fill is None or not chosen:
            return 0
        self._lanes.take_back(opened)
        for start, end in chosen:
            fill.trim(start, end)
        self._contents.save_progress(opened)
        reach(Point.TRIM_AFTER_SAVE)
        await self._sync_meta()
        if not self._table.is_here(opened):
            return 0  # Who opens it next fetches what is not present, and is not to find it gone.
        self._contents.account(opened)
        before = opened.accounted
        holes = [hole for extent in chosen for hole in fill.present.gaps(*extent)]
        holes = [hole for hole in holes if opened.fill is fill and not fill.is_coming(*hole)]
        with self._contents.fetches.withheld(fill.path):
            freed = await opened.device.apart.run(_punch, opened.device, opened.gen.file, holes)
        fill.trims += 1
        if not self._table.is_here(opened):
            return freed  # It was counted when it was closed, or is by who has it open now.
        self._contents.account(opened)
        return max(0, before - opened.accounted)

    def _chosen(self, fill: Fill, goal: int, device: int) -> list[Extent]:
        """What no reader is near. When somebody waits for room, what was fetched ahead of one goes,
        too, and what lies behind; for a writer at last what one is at: it is read before it can go,
        or once more. Readers that wait do not take that from each other: all would fetch it again
        and again."""
        spared = [list(fill.near())]
        if self.is_waited_for(device):
            spared += [list(fill.near(ahead=False)), list(fill.at())]
        if self.is_pressing(device):
            spared.append([])
        return next(filter(None, (list(_away(fill, each, goal)) for each in spared)), [])

    async def trim_closed(
        self, gen: int, goal: int, on_leaving: Callable[[GenerationRow], None]
    ) -> int:
        """Take about `goal` bytes from the beginning of a file that nobody has open; returns how
        many. `on_leaving` is called in the transaction that lets them go. OSError."""
        row = self._meta.generations.get(gen)
        if row is None or self._contents.is_coming(row):
            return 0
        device = self._contents.device(row)
        present = ExtentSet.unpack(row.present) if row.present is not None else None
        present = present if present is not None else ExtentSet([(0, row.size)])
        chosen = list(_first(present, goal))
        for start, end in chosen:
            present.remove(start, end)
        row.present = present.pack()
        with self._meta.transaction(Change.TRIM):
            on_leaving(row)
            self._meta.generations.save(row)
        await self._sync_meta()
        is_same = self._meta.generations.get(gen) == row and not self._contents.is_coming(row)
        if row.ino in self._table.inodes or not is_same:
            return 0  # Somebody reads it, and what is not present may be on its way again.
        self._contents.fetches.count(device.path(row.file))
        with self._contents.fetches.withheld(device.path(row.file)):
            freed = await device.apart.run(_punch, device, row.file, chosen)
        self._contents.on_account(device, -freed)
        self._contents.fetches.shrunk(device.path(row.file), freed)
        return freed


def _punch(device: CacheDevice, file: int, holes: Sequence[Extent]) -> int:
    """Returns the bytes freed. Waits for the disk. OSError."""
    before = device.allocated(file)
    for hole in holes:
        device.punch(file, *hole)
    reach(Point.TRIM_AFTER_PUNCH)
    return max(0, before - device.allocated(file))


def _away(fill: Fill, spared: list[Extent], goal: int) -> Iterator[Extent]:
    """What is present but for what is `spared`, from the beginning on, `goal` bytes of it."""
    away = ExtentSet(fill.present)
    for start, end in spared:
        away.remove(max(0, start), end)
    yield from _first(away, goal)


def _first(extents: ExtentSet, goal: int) -> Iterator[Extent]:
    """The first `goal` bytes, in whole pieces of a fetch."""
    for start, end in extents:
        if goal <= 0:
            return
        stop = min(end, start + -(-goal // CHUNK) * CHUNK)
        yield start, stop
        goal -= stop - start
