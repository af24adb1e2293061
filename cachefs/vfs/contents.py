"""Generations and their cache files: how they begin, are filled, sealed and dropped.

A sealed generation never changes; what happens when somebody wants to write to one is in
`rewriting`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.cache.filler import Fill, Filler
from cachefs.cache.fresh import FreshFile, FreshFiles, reopened
from cachefs.cache.placement import Placement
from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow, InodeRow, ObjectRow
from cachefs.model.extents import ExtentSet
from cachefs.model.states import GenState
from cachefs.vfs import clock
from cachefs.vfs.filling import Filling
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.opened import Lane, OpenInode, Stream, open_cache_file
from cachefs.vfs.remote import RemoteView


class Contents(Filling):
    """Generations and cache files of the files that are opened, written and closed."""

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
        super().__init__(meta, queue, devices, placement, filler, remote, lanes)
        self._last_file = meta.generations.last_file()
        self.fresh = FreshFiles(
            self.new_file_number, lambda: lanes.wants(stat.S_IFREG, os.O_WRONLY)
        )
        self.checksum: Callable[[str, int], Awaitable[int]] = _unknown
        """CRC64NVME of the first bytes of a file."""
        self.rescue: Callable[[int], Awaitable[bool]] = _lost
        """Awaited with a generation whose cache file is gone; whether it is back."""
        self.on_fill: Callable[[int], bool] = lambda ino: False
        """Called with each file that is opened and has to be fetched; whether it is a large one
        that will be read once."""
        self.stream_of: Callable[[GenerationRow], Stream | None] = lambda gen: None
        """What of a generation is in the store only, if anything is."""

    # -- new content --------------------------------------------------------------------------

    def new_file_number(self) -> int:
        """A cache file number that was never used."""
        self._last_file += 1
        return self._last_file

    def reserve_numbers(self, highest: int) -> None:
        """Never hand out numbers up to `highest`: such cache files were found on a device."""
        self._last_file = max(self._last_file, highest)

    def place(self, expected: int = 0) -> CacheDevice:
        """The device for a new cache file of `expected` bytes. EIO when none is healthy."""
        ledger = self._placement.choose(expected)
        if ledger is None:
            raise OSError(errno.EIO, "no cache device is healthy")
        return ledger.device

    async def new_file(self, expected: int = 0) -> FreshFile:
        """A new cache file where there is room for `expected` bytes. A device that is found to have
        gone just now is passed over. OSError."""
        while True:
            device = self.place(expected)
            try:
                return await self.fresh.take(device)
            except OSError:
                await device.apart.run(device.look)
                if device.healthy:
                    raise

    @asynccontextmanager
    async def fresh_file(self, parent: int, *, passthrough: bool) -> AsyncIterator[FreshFile]:
        """A cache file for a new file in a directory, which is not needed if that fails."""
        fresh = await self.new_file(self._lanes.expected(parent) if passthrough else 0)
        try:
            yield fresh
        except BaseException:
            self.discard(fresh)
            raise

    def create(
        self,
        inode: InodeRow,
        parent: int,
        link: Callable[[], object],
        fresh: FreshFile,
        *,
        passthrough: bool,
    ) -> OpenInode:
        """An empty open generation for `inode` (new, or to be replaced), with one handle's worth of
        the passthrough lane if that is wanted and can be had.

        `link` stores the inode, in the same transaction.
        """
        device, file, fd = fresh.device, fresh.file, fresh.fd
        lane = Lane.TRACKED
        try:
            with self._meta.transaction(Change.CREATE):
                inode.ino = inode.ino or self._meta.inodes.new_number()
                if passthrough and self._lanes.grant_writer(inode.ino, parent, device, file, fd):
                    lane = Lane.PASSTHROUGH
                else:
                    fresh.make_writable()
                gen = self.add_generation(inode.ino, device, file, lane)
                inode.mtime_ns = inode.ctime_ns = clock.now_ns()
                previous, inode.gen, inode.size, inode.blocks = inode.gen, gen.gen, 0, 0
                link()
                if previous is not None:
                    self.unreferenced(previous)
        except BaseException:
            if lane is Lane.PASSTHROUGH:
                self._lanes.leave(inode.ino)
                self._lanes.writer_gone(device, file)
            raise
        return OpenInode(
            inode.ino, gen, device, fd, lane, 0, inode.mtime_ns, writing=True,
            untouched_ns=fresh.made_ns,
        )  # fmt: skip

    def discard(self, fresh: FreshFile) -> None:
        """A new cache file is not needed after all."""
        fresh.device.let_go(fresh.fd)
        self.leave(fresh.device, fresh.file)

    def try_reading_passthrough(self, opened: OpenInode) -> None:
        """Put a complete file that was just opened for reading into the passthrough lane."""
        if opened.fill is not None or opened.stream is not None or opened.writing or opened.handles:
            return
        reader = reopened(opened.fd, os.O_RDONLY)
        if self._lanes.grant_reader(opened.ino, reader):
            opened.device.let_go(opened.fd)
            opened.fd, opened.lane = reader, Lane.PASSTHROUGH
        else:
            opened.device.let_go(reader)

    def add_generation(
        self,
        ino: int,
        device: CacheDevice,
        file: int,
        lane: Lane,
        *,
        state: GenState = GenState.OPEN,
        size: int = 0,
        dirty: ExtentSet | None = None,
        base: int | None = None,
        present: ExtentSet | None = None,
        anchored: bool = False,
    ) -> GenerationRow:
        now = clock.now_ns()
        row = GenerationRow(
            gen=0, ino=ino, device=device.index, file=file, state=state, lane=lane, size=size,
            dirty=dirty.pack() if dirty is not None else None, base=base,
            present=present.pack() if present is not None else None, crc64=None,
            created_ns=now, sealed_ns=None, used_ns=now, anchored=int(anchored),
        )  # fmt: skip
        self._meta.generations.add(row)
        return row

    # -- present content ----------------------------------------------------------------------

    async def open_current(self, inode: InodeRow) -> OpenInode:
        """The file as it is now, for reading, or for writing after `begin_write`.

        EIO: a dirty cache file was removed behind our back. ESTALE, EIO: the object is gone or out
        of reach.
        """
        while True:
            gen = self._meta.generations.get(inode.gen) if inode.gen is not None else None
            if gen is None:
                return await self._open_remote(inode)
            try:
                opened = await self._open_cached(inode, gen)
            except OSError as err:
                if not self._is_lost(gen, err):
                    raise
                if gen.state == GenState.DURABLE:
                    self._forget_cached(inode, gen)
                elif not await self.rescue(gen.gen):
                    raise OSError(errno.EIO, "the cache file of unsaved data is damaged") from err
            else:
                if opened is not None:
                    return opened
            inode = self._as_it_is(inode)

    def _as_it_is(self, inode: InodeRow) -> InodeRow:
        """The inode after something was waited for. ENOENT: it is gone."""
        now = self._meta.inodes.get(inode.ino)
        if now is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return now

    def _is_lost(self, gen: GenerationRow, err: OSError) -> bool:
        """Whether the cache file is gone, rather than that descriptors or memory are."""
        return isinstance(err, FileNotFoundError) or not self.device(gen).healthy

    async def _open_cached(self, inode: InodeRow, gen: GenerationRow) -> OpenInode | None:
        """None: meanwhile it has become another one."""
        device = self.device(gen)
        if not device.healthy and gen.state == GenState.DURABLE:
            raise FileNotFoundError(errno.ENOENT, "its cache device has failed")
        fd = await device.apart.run(open_cache_file, device, gen.file)
        reach(Point.OPEN_AFTER_CACHE_FILE)
        if not device.apart.direct and not self._is_current(inode, gen):
            device.let_go(fd)
            return None
        if not _is_whole(fd, gen):
            device.let_go(fd)
            raise FileNotFoundError(errno.ENOENT, "the cache file was cut short")
        opened = OpenInode(
            inode.ino, gen, device, fd, Lane.TRACKED, inode.size, inode.mtime_ns,
            writing=gen.state == GenState.OPEN, stream=self.stream_of(gen),
        )  # fmt: skip
        if gen.present is not None:
            opened.fill = self.fill_for(inode, gen)
            opened.read_once = self.on_fill(inode.ino)
        opened.accounted = os.fstat(fd).st_blocks * BLOCK_UNIT
        self.fetches.take_up(opened, device.path(gen.file))
        return opened

    def _is_current(self, inode: InodeRow, gen: GenerationRow) -> bool:
        current = self._meta.inodes.get(inode.ino) == inode
        return current and self._meta.generations.get(gen.gen) == gen

    def fill_for(self, inode: InodeRow, gen: GenerationRow) -> Fill:
        """The fill of a generation whose cache file does not hold all of its object yet."""
        fill = self._remote.fill(inode, self.device(gen).path(gen.file), gen.present or b"")
        before = self._filler.under_way(fill.path)
        if before is None:
            return fill
        before.key, before.etag, before.stale = fill.key, fill.etag, False
        return before

    def fill_still_open(self, inode: InodeRow, gen: GenerationRow) -> Fill:
        """The same of a file that somebody has open: its object may be gone, or another one. Then
        what is here can be read, and the rest is ESTALE."""
        try:
            return self.fill_for(inode, gen)
        except OSError:
            present = ExtentSet.unpack(gen.present or b"")
            path = self.device(gen).path(gen.file)
            return Fill(path, key="", etag=None, size=gen.size, present=present, stale=True)

    def is_coming(self, gen: GenerationRow) -> bool:
        """Whether something is on its way to a generation's cache file."""
        return self._filler.under_way(self.device(gen).path(gen.file)) is not None

    def _forget_cached(self, inode: InodeRow, gen: GenerationRow) -> None:
        with self._meta.transaction(Change.FORGET_CACHED):
            self.drop_copy(gen.gen)
            self._meta.generations.remove(gen.gen)
            self._meta.inodes.set_gen(inode.ino, None)
        inode.gen = None

    async def _open_remote(self, inode: InodeRow) -> OpenInode:
        fresh = await self.new_file(inode.size)
        device, file, fd = fresh.device, fresh.file, fresh.fd
        try:
            fresh.make_writable()
            inode, source = await self._sized(fresh, fd, inode.ino)
            with self._meta.transaction(Change.OPEN_REMOTE):
                gen = self.add_generation(
                    inode.ino, device, file, Lane.TRACKED, state=GenState.DURABLE,
                    size=source.size, present=ExtentSet(),
                )  # fmt: skip
                self._meta.inodes.set_gen(inode.ino, gen.gen)
                self._remote.is_now(source, gen.gen)
        except BaseException:
            self.discard(fresh)
            raise
        inode.gen = gen.gen
        fill = self._remote.fill(inode, device.path(file), gen.present or b"")
        opened = OpenInode(
            inode.ino, gen, device, fd, Lane.TRACKED, source.size, inode.mtime_ns, fill=fill
        )
        if source.size == 0:
            self.filled(opened)
        else:
            opened.read_once = self.on_fill(inode.ino)
        return opened

    async def _sized(self, fresh: FreshFile, fd: int, ino: int) -> tuple[InodeRow, ObjectRow]:
        """Give a new cache file the size of its object; both as they are then."""
        size = 0
        while True:
            inode = self._meta.inodes.get(ino)
            if inode is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            source = self._remote.object_of(inode)
            if source.size == size:
                return inode, source
            size = source.size
            await fresh.device.apart.run(os.ftruncate, fd, size)
            reach(Point.OPEN_REMOTE_AFTER_FILE)

    # -- writing ------------------------------------------------------------------------------

    async def truncate(self, opened: OpenInode, size: int) -> None:
        """Set the size of a file whose generation is open for writing."""
        opened.refresh()
        before = opened.size
        with opened.written_to():
            await opened.device.apart.run(_truncate, opened, size)
        if opened.dirty is not None:
            if size < before:
                opened.dirty.clip(size)
            elif size > before:
                opened.dirty.add(before, size)
        opened.size = size

    def save_open(self, opened: OpenInode) -> None:
        """Write size and times of an open file to the database (fsync, stat after a crash)."""
        opened.refresh()
        inode = self._meta.inodes.get(opened.ino)
        if inode is not None and opened.writing:
            self._meta.inodes.set_content(opened.ino, opened.size, opened.blocks, opened.mtime_ns)

    def remove(self, device: CacheDevice, file: int) -> None:
        """Remove a cache file. Waits for the disk."""
        self.fetches.count(device.path(file))
        super().remove(device, file)

    async def remove_all(self, device: CacheDevice, files: Sequence[int]) -> None:
        """Remove cache files; they count until they are gone."""
        for file in files:
            self.fetches.count(device.path(file))
        await super().remove_all(device, files)


async def _lost(gen: int) -> bool:
    """There is no other place to look."""
    return False


async def _unknown(*_: object) -> int:
    raise NotImplementedError


def _truncate(opened: OpenInode, size: int) -> None:
    """Waits for the disk. OSError."""
    if opened.lane is Lane.PASSTHROUGH:
        os.truncate(opened.device.path(opened.gen.file), size)
        os.utime(opened.fd)  # an equal size moves no times there
    else:
        os.ftruncate(opened.fd, size)
    reach(Point.TRUNCATE_AFTER_FILE)


def _is_whole(fd: int, gen: GenerationRow) -> bool:
    """A cache file that nobody writes to has the size that its generation was sealed with."""
    return gen.state in (GenState.OPEN, GenState.HELD) or os.fstat(fd).st_size >= gen.size
