"""Fetching the rest of a checkpoint once it is clear that somebody restores it.

A framework opens the shards of a checkpoint one after the other, or many readers open one each. The
second file of one directory that is opened within a minute, and is not in the cache, tells: from
then on the others are fetched behind the readers, in the order of their names, a few pieces at a
time so that nobody who waits for a piece queues behind them. Only what fits is fetched so.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable

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

_FILES_AT_ONCE = 2
_STEP = 32 << 20
_REMEMBERED = 256
_BATCH = 1000

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
        room: Callable[[], int],
    ) -> None:
        """`is_checkpoint`: whether a path is part of one; `room`: bytes that may be fetched."""
        self._meta = meta
        self._files = files
        self._contents = contents
        self._is_checkpoint = is_checkpoint
        self._room = room
        self._opened: dict[int, dict[int, float]] = {}
        """Directory -> files opened in it and when."""
        self._running: set[int] = set()
        self._send, self._receive = trio.open_memory_channel[int](_REMEMBERED)
        contents.on_fill = self.note

    def note(self, ino: int) -> None:
        """A file was opened that is not, or not all, in the cache."""
        entry = next(iter(self._meta.dentries.of_inode(ino)), None)
        if entry is None or entry.parent in self._running:
            return
        if not self._is_checkpoint(self._meta.dentries.path(entry.parent, entry.name).decode()):
            return
        now = time.monotonic()
        opened = self._opened.pop(entry.parent, {})
        recent = {each: when for each, when in opened.items() if now - when < WITHIN}
        recent[ino] = now
        if len(recent) < TELLING:
            self._opened[entry.parent] = recent
            while len(self._opened) > _REMEMBERED:
                del self._opened[next(iter(self._opened))]
            return
        try:
            self._send.send_nowait(entry.parent)
            self._running.add(entry.parent)
        except trio.WouldBlock:
            return

    async def run(self) -> None:
        """Fetch what was told of, one directory after the other, until cancelled."""
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
                try:
                    await self._fetch(row)
                except (OSError, StoreError) as error:
                    log.info("not fetched ahead", inode=row.ino, reason=str(error))

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

    async def _fetch(self, row: InodeRow) -> None:
        handle = await self._files.open(row.ino, os.O_RDONLY)
        try:
            for start in range(0, row.size, _STEP):
                await self._contents.ensure(handle.inode, start, start + _STEP)
            self._contents.account(handle.inode)
        finally:
            self._files.release(handle.fh)
