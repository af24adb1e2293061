"""Room from files that are being written: what is cold of them moves into the store.

When the cache is full of files that are open in the tracked lane, and nothing else can make room,
ranges of them are sent to the store as hidden objects, the oldest written first. How fast that goes
is how fast their writers go. See `vfs.streaming` for what becomes of such a file.

Where another disk has room for the whole file, and more, it moves there instead (`move_on`): once,
before anything of it is in the store.

In this order: the key is noted, the bytes are sent, the database says so, and says so on the disk;
then the range is punched out of the cache file. What was written to meanwhile is given up instead.
While that is decided nobody writes to the file (`OpenInode.moving`).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import structlog
import trio

from cachefs.cache import doubt
from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.errors import CachefsError, Retry, StoreError
from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import PENDING, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.spans import Span, places, usual_length
from cachefs.model.states import GenState
from cachefs.vfs.admission import Admission
from cachefs.vfs.contents import Contents
from cachefs.vfs.opened import Lane, OpenInode, OpenTable, Stream
from cachefs.vfs.streaming import SpanStore, Streams, punch

log = structlog.get_logger("cachefs.vfs")

AT_ONCE = 8
"""Ranges of a device that are on their way at a time."""
_INTERVAL = 0.5
"""Seconds between looks when nobody calls."""
_PAUSE = 0.02
_SOON = 10_000_000_000
"""Nanoseconds that a file may have yet to settle and is waited for all the same."""
_REST = 10.0
"""Seconds without another try after the store refused one."""


class _Piece(NamedTuple):
    """A range that could go."""

    written_ns: int
    opened: OpenInode
    start: int
    end: int


class Offloader:
    """Moves ranges of open files into the store. On the trio thread."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        table: OpenTable,
        contents: Contents,
        ledgers: Sequence[SpaceLedger],
        admission: Admission,
        streams: Streams,
        store: SpanStore,
        *,
        sync_meta: Callable[[], Awaitable[None]],
        is_kept: Callable[[OpenInode], bool],
    ) -> None:
        """`is_kept`: whether an open file stays as it is, whatever happens."""
        self._meta = meta
        self._queue = queue
        self._table = table
        self._contents = contents
        self._ledgers = ledgers
        self._admission = admission
        self._streams = streams
        self._store = store
        self._sync_meta = sync_meta
        self._is_kept = is_kept
        self._sending: dict[int, int] = dict.fromkeys(range(len(ledgers)), 0)
        """Device -> bytes on their way."""
        self._count: dict[int, int] = dict.fromkeys(range(len(ledgers)), 0)
        self._rests_until = float("-inf")
        self._some = trio.Event()
        self.can_copy: Callable[[], bool | None] = lambda: False
        """Whether the store can put objects together from others; None: it was not asked yet."""
        self.held_up: Callable[[int], int] = lambda ino: 0
        """Writes to a file that the tap had begun by itself before, and that a thread is at."""
        self.note_changes: Callable[[], None] = lambda: None
        """Takes in what was done to open files without passing here."""
        self.on_offloaded: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes of each range that left the cache."""
        self.roomier: Callable[[OpenInode], object | None] = lambda opened: None
        """Another device for an open file, if there is one that is worth the way."""
        self.move_on: Callable[[OpenInode], Awaitable[bool]] = _stay
        """Awaited with such a file; whether it is there now."""
        self._moving: dict[int, OpenInode] = {}
        """Device -> the file that moves from it."""
        self._stays: set[int] = set()
        """Generations that did not move when they should have."""
        self.total = 0
        """Bytes that left the cache so far."""

    @property
    def files(self) -> int:
        """Open files that are larger than the cache, or were."""
        return sum(each.stream is not None for each in self._table.inodes.values())

    async def run(self) -> None:
        """Make room whenever there is no other way, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._some = trio.Event()
                for ledger in self._ledgers:
                    self._start_due(nursery, ledger)
                await trio.sleep(_PAUSE)
                with trio.move_on_after(_INTERVAL):
                    await self._some.wait()

    def kick(self) -> None:
        """Somebody waits for room, or something has changed."""
        self._some.set()

    def makes_room(self, ledger: SpaceLedger) -> bool:
        """Whether who waits for room on a device will have some in time."""
        index = ledger.device.index
        if not self._admission.is_patient:
            return False
        if index in self._moving or self._mover(ledger) is not None:
            return True
        if not self._may_try() or self.can_copy() is False:
            return False
        return self._count[index] > 0 or any(self._pieces(ledger))

    def _may_try(self) -> bool:
        return self._admission.is_patient and trio.current_time() >= self._rests_until

    # -- what is to go ------------------------------------------------------------------------

    def _start_due(self, nursery: trio.Nursery, ledger: SpaceLedger) -> None:
        index = ledger.device.index
        if ledger.is_tight:
            self._count_all(ledger)
        if index in self._moving or self._start_moving(nursery, ledger):
            return
        wanted = self._wanted(ledger) if self._may_try() and self.can_copy() else 0
        if wanted <= self._sending[index] or self._count[index] >= AT_ONCE:
            return
        for piece in sorted(self._pieces(ledger), key=lambda each: (each[0], each[2])):
            if wanted <= self._sending[index] or self._count[index] >= AT_ONCE:
                return
            stream = self._streams.begin(piece.opened)
            stream.sending[piece.start] = piece.end
            self._sending[index] += piece.end - piece.start
            self._count[index] += 1
            nursery.start_soon(self._offload, piece, stream, ledger)

    def _start_moving(self, nursery: trio.Nursery, ledger: SpaceLedger) -> bool:
        """Let a file move from a full device, if that is of use."""
        wanted = self._wanted(ledger) if self._admission.is_patient else 0
        opened = self._mover(ledger) if wanted > self._sending[ledger.device.index] else None
        if opened is None:
            return False
        self._moving[ledger.device.index] = opened
        nursery.start_soon(self._move, opened, ledger.device.index)
        return True

    def _mover(self, ledger: SpaceLedger) -> OpenInode | None:
        """The largest open file of a device that could go on on another one."""
        could = [
            each
            for each in self._table.inodes.values()
            if each.device is ledger.device
            and each.gen.gen not in self._stays
            and self._suits(each)
            and self.roomier(each) is not None
        ]
        return max(could, key=lambda each: each.accounted, default=None)

    async def _move(self, opened: OpenInode, index: int) -> None:
        gen = opened.gen.gen
        try:
            if await self.move_on(opened):
                log.info("a file that is written goes on on another device", inode=opened.ino)
            else:
                self._stays.add(gen)
        finally:
            del self._moving[index]
            self.kick()

    def _count_all(self, ledger: SpaceLedger) -> None:
        """What is written is counted now and then only; it is to be known where there is little
        room."""
        for opened in self._table.inodes.values():
            if opened.writing and opened.device is ledger.device and opened.lane is Lane.TRACKED:
                self._contents.account(opened)

    def _wanted(self, ledger: SpaceLedger) -> int:
        """Bytes that have to leave a device: what nothing else will free."""
        waits = self._admission.waits_for(ledger)
        looked = ledger.exhausted or not ledger.above_high  # by who evicts what is durable
        if not ledger.device.healthy or not looked:
            return 0
        wanted = max(ledger.excess(), waits)
        return max(0, wanted - self._coming(ledger.device.index)) if wanted else 0

    def _coming(self, device: int) -> int:
        """Bytes of closed files that are on their way into the store: they may leave then."""
        closed = self._meta.generations.closed_on(device)
        moving = (row for row in closed if row.state in (GenState.SEALED, GenState.UPLOADING))
        return sum(self._here(row) for row in moving if self._is_going(row))

    def _is_going(self, row: GenerationRow) -> bool:
        """Whether a closed file is sent soon."""
        queue, soon = self._queue, time.time_ns() + _SOON
        return any(
            each.state == PENDING and not queue.is_held(each.id) and queue.settled_at(each) <= soon
            for each in queue.of_gen(row.gen)
        )

    def _here(self, row: GenerationRow) -> int:
        return row.size - sum(span.size for span in self._meta.spans.of_gen(row.gen))

    def _pieces(self, ledger: SpaceLedger) -> Iterator[_Piece]:
        """What may go from a device."""
        for opened in list(self._table.inodes.values()):
            if opened.device is ledger.device and self._suits(opened):
                yield from self._pieces_of(opened, ledger.limit)

    def _suits(self, opened: OpenInode) -> bool:
        """Whether a file is one that is written, here alone, and may become a stream."""
        is_written = opened.writing and opened.writers > 0 and opened.lane is Lane.TRACKED
        untouched = opened.dirty is not None and not len(opened.dirty)
        if untouched and not self._admission.is_waiting(opened.ino):
            return False
        if not is_written or opened.fill is not None or opened.snapshot is not None:
            return False
        row = self._meta.generations.get(opened.gen.gen)
        return row is not None and row.copy_file is None and not self._is_kept(opened)

    def _pieces_of(self, opened: OpenInode, limit: int) -> Iterator[_Piece]:
        opened.refresh()
        stream = opened.stream
        for start, end in places(opened.size, usual_length(limit), limit):
            if stream is not None and (stream.spans.within(start, end) or start in stream.sending):
                continue
            if _has_data(opened.fd, start, end):
                written = stream.last_write(start, end) if stream is not None else 0
                yield _Piece(written, opened, start, end)

    # -- how it goes --------------------------------------------------------------------------

    async def _offload(self, piece: _Piece, stream: Stream, ledger: SpaceLedger) -> None:
        opened, index, nbytes = piece.opened, ledger.device.index, piece.end - piece.start
        path = opened.device.path(opened.gen.file)
        try:
            span = await self._store.send(stream.gen, path, piece.start, piece.end)
            try:
                async with stream.lock:
                    await self._keep(opened, stream, span)
            finally:
                if span not in stream.spans:
                    self._store.leave(span)
        except (CachefsError, OSError, sqlite3.Error) as error:
            log.info("a range of a file stays here", inode=opened.ino, reason=str(error))
            refused = isinstance(error, StoreError) and error.retry in (Retry.NEVER, Retry.SLOWLY)
            if refused:  # Not when the file was cut while it was read.
                self._rests_until = trio.current_time() + _REST
        finally:
            stream.sending.pop(piece.start, None)
            stream.spoiled.discard(piece.start)
            self._sending[index] -= nbytes
            self._count[index] -= 1
            self.kick()

    async def _keep(self, opened: OpenInode, stream: Stream, span: Span) -> None:
        """What was sent counts from now on, and leaves the cache; unless it is outdated."""
        device, file = opened.device, opened.gen.file
        # The file's length must outlive a power cut before anything in it is given back.
        await device.apart.run(_sync, device, file)
        async with self._quiet(opened):
            self.note_changes()
            current = self._is_written(opened, stream) and os.fstat(opened.fd).st_size >= span.end
            if not current or span.start in stream.spoiled:
                return
            with self._meta.transaction(Change.OFFLOAD):
                self._meta.spans.confirm(span)
            stream.spans.add(span)
            stream.trims += 1
            await self._sync_meta()
            reach(Point.OFFLOAD_AFTER_SYNC)
            await self._punch(opened, device, file, span)

    @asynccontextmanager
    async def _quiet(self, opened: OpenInode) -> AsyncIterator[None]:
        """While nobody writes to an open file."""
        await opened.settled()
        opened.moving = trio.Event()
        try:
            while opened.writes or self.held_up(opened.ino):  # noqa: ASYNC110
                await trio.sleep(0.001)
            yield
        finally:
            opened.moving.set()
            opened.moving = None

    def _is_written(self, opened: OpenInode, stream: Stream) -> bool:
        """Whether the file is still there, and what it was when it was chosen."""
        here = self._table.inodes.get(opened.ino) is opened
        return here and opened.writing and opened.gen.gen == stream.gen

    async def _punch(self, opened: OpenInode, device: CacheDevice, file: int, span: Span) -> None:
        opened.refresh()
        opened.punched = True
        try:
            freed = await device.apart.run(punch, device, file, span)
        finally:
            opened.punched = False
        if self._table.inodes.get(opened.ino) is opened:
            self._contents.account(opened)
        else:
            self._contents.on_account(device, -freed)
        self.total += span.size
        self.on_offloaded(span.size)


def _sync(device: CacheDevice, file: int) -> None:
    """In a thread, and by a descriptor that nobody else closes. OSError."""
    fd = device.open(file, os.O_WRONLY)
    try:
        doubt.sync(fd)
    finally:
        os.close(fd)


def _has_data(fd: int, start: int, end: int) -> bool:
    """Whether a range of a file is not a hole."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA) < end
    except OSError:
        return False


async def _stay(opened: OpenInode) -> bool:
    """There is no other device."""
    return False
