"""Files that stay open for days (logs, event files) are uploaded as far as they have grown.

A snapshot is a generation without a cache file of its own: the first `size` bytes of the open
file's. An append does not disturb it; a write or truncation before its end does (`spoil`), so the
upload is stopped first. Only files whose names say that they take no part in the order law
(`order.unordered`) are treated so, always in the tracked lane where every write is seen: a prefix
of a log makes sense, a prefix of anything else would be a torn file.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.model.states import GenState
from cachefs.vfs.contents import Contents
from cachefs.vfs.opened import Lane, OpenInode, OpenTable
from cachefs.vfs.sealing import since_snapshot


class Snapshots:
    """Publishes growing files every `interval` seconds."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        table: OpenTable,
        contents: Contents,
        *,
        interval: float,
        is_log: Callable[[str], bool],
    ) -> None:
        """`is_log(path)`: whether a file may be published while it is written."""
        self._meta = meta
        self._queue = queue
        self._table = table
        self._contents = contents
        self._interval = interval
        self._is_log = is_log

    async def run(self) -> None:
        """Look at the open files now and then."""
        while True:
            await trio.sleep(self._interval)
            for opened in list(self._table.open_for_writing()):
                self.take(opened)

    def take(self, opened: OpenInode) -> bool:
        """Queue what a file holds now, if it is a log and has changed; False if not."""
        if not self._is_due(opened):
            return False
        self._contents.save_open(opened)
        size = opened.size
        with self._meta.transaction(Change.SNAPSHOT):
            row = self._contents.add_generation(
                opened.ino,
                opened.device,
                opened.gen.file,
                opened.lane,
                state=GenState.SEALED,
                size=size,
                dirty=since_snapshot(opened) if opened.snapshot is not None else opened.dirty,
                base=opened.snapshot if opened.snapshot is not None else opened.gen.base,
            )
            row.grows, row.sealed_ns = 1, time.time_ns()
            self._meta.generations.save(row)
            self._contents.publish(opened.ino, row)
        opened.snapshot, opened.snapshot_size, opened.unsent = row.gen, size, size
        return True

    def _is_due(self, opened: OpenInode) -> bool:
        changed = opened.size != opened.snapshot_size or opened.unsent < opened.snapshot_size
        if not (opened.writing and changed and opened.lane is Lane.TRACKED):
            return False
        if opened.stream is not None:
            return False  # It had another name before, and is not all in its cache file.
        if opened.orphaned or (opened.snapshot and self._queue.of_gen(opened.snapshot)):
            return False  # One at a time: the next one takes all that came meanwhile.
        names = self._meta.dentries.of_inode(opened.ino)
        paths = [self._meta.dentries.path(name.parent, name.name).decode() for name in names]
        return bool(paths) and all(self._is_log(path) for path in paths)

    async def spoil(self, opened: OpenInode) -> None:
        """Bytes of the last snapshot are about to change: stop its upload, forget it."""
        if opened.snapshot is None:
            return
        for effect in self._queue.of_gen(opened.snapshot):
            await self._queue.stop(effect.id)
            reach(Point.SPOIL_AFTER_STOP)
            self._queue.cancel(effect)
        opened.snapshot, opened.snapshot_size, opened.unsent = None, 0, 0
        opened.dirty = None
