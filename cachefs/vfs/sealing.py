"""Sealing: the last writer is gone, what it wrote is complete, and is to be published."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachefs.cache.device import CacheDevice
from cachefs.failpoints import Change
from cachefs.flush.queue import BLOCKED, PENDING, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow, ObjectRow
from cachefs.model.extents import ExtentSet
from cachefs.model.states import GenState
from cachefs.vfs.endings import Endings
from cachefs.vfs.opened import OnDisk, OpenInode


class Sealed(NamedTuple):
    """A generation that is complete."""

    gen: int
    ino: int
    size: int
    """In bytes."""
    parent: int | None = None
    """Directory that it is in, if that is at hand."""


class Sealing(Endings):
    """Seals generations."""

    def __init__(self, meta: Meta, queue: EffectQueue, devices: Sequence[CacheDevice]) -> None:
        super().__init__(meta, queue, devices)
        self.on_sealed: Callable[[Sealed], None] = lambda sealed: None
        """Called with each generation that was sealed."""

    def account(self, opened: OpenInode) -> None:
        """Tell the ledger what the cache file takes now."""
        raise NotImplementedError

    def seal(self, opened: OpenInode) -> None:
        """The last writer is gone: the generation is complete and its publishing is due."""
        status = os.fstat(opened.fd)
        gen = opened.gen
        opened.take(status)
        if self._is_unchanged(opened, gen):
            self._seal_unchanged(opened, gen)
            return
        path = None
        with self._meta.transaction(Change.SEAL):
            gen.state, gen.size, gen.sealed_ns = GenState.SEALED, status.st_size, time.time_ns()
            gen.dirty = opened.dirty.pack() if opened.dirty is not None else None
            if opened.snapshot is not None:
                gen.base, gen.dirty = opened.snapshot, since_snapshot(opened).pack()
            gen.used_ns = gen.sealed_ns
            unchanged = OnDisk(gen.gen, status.st_size, status.st_mtime_ns)
            gen.synced = int(opened.on_disk == unchanged)
            self._meta.generations.seal(gen)
            if self._meta.inodes.set_content(
                opened.ino, status.st_size, opened.blocks, opened.mtime_ns
            ):
                path = self.publish(opened.ino, gen)
        opened.writing = False
        opened.device.written(gen.file)
        if path is not None:
            opened.device.mark_path(gen.file, path)
        self.account(opened)
        self.on_sealed(Sealed(gen.gen, opened.ino, gen.size))

    def _is_unchanged(self, opened: OpenInode, gen: GenerationRow) -> bool:
        """Opened for writing, never written to, and the object holds all of it. Its times may have
        changed (ftruncate to the size it had)."""
        if opened.dirty is None or len(opened.dirty) or opened.size != gen.size:
            return False
        return self._object_of_base(gen) is not None

    def _object_of_base(self, gen: GenerationRow) -> ObjectRow | None:
        if gen.base is None:
            return None
        return next(iter(self._meta.objects.holding(gen.ino, gen.base)), None)

    def _seal_unchanged(self, opened: OpenInode, gen: GenerationRow) -> None:
        row = self._object_of_base(gen)
        assert row is not None
        with self._meta.transaction(Change.SEAL_UNCHANGED):
            gen.state, gen.sealed_ns = GenState.DURABLE, time.time_ns()
            self._meta.spans.release(gen, self.on_assembled)
            self._meta.generations.save(gen)
            row.gen = gen.gen
            self._meta.objects.put(row)
            blocks = os.fstat(opened.fd).st_blocks
            self._meta.inodes.set_content(opened.ino, opened.size, blocks, opened.mtime_ns)
            self._publish_attributes(opened.ino, gen)
        opened.writing = False
        opened.device.written(gen.file)

    def _publish_attributes(self, ino: int, gen: GenerationRow) -> None:
        """Attributes and names that changed while the file was open were to go out with its
        content, and there is none."""
        inode = self._meta.inodes.get(ino)
        # By the same clock (`vfs.clock`): a change within its tick may bear the same time.
        if inode is not None and inode.ctime_ns >= gen.created_ns:
            for dentry in self._meta.dentries.of_inode(ino):
                self._queue.publish(dentry, None, inode.size)

    def publish(self, ino: int, gen: GenerationRow) -> bytes | None:
        """Queue the generation under every name of its inode; returns the path of one. Inside a
        transaction."""
        path = None
        for dentry in self._meta.dentries.of_inode(ino):
            self._queue.publish(dentry, gen.gen, gen.size)
            path = path or self._meta.dentries.path(dentry.parent, dentry.name)
        for effect in self._queue.of_gen(gen.gen):
            if effect.state == BLOCKED:  # Somebody waits for the version that was given up.
                self._queue.set_state(effect, PENDING, None)
        return path


def since_snapshot(opened: OpenInode) -> ExtentSet:
    """What changed in an open file since its last snapshot."""
    changed = ExtentSet()
    start = min(opened.unsent, opened.snapshot_size)
    if start < opened.size:
        changed.add(start, opened.size)
    return changed
