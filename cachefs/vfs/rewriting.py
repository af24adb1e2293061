"""Writing to a file whose current generation is sealed: the bytes that are still needed are kept.

A sealed generation never changes, so the writer gets a new one first (`begin_write`):

- durable: the bytes are safe in the store, so the new generation takes over the cache file and
  counts as dirty only what is written from then on;
- sealed but not durable: its bytes are still to be uploaded. In the tracked lane the writer gets a
  copy (reflink where the filesystem can) and the sealed one keeps its file; in passthrough the
  kernel goes on writing to the file it has, so the sealed one moves to the copy;
- sealed, not durable and too large to copy (`cache.preserve_limit`, or for the room that is left),
  or not all in the cache: its upload is given up, the file goes back to being written, and whoever
  waited for the old version waits for the new one;
- durable, and too large for the cache to get all of it: see `borrowing`;
- held since a daemon died: it goes on as if it had never been closed.

Power cut: before the first write into a taken-over file the metadata that says so is synced, since
otherwise the old row would call changed bytes durable. Before that, the bytes are: what the old
generation had must be found in the new one, whoever kept it until then (a program's fsync, the
store).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence

from cachefs.cache.device import CacheDevice
from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import BLOCKED, PENDING, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow, GenerationRow
from cachefs.model.extents import ExtentSet
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.vfs import clock
from cachefs.vfs.contents import Contents
from cachefs.vfs.opened import Lane, OpenInode

_ALWAYS_COPIED = 1 << 20
"""Bytes for which there always is room: a marker that is rewritten all the time must get out."""


class Rewriter:
    """Makes open files writable."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        contents: Contents,
        *,
        preserve_limit: int,
        sync_meta: Callable[[], Awaitable[None]],
    ) -> None:
        """`preserve_limit` in bytes; `sync_meta` makes all commits so far survive a power cut."""
        self._meta = meta
        self._queue = queue
        self._contents = contents
        self._preserve_limit = preserve_limit
        self._sync_meta = sync_meta
        self.borrow: Callable[[OpenInode], Awaitable[bool]] = _never
        """Awaited with each file first: whether it does not fit into the cache, and can be written
        to all the same from now on."""
        self.has_room: Callable[[CacheDevice, int], bool] = lambda device, nbytes: True
        """Whether a device can take so many bytes at once."""

    async def begin_write(self, opened: OpenInode) -> None:
        """Make the file's generation one that may be written to. See the module docstring."""
        async with opened.lock:
            while not opened.writing:
                await self._begin_write(opened)

    async def _begin_write(self, opened: OpenInode) -> None:
        if await self.borrow(opened):
            return
        await self._contents.fetch_to_write(opened, 0)
        if not opened.device.healthy:  # Who reads it goes on; what is written would be lost.
            raise OSError(errno.EIO, f"the cache device {opened.device.directory} has failed")
        gen = self._meta.generations.get(opened.gen.gen)
        if gen is None:
            raise OSError(errno.EIO, "the generation is gone")
        opened.gen = gen
        if gen.state in (GenState.HELD, GenState.OPEN):
            self._reopen(opened)
        elif gen.state == GenState.DURABLE and not self._queue.of_gen(gen.gen):
            await self._take_over(opened)
        elif opened.stream is not None or not self._may_copy(opened):
            await self._merge(opened)
        elif opened.lane is Lane.PASSTHROUGH:
            await self._copy_for_upload(opened)
        else:
            await self._copy_for_writer(opened)

    def _may_copy(self, opened: OpenInode) -> bool:
        size = opened.gen.size
        has_room = size <= _ALWAYS_COPIED or self.has_room(opened.device, size)
        return size <= self._preserve_limit and has_room

    async def _set_time(self, opened: OpenInode) -> None:
        """Let the cache file bear the time of writing, instead of that of a download or a copy."""
        await opened.device.apart.run(clock.begin, opened.fd, opened.mtime_ns)
        reach(Point.BEGIN_AFTER_TIME)

    def _begun(self, opened: OpenInode, gen: GenerationRow, dirty: ExtentSet | None) -> None:
        """From its next write on the time of writing is the cache file's."""
        opened.gen, opened.dirty, opened.writing = gen, dirty, True
        opened.untouched_ns = os.fstat(opened.fd).st_mtime_ns

    def _reopen(self, opened: OpenInode) -> None:
        """A generation that was open when a daemon died goes on: what it holds is all dirty."""
        gen = opened.gen
        gen.state, gen.dirty, gen.error, gen.crc64 = GenState.OPEN, None, None, None
        gen.synced = 0
        self._outdate(gen.gen)  # first: if it counts for nothing too early, it is only made again
        self._meta.generations.save(gen)
        reach(Point.REOPEN_AFTER_SAVE)
        opened.dirty, opened.writing = None, True

    async def _take_over(self, opened: OpenInode) -> None:
        old, device = opened.gen, opened.device
        if not old.synced and device.survives > Level.PROCESS:
            await device.apart.run(os.fsync, opened.fd)
            await device.apart.run(device.sync_dir, old.file)
            reach(Point.TAKE_OVER_AFTER_FSYNC)
        await self._set_time(opened)
        if self._has_changed(old):
            return
        dirty = self._nothing_yet(opened)
        with self._meta.transaction(Change.TAKE_OVER):
            gen = self._contents.add_generation(
                opened.ino, opened.device, old.file, opened.lane, size=old.size,
                dirty=dirty, base=old.gen, anchored=device.survives > Level.PROCESS,
            )  # fmt: skip
            self._meta.inodes.set_gen(opened.ino, gen.gen)
            self._contents.drop_copy(old.gen)
            self._meta.generations.remove(old.gen)
        self._begun(opened, gen, dirty)
        await self._sync_meta()
        reach(Point.TAKE_OVER_AFTER_SYNC)

    async def _copy_for_writer(self, opened: OpenInode) -> None:
        old, device = opened.gen, opened.device
        file = self._contents.new_file_number()
        mtime_ns = opened.mtime_ns
        fd = await device.apart.run(self._cloned, device, old.file, file, mtime_ns)
        reach(Point.COPY_FOR_WRITER_AFTER_CLONE)
        dirty = ExtentSet()
        with self._meta.transaction(Change.COPY_FOR_WRITER):
            gen = self._contents.add_generation(
                opened.ino, device, file, opened.lane, size=old.size, dirty=dirty, base=old.gen,
                anchored=device.survives > Level.PROCESS,
            )  # fmt: skip
            self._meta.inodes.set_gen(opened.ino, gen.gen)
            self._contents.unreferenced(old.gen)
        opened.switch(fd)
        reach(Point.COPY_FOR_WRITER_AFTER_SWITCH)
        self._begun(opened, gen, dirty)
        opened.accounted = 0
        self._contents.account(opened)

    def _has_changed(self, gen: GenerationRow) -> bool:
        """Whether something happened to a generation while something was waited for."""
        return self._meta.generations.get(gen.gen) != gen or bool(self._queue.of_gen(gen.gen))

    def _nothing_yet(self, opened: OpenInode) -> ExtentSet | None:
        """What is dirty before the first write; in passthrough nobody will ever know."""
        return None if opened.lane is Lane.PASSTHROUGH else ExtentSet()

    async def _copy_for_upload(self, opened: OpenInode) -> None:
        """The kernel writes to the file itself, so the sealed generation moves to a copy.

        Its upload reads the file: it is stopped first, and kept from starting again meanwhile.
        """
        old, device = opened.gen, opened.device
        file = self._contents.new_file_number()
        effects = self._queue.of_gen(old.gen)
        for effect in effects:
            if effect.state == PENDING:
                self._queue.set_state(effect, BLOCKED, "being copied before it is rewritten")
        reach(Point.COPY_FOR_UPLOAD_AFTER_BLOCK)
        try:
            await self._stop(effects)
            reach(Point.COPY_FOR_UPLOAD_AFTER_STOP)
            kept_bytes = await device.apart.run(self._clone_synced, device, old.file, file)
            reach(Point.COPY_FOR_UPLOAD_AFTER_CLONE)
            await self._set_time(opened)
            await self._stop(effects)  # One that was stalled may have been tried again meanwhile.
        except BaseException:
            self._unblock(effects)
            raise
        with self._meta.transaction(Change.COPY_FOR_UPLOAD):
            kept = self._meta.generations.get(old.gen)
            if kept is not None:
                kept.file = file
                self._meta.generations.save(kept)
            gen = self._contents.add_generation(
                opened.ino, device, old.file, opened.lane, size=old.size, base=old.gen,
                anchored=kept is not None and bool(kept.anchored),
            )  # fmt: skip
            self._meta.inodes.set_gen(opened.ino, gen.gen)
            self._unblock(effects)
            self._contents.unreferenced(old.gen)
        self._begun(opened, gen, None)
        self._contents.on_account(device, kept_bytes)
        await self._sync_meta()
        reach(Point.COPY_FOR_UPLOAD_AFTER_SYNC)

    def _clone_synced(self, device: CacheDevice, source: int, target: int) -> int:
        """Returns the bytes that the copy takes."""
        device.clone(source, target)
        if device.survives > Level.PROCESS:
            fd = device.open(target, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            reach(Point.CLONE_AFTER_FSYNC)
            device.sync_dir(target)
        return device.allocated(target)

    def _cloned(self, device: CacheDevice, source: int, target: int, mtime_ns: int) -> int:
        """Returns a descriptor of the copy, which bears the time of writing."""
        self._clone_synced(device, source, target)
        try:
            fd = device.open(target, os.O_RDWR)
        except OSError:
            device.remove(target)
            raise
        clock.begin(fd, mtime_ns)
        return fd

    async def _stop(self, effects: Sequence[EffectRow]) -> None:
        """Return when the flusher works on none of them."""
        while busy := [each.id for each in effects if self._queue.is_busy(each.id)]:
            for effect in busy:
                await self._queue.stop(effect)

    def _unblock(self, effects: Sequence[EffectRow]) -> None:
        for effect in effects:
            if effect.state == BLOCKED:
                self._queue.set_state(effect, PENDING, None)

    def _is_shown(self, gen: int) -> bool:
        row = self._meta.generations.get(gen)
        return row is None or (row.state == GenState.DURABLE and not self._queue.of_gen(gen))

    def _outdate(self, gen: int) -> None:
        """Whatever had a generation's bytes until now, under one name or as a copy, has none of
        those that it will be sealed with."""
        self._meta.objects.outdate(gen)
        self._meta.uploads.disown_all(gen)
        self._meta.warm.outdate(gen)

    async def _merge(self, opened: OpenInode) -> None:
        """Give up the pending upload: its effects wait, blocked, for the next seal. One that could
        not be stopped any more has made the generation durable, and what was in the store only is
        the object's by now: then nothing is done."""
        gen = opened.gen
        await self._set_time(opened)
        await self._stop(self._queue.of_gen(gen.gen))
        reach(Point.MERGE_AFTER_STOP)
        if opened.gen is not gen or self._is_shown(gen.gen):  # Meanwhile; to be looked at anew.
            return
        with self._meta.transaction(Change.MERGE):
            for effect in self._queue.of_gen(gen.gen):
                self._queue.set_state(effect, BLOCKED, "being rewritten")
            gen.state, gen.dirty, gen.sealed_ns, gen.crc64 = GenState.OPEN, None, None, None
            gen.synced = 0
            self._meta.generations.save(gen)
            self._outdate(gen.gen)
        self._begun(opened, gen, None)
        await self._sync_meta()
        reach(Point.MERGE_AFTER_SYNC)


async def _never(opened: OpenInode) -> bool:
    """Every file fits."""
    return False
