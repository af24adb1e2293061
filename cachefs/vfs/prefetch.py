"""Fetching the rest of a checkpoint once it is clear that somebody restores it.

A framework opens the shards of a checkpoint one after the other, or many readers open one each. The
second file of one directory that is opened within a minute, and is not in the cache, tells: from
then on the others are fetched behind the readers, in the order of their names, a few pieces at a
time so that nobody who waits for a piece queues behind them. Only what fits is fetched so.

From then on, too, opening one of them that is not large takes until it is here: then it is read in
the passthrough lane, at the speed of the disk, and without a single read that passes here. To wait
in `open` or in `read` is the same to whoever reads all of it. Who wants a piece only, from a slow
store, is let go on after a while, and is not kept waiting in that directory again. Files whose
names say that they hold data are opened so outside of checkpoints as well.

Opening a large one, or the first one, takes until it is here as well, where the speed at which it
comes promises that to be soon (`cache.whole_wait`). Else it is read as it comes.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
import trio

from cachefs.cache.device import BLOCK_UNIT
from cachefs.errors import CachefsError
from cachefs.meta import Meta
from cachefs.meta.rows import InodeRow
from cachefs.model.extents import ExtentSet
from cachefs.vfs.contents import Contents
from cachefs.vfs.files import Files

TELLING = 2
"""Files of a directory that have to be opened."""
WITHIN = 60.0
"""Seconds between the first and the last of them."""
SMALLEST = 1 << 20
"""Bytes of a file that is worth it."""

WHOLE = 64 << 20
"""Bytes of the largest file whose opening waits for all of it."""
PATIENCE = 5.0
"""Seconds that it waits at most."""

LOOK = 0.5
"""Seconds between two looks at how fast a large file comes."""
JUDGED = 1.0
"""Seconds after which that is believed."""

_FILES_AT_ONCE = 2
_STEP = 64 << 20
_REMEMBERED = 256
_BATCH = 1000

T = TypeVar("T")

log = structlog.get_logger("cachefs.vfs")


@dataclass(slots=True, eq=False)
class _Coming:
    """The fetch of a whole file."""

    ended: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    waiters: int = 0
    """Those who wait for a large file as long as it comes fast."""
    kept: bool = False
    """It goes on without them."""


class Prefetcher:
    """Told of every file that is opened and has to be fetched."""

    def __init__(
        self,
        meta: Meta,
        files: Files,
        contents: Contents,
        *,
        is_checkpoint: Callable[[str], bool],
        is_data: Callable[[str], bool],
        room: Callable[[], int],
        patience: float,
        is_native: Callable[[InodeRow, int], bool],
    ) -> None:
        """`is_checkpoint`: whether a path is part of one; `is_data`: whether its name says that it
        is data; `room`: bytes that may be fetched; `patience`: seconds that opening a large file
        may take; `is_native`: whether one that is here, opened with these flags, is read in the
        passthrough lane."""
        self._meta = meta
        self._files = files
        self._contents = contents
        self._is_checkpoint = is_checkpoint
        self._is_data = is_data
        self._room = room
        self._patience = patience
        self._is_native = is_native
        self._opened: dict[int, dict[int, float]] = {}
        """Directory -> files opened in it and when."""
        self._restored: dict[int, float] = {}
        """Directory -> until when its files are opened whole; 0: never again."""
        self._running: set[int] = set()
        self._coming: dict[int, _Coming] = {}
        """Files that are being fetched."""
        self._nursery: trio.Nursery | None = None
        self._send, self._receive = trio.open_memory_channel[int](_REMEMBERED)
        contents.on_fill = self.note
        self.while_wanted: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around what is waited for: EINTR when who asks is being killed."""

    def note(self, ino: int) -> bool:
        """A file was opened that is not, or not all, in the cache. Whether it is a large one that
        is probably read once, from its start to its end."""
        folder, is_checkpoint, is_data = self._kind(ino)
        if not (is_checkpoint or is_data):
            return False
        if self._tells(folder, ino):
            if self._restored.get(folder) != 0:
                _remember(self._restored, folder, time.monotonic() + WITHIN)
            if is_checkpoint:
                self._order(folder)
        row = self._meta.inodes.get(ino)
        return row is not None and row.size > WHOLE

    def _kind(self, ino: int) -> tuple[int, bool, bool]:
        """The directory of a file, whether it is part of a checkpoint, whether it is named as data
        are."""
        entry = next(iter(self._meta.dentries.of_inode(ino)), None)
        if entry is None:
            return 0, False, False
        path = self._meta.dentries.path(entry.parent, entry.name).decode()
        return entry.parent, self._is_checkpoint(path), self._is_data(path)

    def _tells(self, folder: int, ino: int) -> bool:
        """Whether that makes enough files of a directory in a short time."""
        now = time.monotonic()
        opened = self._opened.get(folder, {})
        recent = {each: when for each, when in opened.items() if now - when < WITHIN}
        recent[ino] = now
        told = len(recent) >= TELLING
        _remember(self._opened, folder, dict([*recent.items()][-TELLING:]))
        return told

    def _order(self, folder: int) -> None:
        if folder not in self._running:
            with contextlib.suppress(trio.WouldBlock):
                self._send.send_nowait(folder)
                self._running.add(folder)

    async def before_open(self, ino: int, flags: int) -> None:
        """Awaited before a program opens a file. EINTR: that program is being killed."""
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            return
        row = self._meta.inodes.get(ino)
        if row is None or not self._is_worth_waiting(row):
            return
        folder = self._restored_folder(ino) if row.size <= WHOLE else None
        with self.while_wanted():
            if folder is not None:
                await self._wait_for_small(ino, folder)
            elif self._is_worth_much(row, flags):
                await self._wait_as_promised(row)

    def _restored_folder(self, ino: int) -> int | None:
        """The directory in which a file is read of which more are."""
        names = self._meta.dentries.of_inode(ino)
        return next((name.parent for name in names if self._is_restored(name.parent)), None)

    async def _wait_for_small(self, ino: int, folder: int) -> None:
        with trio.move_on_after(PATIENCE) as waiting:
            await self._bring(ino)
        if waiting.cancelled_caught:
            _remember(self._restored, folder, 0)

    def _is_worth_much(self, row: InodeRow, flags: int) -> bool:
        """Whether a file of data would be read as fast as the disk is, and there is room for it."""
        folder, is_checkpoint, is_data = self._kind(row.ino)
        return (
            self._patience > 0
            and (is_checkpoint or is_data)
            and self._restored.get(folder) != 0
            and self._is_native(row, flags)
            and row.size - self._here(row.ino) <= self._room()
        )

    async def _wait_as_promised(self, row: InodeRow) -> None:
        coming = self._start(row.ino)
        if coming is None:
            return
        coming.waiters += 1
        began, before = trio.current_time(), self._here(row.ino)
        try:
            while not coming.ended.is_set():
                with trio.move_on_after(LOOK):
                    await coming.ended.wait()
                took, now = trio.current_time() - began, self._here(row.ino)
                left = (row.size - now) * took / max(1, now - before)
                if took >= JUDGED and took + left > self._patience:
                    return
        finally:
            coming.waiters -= 1
            if not (coming.waiters or coming.kept):
                coming.scope.cancel()

    def _here(self, ino: int) -> int:
        """Bytes of a file that are in the cache, those that just arrived among them."""
        opened = self._files.table.inodes.get(ino)
        if opened is not None:
            return os.fstat(opened.fd).st_blocks * BLOCK_UNIT
        gen = self._meta.generations.current(ino)
        return ExtentSet.unpack(gen.present).total if gen is not None and gen.present else 0

    def _is_restored(self, folder: int) -> bool:
        return time.monotonic() < self._restored.get(folder, 0)

    def _is_worth_waiting(self, row: InodeRow) -> bool:
        """Whether the file can be in the passthrough lane: the first that opens it decides for
        all."""
        opened = self._files.table.inodes.get(row.ino)
        if opened is not None and not (row.ino in self._coming and opened.handles == 1):
            return False
        return self._is_lacking(row)

    async def run(self) -> None:
        """Fetch what was told of, one directory after the other, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                async for folder in self._receive:
                    await self._fetch_told(folder)
            finally:
                self._nursery = (
                    None  # It takes no more, and nobody is to wait for what it does not.
                )

    async def _fetch_told(self, folder: int) -> None:
        try:
            await self._fetch_directory(folder)
        finally:
            self._running.discard(folder)

    async def _fetch_directory(self, folder: int) -> None:
        wanted = self._wanted(folder)
        if sum(row.size for row in wanted) > self._room():
            return
        left = iter(wanted)

        async def some() -> None:
            for row in left:
                if self._is_lacking(row):
                    await self._bring(row.ino)

        async with trio.open_nursery() as nursery:
            for _ in range(_FILES_AT_ONCE):
                nursery.start_soon(some)

    def _wanted(self, folder: int) -> list[InodeRow]:
        found: list[tuple[bytes, InodeRow]] = []
        after = 0
        while entries := self._meta.inodes.children(folder, after, _BATCH):
            after = entries[-1][0]
            found += [(name, row) for _, name, row in entries if self._is_lacking(row)]
        return [row for _, row in sorted(found, key=lambda each: each[0])]

    def _is_lacking(self, row: InodeRow) -> bool:
        if not stat.S_ISREG(row.mode) or row.size < SMALLEST:
            return False
        gen = self._meta.generations.current(row.ino)
        return gen is None or gen.present is not None

    async def _bring(self, ino: int) -> None:
        """Return when a file is here, or cannot be had. All who wait for it share one fetch, which
        goes on without them."""
        coming = self._start(ino)
        if coming is not None:
            coming.kept = True
            await coming.ended.wait()

    def _start(self, ino: int) -> _Coming | None:
        """The fetch of a file, which may have begun before. None: it is not the time for any."""
        coming = self._coming.get(ino)
        if coming is None and self._nursery is not None:
            coming = self._coming[ino] = _Coming()
            self._nursery.start_soon(self._fetch, ino, coming)
        return coming

    async def _fetch(self, ino: int, coming: _Coming) -> None:
        try:
            with coming.scope:
                await self._fetch_all(ino)
        except (OSError, CachefsError, sqlite3.Error) as error:
            log.info("not fetched ahead", inode=ino, reason=str(error))
        finally:
            del self._coming[ino]
            coming.ended.set()

    async def _fetch_all(self, ino: int) -> None:
        handle = await self._files.open(ino, os.O_RDONLY)
        fill = handle.inode.fill
        if fill is not None:
            fill.whole = True
        try:
            for start in range(0, handle.inode.size, _STEP):
                await self._contents.ensure(handle.inode, start, start + _STEP)
            self._contents.account(handle.inode)
        finally:
            if fill is not None:  # Who opens the file while some of it is coming goes on with it.
                fill.whole = False
            self._files.release(handle.fh)


def _remember(known: dict[int, T], folder: int, what: T) -> None:
    """Note something of a directory, and forget those that nothing was noted of for longest."""
    known.pop(folder, None)
    known[folder] = what
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
