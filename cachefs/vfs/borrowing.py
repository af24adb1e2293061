"""Writing to a file of the bucket that is larger than the cache: its bytes stay in the store.

To get all of it first, as of a smaller file, there is no room. So the store is asked for a copy of
the object, under a hidden key, and ranges of that copy are what the new generation has in the store
only, as of any file that outgrew the cache while it was written (`vfs.streaming`). Its cache file
is a new one, with nothing but what lies behind the last of these ranges.

The copy is of one version: who replaces the object meanwhile changes nothing in the file, and meets
it as a conflict. It belongs to nobody until the transaction that begins the generation, so what a
daemon leaves that dies before is deleted by the next one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog
import trio

from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.system import write_all
from cachefs.errors import NotFound, PreconditionFailed
from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow, ObjectRow
from cachefs.model.extents import Extent, ExtentSet
from cachefs.model.spans import Span, places, usual_length
from cachefs.model.states import GenState
from cachefs.vfs import clock
from cachefs.vfs.contents import Contents
from cachefs.vfs.opened import Lane, OpenInode
from cachefs.vfs.streaming import SpanStore, Streams

log = structlog.get_logger("cachefs.vfs")

_ASKING = 0.1
"""Seconds between looks whether it is known what the store can do."""
_PIECE = 4 << 20


class Borrower:
    """Makes files writable that do not fit. On the trio thread."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        contents: Contents,
        ledgers: Sequence[SpaceLedger],
        streams: Streams,
        store: SpanStore,
        *,
        sync_meta: Callable[[], Awaitable[None]],
        may_stream: Callable[[OpenInode], bool],
    ) -> None:
        """`may_stream`: whether an open file may have bytes in the store only."""
        self._meta = meta
        self._queue = queue
        self._contents = contents
        self._ledgers = ledgers
        self._streams = streams
        self._store = store
        self._sync_meta = sync_meta
        self._may_stream = may_stream
        self.can_copy: Callable[[], bool | None] = lambda: False
        """Whether the store can put objects together from others; None: it was not asked yet."""

    async def borrow(self, opened: OpenInode) -> bool:
        """Begin a generation of a file that the cache cannot hold; False if this is not one. To be
        called with its lock, and again if the file is still not written to after that. ESTALE: the
        object is another one by now. OSError, StoreError."""
        if not self._is_too_large(opened):
            return False
        while self.can_copy() is None:  # noqa: ASYNC110
            await trio.sleep(_ASKING)
        row, origin = self._known(opened)
        where = list(self._places(opened))
        if not self.can_copy() or row is None or origin is None or not where:
            return False
        tail = where[-1][1]
        await self._contents.fetch_to_write(opened, tail)
        try:
            spans = await self._store.borrow(origin.key, origin.etag, origin.size, where)
        except (NotFound, PreconditionFailed) as error:
            if self._known(opened)[1] != origin:
                return True  # A rename of ours has made another object of it.
            raise OSError(errno.ESTALE, f"the object has changed: {error}") from error
        try:
            await self._begin(opened, row, spans, tail)
        except BaseException:
            self._store.leave(*spans)
            raise
        self._store.taken(spans)
        await self._sync_meta()
        reach(Point.BORROW_AFTER_SYNC)
        return True

    def _is_too_large(self, opened: OpenInode) -> bool:
        """Whether what lacks of it has no room, whatever else leaves the cache."""
        if opened.fill is None or opened.lane is not Lane.TRACKED or not self._may_stream(opened):
            return False
        ledger = self._ledgers[opened.gen.device]
        missing = opened.size - opened.fill.present.total
        return missing > ledger.headroom() and opened.size > ledger.capacity * 3 // 4

    def _known(self, opened: OpenInode) -> tuple[GenerationRow | None, ObjectRow | None]:
        """The generation, if all of it is in the store, and the object that has it."""
        row = self._meta.generations.get(opened.gen.gen)
        if row is None or row.state != GenState.DURABLE or self._queue.of_gen(row.gen):
            return None, None
        holding = self._meta.objects.holding(row.ino, row.gen)
        return row, next((each for each in holding if each.size == opened.size), None)

    def _places(self, opened: OpenInode) -> Sequence[Extent]:
        limit = self._ledgers[opened.gen.device].limit
        return list(places(opened.size, usual_length(limit), limit))

    async def _begin(
        self, opened: OpenInode, old: GenerationRow, spans: Sequence[Span], tail: int
    ) -> None:
        device, file, size = opened.device, self._contents.new_file_number(), opened.size
        try:
            make = partial(_make, opened.fd, device, file, tail, size, opened.mtime_ns)
            fd = await device.apart.run(make)
        except BaseException:
            device.apart.later(partial(device.remove, file))
            raise
        self._contents.account(opened)
        dirty = ExtentSet()
        try:
            with self._meta.transaction(Change.BORROW):
                gen = self._contents.add_generation(
                    opened.ino, device, file, opened.lane, size=size, dirty=dirty, base=old.gen,
                    anchored=True,
                )  # fmt: skip
                self._meta.spans.adopt(gen.gen, spans)
                self._meta.inodes.set_gen(opened.ino, gen.gen)
                self._contents.unreferenced(old.gen)
        except BaseException:
            device.let_go(fd)
            device.apart.later(partial(device.remove, file))
            raise
        opened.switch(fd)  # A read that is under way is made anew: something has left the cache.
        opened.gen, opened.dirty, opened.writing, opened.accounted = gen, dirty, True, 0
        opened.untouched_ns = os.fstat(opened.fd).st_mtime_ns
        self._streams.take_up(opened)
        self._contents.account(opened)
        log.info("a file that is larger than the cache is written to", inode=opened.ino)


def _make(source: int, device: CacheDevice, file: int, tail: int, size: int, mtime_ns: int) -> int:
    """A cache file with the end of a file only, on the disk; returns a descriptor. Waits for the
    disk. OSError."""
    fd = device.create(file)
    try:
        os.ftruncate(fd, size)
        for start in range(tail, size, _PIECE):
            write_all(fd, os.pread(source, min(_PIECE, size - start), start), start)
        os.fsync(fd)
        device.sync_dir(file)
        clock.begin(fd, mtime_ns)
        reach(Point.BORROW_AFTER_FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd
