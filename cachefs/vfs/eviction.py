"""Which generations may leave the cache, and how they do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator

from cachefs.cache.device import CacheDevice
from cachefs.failpoints import Change
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.room import room
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import GenState
from cachefs.vfs.contents import Contents
from cachefs.vfs.opened import OpenTable
from cachefs.vfs.trimming import HUGE, Trimmer

_LOOK_AT = 512
"""Candidates offered at a time, oldest use first."""
_BATCH = 1024


class Eviction:
    """The reaper's view of the cache: only what is durable, closed and shown by the bucket."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        table: OpenTable,
        contents: Contents,
        *,
        sweep: Callable[[CacheDevice], Awaitable[None]],
        trimmer: Trimmer | None = None,
    ) -> None:
        """`sweep` returns when the cache files that a device gave up are removed."""
        self._meta = meta
        self._queue = queue
        self._table = table
        self._contents = contents
        self._sweep = sweep
        self._trimmer = trimmer
        self.is_needed: Callable[[GenerationRow], bool] = lambda row: False
        """Whether a cache file is wanted for something else than reading."""
        self.on_leaving: Callable[[GenerationRow], None] = lambda row: None
        """Called in the transaction that lets a cache file go."""

    def candidates(self, device: int) -> Iterable[tuple[int, int]]:
        """(generation, last use) of what may be evicted from a device."""
        return list(self._candidates(device))

    def _candidates(self, device: int) -> Iterator[tuple[int, int]]:
        found, after = 0, (-1, 0)
        while found < _LOOK_AT and (rows := self._meta.generations.durable(device, _BATCH, after)):
            after = rows[-1].used_ns, rows[-1].gen
            for row in rows:
                if self.keeps(row) is None:
                    found += 1
                    yield row.gen, row.used_ns

    def keeps(self, row: GenerationRow) -> str | None:
        """Why one may not go: `dirty`, `open`, `uncopied` or `pinned`; None when it may."""
        if row.ino in self._table.inodes:
            return "open"
        if row.state != GenState.DURABLE or self._queue.of_gen(row.gen):
            return "dirty"
        if self.is_needed(row):
            return "uncopied"
        objects = self._meta.objects.of_inode(row.ino)
        if not any(each.gen == row.gen and each.etag and not each.stale for each in objects):
            return "dirty"
        return "pinned" if self._meta.pins and self._is_pinned(row.ino) else None

    def _is_pinned(self, ino: int) -> bool:
        names = self._meta.dentries.of_inode(ino)
        paths = (self._meta.dentries.path(name.parent, name.name).decode() for name in names)
        return any(self._meta.pins.over(path) is not None for path in paths)

    async def trim(self, device: int, goal: int) -> int:
        """Take bytes from files that are being read; see `trimming`."""
        if self._trimmer is None:
            return 0
        await room(self._meta.db, frees_disk=True)
        return await self._trimmer.trim_open(device, goal, self._is_pinned)

    async def evict(self, gen: int, goal: int | None = None) -> int:
        """Forget a generation's cache file, or, of a huge one, the `goal` bytes that are wanted; 0
        if it may not go (any more)."""
        row = self._meta.generations.get(gen)
        if row is None or self.keeps(row) is not None:
            return 0
        device = self._contents.device(row)
        freed = await device.apart.run(device.allocated, row.file)
        await room(self._meta.db, frees_disk=True)
        row = self._meta.generations.get(gen)
        if row is None or self.keeps(row) is not None:
            return 0
        if goal is not None and self._trimmer is not None and freed > max(HUGE, 2 * goal):
            return await self._trimmer.trim_closed(gen, goal, self.on_leaving)
        with self._meta.transaction(Change.EVICT):
            self.on_leaving(row)
            inode = self._meta.inodes.get(row.ino)
            if inode is not None and inode.gen == gen:
                self._meta.inodes.set_gen(row.ino, None)
            self._contents.drop(row)
        await self._sweep(device)
        return freed
