"""Files that are larger than the cache, while they are written: what of them is in the store.

A file of the tracked lane that fills the cache has ranges moved into the store, as hidden objects
(`vfs.offloading`). The cache file keeps its size and gets holes; the table `span` says what is
where. As long as a generation is not durable, its bytes are either in the cache file or in a span,
and nowhere else. Then the object shows them all, and the file is like any other that is partly
cached.

- Reads of a span are answered from the store, block by block, through memory: nothing that is read
  takes room from who writes, and the cache file has what no span has, always.
- A write to a span has it brought back first: the bytes, on the disk; then the transaction that
  says so; then the write. The hidden object goes when that transaction is on the disk.
- What is cut off goes after the file is cut, on the disk: a span is never cut, but brought back.
- A kill in between leaves the span, which counts, and bytes in its place, which do not: `recover`
  gives them back.

Lock order: room in the ledger, then `Stream.lock`, then `OpenInode.moving`. Nobody waits for room
with a stream's lock: room is made under it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import structlog
import trio

from cachefs.cache import doubt
from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.system import free_preallocation, punch_hole, write_all
from cachefs.errors import NotFound
from cachefs.failpoints import Change, Point, reach
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.extents import Extent
from cachefs.model.spans import Span, SpanMap
from cachefs.vfs.admission import Admission, Asker
from cachefs.vfs.contents import Contents
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.opened import OpenInode, OpenTable, Stream

log = structlog.get_logger("cachefs.vfs")

_BLOCK = 4 << 20
"""Bytes that are read of a span at a time."""
_KEPT = 4
"""Blocks of a file that are kept in memory."""
_MANY = 64


class SpanStore(Protocol):
    """Where spans are: see `flush.hidden`."""

    async def send(self, gen: int, path: str, start: int, end: int) -> Span:
        """Bytes of a file into the store. CachefsError."""

    async def fetch(self, span: Span, start: int, end: int) -> bytes:
        """Bytes [start, end) of the file. StoreError."""

    async def is_sound(self, span: Span, path: str) -> bool:
        """Whether a file has a span's bytes in their place. CacheError."""

    async def borrow(self, key: str, etag: str, size: int, places: Sequence[Extent]) -> list[Span]:
        """Ranges of a copy of an object. StoreError."""

    def taken(self, spans: Iterable[Span]) -> None:
        """What was borrowed is somebody's."""

    def leave(self, *spans: Span) -> None:
        """Nobody wants what was sent or borrowed."""

    def swept(self) -> None:
        """There is something to be deleted."""


