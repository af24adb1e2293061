"""The end of generations and of their cache files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachefs.cache.device import CacheDevice
from cachefs.failpoints import Change
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.extents import ExtentSet
from cachefs.model.states import GenState

_WAITING = (GenState.SEALED, GenState.STALLED, GenState.CONFLICTED)
"""States of a generation that is to be shown."""


class Endings:
    """Drops generations that nobody needs."""

    def __init__(self, meta: Meta, queue: EffectQueue, devices: Sequence[CacheDevice]) -> None:
        self._meta = meta
        self._queue = queue
        self.devices = list(devices)
        self.on_account: Callable[[CacheDevice, int], None] = lambda device, delta: None
        """Called with the change in bytes that a device holds."""
        self.leave: Callable[[CacheDevice, int], None] = self.remove
        """Called with each cache file that a commit gave up: it is to be removed in time."""
        self.on_assembled: Callable[[int], None] = lambda gen: None
        """Called with each generation whose hidden objects are of no use any more."""
        queue.on_unreferenced = self.unreferenced

    def device(self, row: GenerationRow) -> CacheDevice:
        """The device that holds a generation's cache file."""
        return self.devices[row.device]

    def unreferenced(self, gen: int) -> None:
        """No effect, or no inode, needs the generation any more; drop it if that holds for both."""
        row = self._meta.generations.get(gen)
        if row is None:
            return
        inode = self._meta.inodes.get(row.ino)
        if self._queue.of_gen(gen):
            return
        if inode is None or inode.gen != gen:
            self.drop(row)
        elif row.state in _WAITING and self._meta.objects.holding(row.ino, row.gen):
            # A name that was still to be shown is gone; another one shows it.
            row.state, row.error = GenState.DURABLE, None
            self._meta.spans.release(row, self.on_assembled)
            self._meta.generations.save(row)

    def drop(self, row: GenerationRow) -> None:
        """Remove a generation and, once that is committed, its cache file."""
        device = self.device(row)
        self._rebase(row)
        self.drop_copy(row.gen)
        self._meta.generations.remove(row.gen)
        if row.grows:
            return  # The cache file is another generation's.

        self._meta.db.after_commit(lambda: self.leave(device, row.file))

    def drop_copy(self, gen: int) -> None:
        """Give up the second cache file of a generation, if it has one. Inside a transaction."""
        row = self._meta.generations.get(gen)
        if row is None or row.copy_device is None or row.copy_file is None:
            return
        device, file = self.devices[row.copy_device], row.copy_file
        self._meta.generations.forget_copy(gen)
        self._meta.db.after_commit(lambda: self.leave(device, file))

    def remove(self, device: CacheDevice, file: int) -> None:
        """Remove a cache file. Waits for the disk."""
        self.on_account(device, -_remove_files(device, [file]))

    async def remove_all(self, device: CacheDevice, files: Sequence[int]) -> None:
        """Remove cache files; they count until they are gone. OSError."""
        self.on_account(device, -await device.apart.run(_remove_files, device, files))

    def _rebase(self, gone: GenerationRow) -> None:
        """What was to be copied from a generation that never got into the store is copied from that
        one's own base instead, but for what either changed."""
        if (
            gone.dirty is None
            or gone.base is None
            or self._meta.objects.holding(gone.ino, gone.gen)
        ):
            return
        for gen in self._meta.generations.of_inode(gone.ino):
            if gen.base != gone.gen or gen.dirty is None or gen.state == GenState.OPEN:
                continue
            changed = ExtentSet.unpack(gen.dirty).union(ExtentSet.unpack(gone.dirty))
            if gone.size < gen.size:
                changed.add(gone.size, gen.size)
            changed.clip(gen.size)
            gen.base, gen.dirty = gone.base, changed.pack()
            self._meta.generations.save(gen)

    def forget_inode(self, ino: int) -> None:
        """The inode has neither name nor handle: remove it and all that was its own."""
        with self._meta.transaction(Change.FORGET_INODE):
            for row in self._meta.generations.of_inode(ino):
                if not self._queue.of_gen(row.gen):
                    self.drop(row)
            self._meta.inodes.remove(ino)


def _remove_files(device: CacheDevice, files: Sequence[int]) -> int:
    """Remove cache files; returns the bytes that they took. Waits for the disk. OSError."""
    freed = 0
    for file in files:
        freed += device.allocated(file)
        device.remove(file)
    return freed
