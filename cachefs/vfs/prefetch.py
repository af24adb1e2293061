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
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

import structlog
import trio

from cachefs.errors import StoreError
from cachefs.meta import Meta
from cachefs.meta.rows import InodeRow
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

_FILES_AT_ONCE = 2
_STEP = 64 << 20
_REMEMBERED = 256
_BATCH = 1000

T = TypeVar("T")

log = structlog.get_logger("cachefs.vfs")


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
    ) -> None:
        """`is_checkpoint`: whether a path is part of one; `is_data`: whether its name says that it
        is data; `room`: bytes that may be fetched."""
        self._meta = meta
        self._files = files
        self._contents = contents
        self._is_checkpoint = is_checkpoint
        self._is_data = is_data
        self._room = room
        self._opened: dict[int, dict[int, float]] = {}
        """Directory -> files opened in it and when."""
        self._restored: dict[int, float] = {}
        """Directory -> until when its files are opened whole; 0: never again."""
        self._running: set[int] = set()
        self._coming: dict[int, trio.Event] = {}
        """Files that are being fetched, and what is set when that has ended."""
        self._nursery: trio.Nursery | None = None
        self._send, self._receive = trio.open_memory_channel[int](_REMEMBERED)
        contents.on_fill = self.note

    def note(self, ino: int) -> bool:
        """A file was opened that is not, or not all, in the cache. Whether it is a large one that
        is probably read once, from its start to its end."""
        entry = next(iter(self._meta.dentries.of_inode(ino)), None)
        if entry is None:
            return False
        path = self._meta.dentries.path(entry.parent, entry.name).decode()
        is_checkpoint = self._is_checkpoint(path)
        if not (is_checkpoint or self._is_data(path)):
            return False
        if self._tells(entry.parent, ino):
            if self._restored.get(entry.parent) != 0:
                _remember(self._restored, entry.parent, time.monotonic() + WITHIN)
            if is_checkpoint:
                self._order(entry.parent)
        row = self._meta.inodes.get(ino)
        return row is not None and row.size > WHOLE

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
        """Awaited before a program opens a file."""
        if not self._restored or flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            return
        names = self._meta.dentries.of_inode(ino)
        folder = next((name.parent for name in names if self._is_restored(name.parent)), None)
        if folder is None or not self._is_worth_waiting(ino):
            return
        with trio.move_on_after(PATIENCE) as waiting:
            await self._bring(ino)
        if waiting.cancelled_caught:
            _remember(self._restored, folder, 0)

    def _is_restored(self, folder: int) -> bool:
        return time.monotonic() < self._restored.get(folder, 0)

    def _is_worth_waiting(self, ino: int) -> bool:
        """Whether the file can be in the passthrough lane: the first that opens it decides for
        all."""
        opened = self._files.table.inodes.get(ino)
        if opened is not None and not (ino in self._coming and opened.handles == 1):
            return False
        row = self._meta.inodes.get(ino)
        return row is not None and row.size <= WHOLE and self._is_lacking(row)

    async def run(self) -> None:
        """Fetch what was told of, one directory after the other, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            async for folder in self._receive:
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
        coming = self._coming.get(ino)
        if coming is None and self._nursery is not None:
            coming = self._coming[ino] = trio.Event()
            self._nursery.start_soon(self._fetch, ino, coming)
        if coming is not None:
            await coming.wait()

    async def _fetch(self, ino: int, coming: trio.Event) -> None:
        try:
            await self._fetch_all(ino)
        except (OSError, StoreError) as error:
            log.info("not fetched ahead", inode=ino, reason=str(error))
        finally:
            del self._coming[ino]
            coming.set()

    async def _fetch_all(self, ino: int) -> None:
        handle = await self._files.open(ino, os.O_RDONLY)
        try:
            for start in range(0, handle.inode.size, _STEP):
                await self._contents.ensure(handle.inode, start, start + _STEP)
            self._contents.account(handle.inode)
        finally:
            self._files.release(handle.fh)


def _remember(known: dict[int, T], folder: int, what: T) -> None:
    """Note something of a directory, and forget those that nothing was noted of for longest."""
    known.pop(folder, None)
    known[folder] = what
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