class Streams:
    """Files of which something is in the store only. On the trio thread."""

    def __init__(
        self,
        meta: Meta,
        table: OpenTable,
        contents: Contents,
        lanes: LaneKeeper,
        ledgers: Sequence[SpaceLedger],
        admission: Admission,
        store: SpanStore,
        *,
        sync_meta: Callable[[], Awaitable[None]],
    ) -> None:
        self._meta = meta
        self._table = table
        self._contents = contents
        self._lanes = lanes
        self._ledgers = ledgers
        self._admission = admission
        self._store = store
        self._sync_meta = sync_meta
        self._streams: dict[int, Stream] = {}
        self.before_begin: Callable[[OpenInode], None] = lambda opened: None
        """Called before an open file becomes a stream: what was not seen of it is to be counted."""

    # -- which files --------------------------------------------------------------------------

    def of(self, gen: GenerationRow) -> Stream | None:
        """The stream of a generation; None if the cache file has all of it."""
        stream = self._streams.get(gen.gen)
        if stream is None and (spans := self._meta.spans.of_gen(gen.gen)):
            stream = self._remember(Stream(gen.gen, SpanMap(spans)))
        return stream

    def begin(self, opened: OpenInode) -> Stream:
        """Make a stream of an open file: from now on nothing of it is done without asking."""
        if opened.stream is None:
            self.before_begin(opened)
            opened.stream = self.of(opened.gen) or self._remember(Stream(opened.gen.gen, SpanMap()))
            opened.unasked = False
            for handle in self._table.handles_of(opened):
                self._lanes.streams(handle)
            self._contents.account(opened)
            log.info("a file is larger than the cache", inode=opened.ino)
        return opened.stream

    def take_up(self, opened: OpenInode) -> None:
        """An open file whose new generation has not been read or written yet, and whose bytes are
        in the store for the most part."""
        before, fill = opened.trims, opened.fill
        if fill is not None:
            self._lanes.take_back(opened)
        opened.fill, opened.stream = None, self.of(opened.gen)
        if opened.stream is not None:
            opened.stream.trims = before + 1
        for handle in self._table.handles_of(opened):
            self._lanes.streams(handle)

    def _remember(self, stream: Stream) -> Stream:
        if len(self._streams) >= _MANY:
            here = {each.gen.gen for each in self._table.inodes.values()}
            for gen in [each for each in self._streams if each not in here]:
                if not self._streams[gen].sending:
                    del self._streams[gen]
        self._streams[stream.gen] = stream
        return stream

    def released(self, gen: int) -> None:
        """The bucket shows a generation: what its cache file lacks is fetched from there."""
        self._streams.pop(gen, None)
        self._store.swept()
        row = self._meta.generations.get(gen)
        opened = self._table.inodes.get(row.ino) if row is not None else None
        inode = self._meta.inodes.get(row.ino) if row is not None else None
        if row is None or inode is None or opened is None or opened.gen.gen != gen:
            return
        trims = opened.trims
        opened.gen, opened.stream = row, None
        opened.fill = self._contents.fill_for(inode, row)
        opened.fill.trims += trims + 1  # Never what a read that is under way has seen.

    # -- reading ------------------------------------------------------------------------------

    async def read(self, opened: OpenInode, offset: int, size: int) -> bytes | None:
        """What a file has there; None if that is in the cache file, or is to be fetched as of any
        file. StoreError, OSError."""
        while (stream := opened.stream) is not None:
            opened.refresh()
            end = min(offset + size, opened.size)
            spans = stream.spans.within(offset, end)
            if not spans:
                return None
            try:
                return await self._read(opened, stream, spans, offset, end)
            except NotFound as error:
                if opened.stream is stream and any(span in stream.spans for span in spans):
                    raise OSError(errno.EIO, f"bytes of the file are gone: {error}") from error
        return None

    async def _read(
        self, opened: OpenInode, stream: Stream, spans: Sequence[Span], start: int, end: int
    ) -> bytes:
        pieces: list[bytes] = []
        for span in spans:
            if start < span.start:
                pieces.append(await self._read_here(opened, start, span.start))
            start, stop = max(start, span.start), min(end, span.end)
            while start < stop:
                first = start - start % _BLOCK
                block = await self._block(stream, span, max(first, span.start))
                upto = min(stop, first + _BLOCK)
                skipped = start - max(first, span.start)
                pieces.append(block[skipped : skipped + upto - start])
                start = upto
        if start < end:
            pieces.append(await self._read_here(opened, start, end))
        return b"".join(pieces)

    async def _read_here(self, opened: OpenInode, start: int, end: int) -> bytes:
        return await trio.to_thread.run_sync(os.pread, opened.fd, end - start, start)

    async def _block(self, stream: Stream, span: Span, start: int) -> bytes:
        """The bytes of a span from `start` on, to the end of the block."""
        key = span.key, start
        async with stream.reading:
            block = stream.blocks.pop(key, None)
            if block is None:
                stop = min(start - start % _BLOCK + _BLOCK, span.end)
                block = await self._store.fetch(span, start, stop)
            stream.blocks[key] = block
            while len(stream.blocks) > _KEPT:
                stream.blocks.popitem(last=False)
        return block

    # -- writing ------------------------------------------------------------------------------

    async def before_write(
        self, opened: OpenInode, start: int, end: int, asker: Asker = (0, 0)
    ) -> None:
        """Return when bytes [start, end) may be written: none of them is in the store only."""
        while (stream := opened.stream) is not None:
            spans = stream.spans.within(start, end)
            if not spans:
                return
            await self._bring_back(opened, stream, spans[0], asker)

    def may_write(self, opened: OpenInode, start: int, end: int) -> bool:
        """Whether none of these bytes is in the store only."""
        return opened.stream is None or not opened.stream.spans.within(start, end)

    async def _bring_back(
        self, opened: OpenInode, stream: Stream, span: Span, asker: Asker
    ) -> None:
        ledger = self._ledgers[opened.gen.device]
        self._contents.account(opened)
        if not ledger.try_admit(span.size):
            await self._admission.make_room(ledger, span.size, opened.ino, asker)
        try:
            async with stream.lock:
                if span in stream.spans:
                    await self._fetch_back(opened, stream, span)
        finally:
            self._contents.account(opened)
            ledger.settle(span.size, 0)

    async def _fetch_back(self, opened: OpenInode, stream: Stream, span: Span) -> None:
        device, file = opened.device, opened.gen.file
        try:
            for start in range(span.start, span.end, _BLOCK):
                data = await self._store.fetch(span, start, min(start + _BLOCK, span.end))
                await trio.to_thread.run_sync(write_all, opened.fd, data, start)
            if not await self._store.is_sound(span, device.path(file)):
                raise OSError(errno.EIO, "the store has other bytes of the file than it was sent")
            await trio.to_thread.run_sync(doubt.sync, opened.fd)
        except BaseException as error:
            punch(device, file, span)
            if isinstance(error, NotFound):
                raise OSError(errno.EIO, f"bytes of the file are gone: {error}") from error
            raise
        reach(Point.BRING_BACK_AFTER_BYTES)
        with self._meta.transaction(Change.BRING_BACK):
            self._meta.spans.give_up([span])
        stream.spans.remove(span)
        stream.wrote(span.start, span.end)
        opened.on_disk = None
        self._store.swept()

    async def truncate(self, opened: OpenInode, size: int) -> None:
        """Set the size of a file whose generation is open for writing."""
        while (stream := opened.stream) is not None:
            await opened.settled()
            if crossing := _crossing(stream, size):
                await self._bring_back(opened, stream, crossing[0], (0, 0))
                await self._sync_meta()  # else a power cut could leave a span in a file cut in it
                continue
            async with stream.lock:
                # While that was waited for, more may have left.
                if opened.moving is None and not _crossing(stream, size):
                    await self._truncate(opened, stream, size)
                    return
        await self._contents.truncate(opened, size)

    async def _truncate(self, opened: OpenInode, stream: Stream, size: int) -> None:
        before = opened.size
        await self._contents.truncate(opened, size)
        stream.wrote(min(size, before), max(size, before))
        gone = stream.spans.within(size, max(size, before))
        if gone:
            await self._cut(opened, stream, gone)

    async def _cut(self, opened: OpenInode, stream: Stream, gone: Sequence[Span]) -> None:
        await opened.device.apart.run(doubt.sync, opened.fd)
        reach(Point.CUT_AFTER_FSYNC)
        with self._meta.transaction(Change.CUT):
            self._meta.spans.give_up(gone)
        for span in gone:
            stream.spans.remove(span)
        self._store.swept()

    # -- after a daemon that died -------------------------------------------------------------

    def recover(self) -> None:
        """Give up what was on its way, and what lies in the place of what is in the store."""
        found = self._meta.spans.of_files()
        devices = {span.gen: self._file_of(span.gen) for span in found}
        with self._meta.transaction(Change.RECOVER_SPANS):
            self._meta.spans.give_up(self._meta.spans.unconfirmed())
            cut = [span for span in found if _size(devices[span.gen]) <= span.start]
            self._meta.spans.give_up(cut)
        for span in found:
            place = devices[span.gen]
            if place is not None and span not in cut:
                self._give_back(place, span)

    def _give_back(self, place: tuple[CacheDevice, int], span: Span) -> None:
        freed = punch(*place, span)
        row = self._meta.generations.get(span.gen)
        opened = self._table.inodes.get(row.ino) if row is not None else None
        if opened is not None and opened.gen.gen == span.gen:  # It is counted by who has it open.
            self._contents.account(opened)
        else:
            self._contents.on_account(place[0], -freed)

    def _file_of(self, gen: int) -> tuple[CacheDevice, int] | None:
        row = self._meta.generations.get(gen)
        if row is None or not self._contents.device(row).exists(row.file):
            return None
        return self._contents.device(row), row.file


def _crossing(stream: Stream, size: int) -> list[Span]:
    """The span that has bytes on both sides of an end of file at `size`, if there is one."""
    return [span for span in stream.spans.within(size, size + 1) if span.start < size]


def _size(place: tuple[CacheDevice, int] | None) -> int:
    """Bytes of a cache file; without one nothing is known to be cut off."""
    return place[0].stat(place[1]).st_size if place is not None else 1 << 62


def punch(device: CacheDevice, file: int, span: Span) -> int:
    """Give back the blocks of a span, as if nothing had been done to the file; returns the bytes
    freed. OSError."""
    fd = device.open(file, os.O_WRONLY)
    try:
        before = os.fstat(fd)
        if before.st_size < span.end:
            os.ftruncate(fd, span.end)
        punch_hole(fd, span.start, span.end)
        free_preallocation(fd)
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        reach(Point.OFFLOAD_AFTER_PUNCH)
        return (before.st_blocks - os.fstat(fd).st_blocks) * BLOCK_UNIT
    finally:
        os.close(fd)
