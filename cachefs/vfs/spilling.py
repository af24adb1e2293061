"""From RAM to a device that outlives it: what a cache device in RAM takes in does not stay there.

- Closed files are spilled in the background, in the order in which they were closed, each by a
  copy and one transaction that makes the copy the generation's cache file. What the store has
  already is spilled too when RAM is short and the other device has room, or left to eviction.
- fsync promises that bytes survive a power cut, and RAM cannot keep that: so it returns when a
  copy is on the disk. That is the generation's second cache file until it is spilled; a later fsync
  writes only what has changed since.
- A writer in the tracked lane for whom RAM has no room goes on on the other device: the file moves
  while it is open. In passthrough the kernel has the file: it stays until it is closed.
- A writer in the tracked lane who has filled a disk goes on on another one where there is room for
  twice as much, if nothing of the file is in the store yet: the file moves in the same way.
- RAM that is lost while the mount goes on (emptied, unmounted) takes nothing with it that somebody
  has open: the descriptor has it still. What is written in the tracked lane moves at once, what is
  in passthrough when it is closed, which counts as done only then (`must_flee`).

The copy has its row before it has its bytes, so a kill leaves nothing that nobody knows. It counts
(`copy_size`) once it is on the disk. If RAM is lost, recovery takes it for the cache file; a file
that was written to since its last fsync is held then, like anything that a power cut may have torn.

Concurrency: the trio thread; copies are made in others. A generation has one copier at a time
(`_locks`), and after each copy all is looked at anew: only what is still closed, and the same, is
spilled. The file in RAM goes when no upload reads it any more.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence

import structlog
import trio

from cachefs.cache.bring import bring
from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.cache.lease import LeaseUnsupported
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.placement import Placement
from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.vfs.admission import Admission
from cachefs.vfs.contents import Contents
from cachefs.vfs.opened import Lane, OpenInode, OpenTable

log = structlog.get_logger("cachefs.vfs")

_INTERVAL = 1.0
"""Seconds between looks when nothing happens."""
_PAUSE = 0.05
"""Seconds between two looks at least."""
_DURABLE_AT_A_TIME = 64


class Spiller:
    """Moves cache files out of RAM. `active` is False where there is no RAM, or nothing else."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        table: OpenTable,
        contents: Contents,
        placement: Placement,
        ledgers: Sequence[SpaceLedger],
        admission: Admission,
        *,
        sync_meta: Callable[[], Awaitable[None]],
        lasting: bool,
    ) -> None:
        """`sync_meta` makes all commits so far survive a power cut; `lasting`: they can."""
        self._meta = meta
        self._queue = queue
        self._table = table
        self._contents = contents
        self._placement = placement
        self._ledgers = ledgers
        self._admission = admission
        self._sync_meta = sync_meta
        self._locks: defaultdict[int, trio.Lock] = defaultdict(trio.Lock)
        self._leaving: list[tuple[CacheDevice, GenerationRow]] = []
        self.volatile: frozenset[int] = frozenset()
        """Numbers of the devices whose bytes do not stay."""
        self.problem: str | None = None
        """Why nothing is spilled at the moment; None when it is."""
        self.before_move: Callable[[OpenInode], None] = lambda opened: None
        """Called before an open file moves: every write to it is to be asked for from now on."""
        self.after_move: Callable[[OpenInode], None] = lambda opened: None
        """Called when an open file has moved."""
        self.hold: Callable[[int, bool], None] = lambda ino, on: None
        """Keeps the tap from changing the cache file of an open file by itself."""
        self.held_up: Callable[[int], int] = lambda ino: 0
        """Writes to a file that the tap had begun by itself before, and that a thread is at."""
        self.on_spilled: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes of each file that was moved."""
        if lasting:
            self.volatile = frozenset(each.index for each in contents.devices if each.forgets)

    @property
    def active(self) -> bool:
        """Whether there is anything to do here."""
        return bool(self.volatile)

    @property
    def level(self) -> Level:
        """What bytes survive once they are spilled; NONE: nothing is."""
        levels = [
            each.survives for each in self._contents.devices if each.healthy and not each.forgets
        ]
        return min(levels, default=Level.NONE) if self.active else Level.NONE

    # -- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Spill what is closed until cancelled."""
        if not self.active:
            await trio.sleep_forever()
        while True:
            event = self._queue.next_change()
            await self.flee()
            await self.round()
            await trio.sleep(_PAUSE)
            with trio.move_on_after(_INTERVAL):
                await event.wait()

    async def round(self) -> int:
        """Spill what may be spilled; how many files are safer than before. sqlite3.Error."""
        self._sweep()
        due, get = list(self._due()), self._meta.generations.get
        secured = [get(row.gen) for row in due if await self._spill(row.gen)]
        if secured:
            await self._note(secured)
        self._sweep()
        return len(secured)

    def _due(self) -> Iterator[GenerationRow]:
        """What the store lacks, oldest first; then, while RAM is short, what it has."""
        present = [i for i in self.volatile if self._contents.devices[i].healthy]
        closed = [row for i in present for row in self._meta.generations.closed_on(i)]
        yield from sorted(closed, key=lambda row: row.sealed_ns or 0)
        for index in present:
            ledger = self._ledgers[index]
            excess = ledger.used - ledger.watermarks.low_bytes
            rows = self._meta.generations.durable(index, _DURABLE_AT_A_TIME) if excess > 0 else []
            for row in rows:
                if excess > 0 and row.present is None and self._has_spare_room(row.size):
                    excess -= row.size
                    yield row

    def _has_spare_room(self, nbytes: int) -> bool:
        """Whether it need not push out anything else."""
        ledger = self._placement.choose(nbytes, outlives=Level.PROCESS)
        return ledger is not None and nbytes <= ledger.headroom() and not ledger.above_high

    async def _spill(self, gen: int) -> bool:
        """Copy a closed file, and let it go from RAM if nobody has it open; False: all is as it
        was."""
        row = self._meta.generations.get(gen)
        if row is None or not self._may_copy(row):
            return False
        if not (row.synced and row.copy_size is not None):
            try:
                await self._copy(row, patient=False)
            except OSError as error:
                self._fail(f"{error.strerror or error}")
                return False
            self._fail(None)
        now = self._meta.generations.get(gen)
        if now is None or now.copy_size is None or now.sealed_ns != row.sealed_ns:
            return False
        if not self._may_copy(now):
            return False
        if not self._is_open(now):
            self._switch(now)
        return not row.synced

    def _may_copy(self, row: GenerationRow) -> bool:
        """Whether it is closed, on its device, and nobody will write to it."""
        if row.device not in self.volatile or row.state == GenState.OPEN or row.grows:
            return False
        device = self._contents.device(row)
        if not device.exists(row.file):
            return False
        try:
            return row.state != GenState.HELD or not device.writer_open(row.file)
        except (LeaseUnsupported, OSError):
            return False

    def _is_open(self, row: GenerationRow) -> bool:
        opened = self._table.inodes.get(row.ino)
        return opened is not None and (opened.gen.gen == row.gen or opened.gen.file == row.file)

    def _fail(self, reason: str | None) -> None:
        if reason is not None and self.problem is None:
            log.warning("files stay in RAM", reason=reason)
            self._queue.kick()  # Whoever waits for them has to wait for the store.
        self.problem = reason

    def _switch(self, row: GenerationRow) -> None:
        """The copy is the cache file from now on."""
        source = self._contents.device(row)
        with self._meta.transaction(Change.SPILL):
            self._meta.generations.move_to_copy(row.gen)
        self._leaving.append((source, row))
        self.on_spilled(row.size)

    async def _note(self, rows: Sequence[GenerationRow | None]) -> None:
        """What was spilled survives more than before, once the database says so on the disk."""
        await self._sync_meta()
        with self._meta.transaction(Change.SPILLED):
            for row in filter(None, rows):
                self._meta.generations.set_synced(row.gen, row.sealed_ns)
        self._queue.kick()
        await self._sync_meta()
        reach(Point.SPILL_AFTER_SYNC)

    def _sweep(self) -> None:
        """Remove from RAM what was spilled, unless an upload reads it still."""
        leaving, self._leaving = self._leaving, []
        for device, row in leaving:
            if self._is_read(row):
                self._leaving.append((device, row))
            else:
                self._contents.leave(device, row.file)

    def _is_read(self, row: GenerationRow) -> bool:
        names = self._meta.dentries.of_inode(row.ino)
        effects = [each for name in names for each in self._queue.of_dentry(name.id)]
        effects += self._queue.of_gen(row.gen)
        return any(self._queue.is_busy(each.id) for each in effects)

    # -- fsync --------------------------------------------------------------------------------

    async def shelter(self, opened: OpenInode) -> None:
        """Return when what an open file holds survives a power cut, but for the database. OSError:
        it does not."""
        if opened.device.index not in self.volatile:
            return
        row = self._meta.generations.get(opened.gen.gen)
        if row is not None and not await self._copy(row, patient=True):
            raise OSError(errno.EIO, "there is no device that outlives a power cut")

    # -- writers that RAM has no room for ---------------------------------------------------------

    async def move_open(self, opened: OpenInode) -> bool:
        """Move a file that is written in the tracked lane; False if it stays where it is."""
        if opened.device.index not in self.volatile or opened.lane is not Lane.TRACKED:
            return False
        async with opened.lock:
            if opened.device.index not in self.volatile or not opened.writing:
                return opened.device.index not in self.volatile
            return await self._move(opened)

    def roomier(self, opened: OpenInode) -> CacheDevice | None:
        """Another disk on which a file in the tracked lane could grow to twice its size; None:
        there is none, or it has to stay where it is."""
        if opened.lane is not Lane.TRACKED or opened.stream is not None or not opened.writing:
            return None
        needed = 2 * os.fstat(opened.fd).st_blocks * BLOCK_UNIT
        others = [
            each
            for each in self._ledgers
            if each.device.healthy and not each.device.forgets and not each.above_high
        ]
        best = max(others, key=SpaceLedger.headroom, default=None)
        fits = best is not None and best.device is not opened.device and best.headroom() >= needed
        return best.device if best is not None and fits else None

    async def move_on(self, opened: OpenInode) -> bool:
        """Move a file from a disk that is full of it; False if it stays where it is."""
        async with opened.lock:
            target = self.roomier(opened) if self._table.is_written(opened) else None
            return target is not None and await self._move(opened, target)

    async def _move(self, opened: OpenInode, target: CacheDevice | None = None) -> bool:
        self.before_move(opened)
        self.hold(opened.ino, True)
        opened.moving = trio.Event()
        try:
            while opened.writes or self.held_up(opened.ino):  # noqa: ASYNC110
                await trio.sleep(0.001)
            row = self._meta.generations.get(opened.gen.gen)
            if row is None or not await self._copy(row, patient=True, target=target):
                return False
            fd = await self._open_copy(row.gen)
            return fd is not None and self._switch_open(opened, fd)
        except (OSError, sqlite3.Error) as error:
            log.info("an open file stays where it is", inode=opened.ino, reason=str(error))
            return False
        finally:
            self.hold(opened.ino, False)
            opened.moving.set()
            opened.moving = None

    async def _open_copy(self, gen: int) -> int | None:
        row = self._meta.generations.get(gen)
        if row is None or row.copy_device is None or row.copy_file is None:
            return None
        copy = self._contents.devices[row.copy_device]
        return await copy.apart.run(copy.open, row.copy_file, os.O_RDWR)

    def _switch_open(self, opened: OpenInode, fd: int) -> bool:
        """The copy, open as `fd`, is the cache file of an open file from now on; not if that was
        closed meanwhile."""
        row = self._meta.generations.get(opened.gen.gen)
        closed = not self._table.is_written(opened)
        if closed or row is None or row.copy_device is None or row.copy_file is None:
            os.close(fd)
            self._give_up(opened.gen.gen)
            return False
        source, device = opened.device, self._contents.devices[row.copy_device]
        try:
            with self._meta.transaction(Change.MOVE_OPEN):
                snapshots = self._meta.generations.of_inode(opened.ino)
                self._meta.generations.move_to_copy(row.gen)
                for each in snapshots:
                    if each.grows and (each.device, each.file) == (row.device, row.file):
                        each.device, each.file = row.copy_device, row.copy_file
                        self._meta.generations.save(each)
        except BaseException:
            device.let_go(fd)
            raise
        opened.switch(fd)
        reach(Point.MOVE_OPEN_AFTER_SWITCH)
        opened.gen.device, opened.gen.file = row.copy_device, row.copy_file
        opened.device, opened.on_disk = device, None
        opened.accounted = os.fstat(opened.fd).st_blocks * BLOCK_UNIT
        self.after_move(opened)
        if source.forgets:
            self._leaving.append((source, row))
            self._sweep()
        else:  # Not before it is certain that nobody will look for it there.
            self._contents.leave(source, row.file)
        return True

    # -- when RAM is lost -----------------------------------------------------------------------

    def must_flee(self, opened: OpenInode) -> bool:
        """Whether what a file holds is lost if its descriptor is closed now."""
        lost = opened.device.index in self.volatile and not opened.device.healthy
        return lost and self._placement.choose(0, outlives=Level.PROCESS) is not None

    async def flee(self) -> None:
        """Save what open files hold whose device is lost. sqlite3.Error."""
        for opened in [each for each in self._table.inodes.values() if self.must_flee(each)]:
            try:
                await self._flee(opened)
            except OSError as error:
                log.warning("not saved from RAM", inode=opened.ino, reason=str(error))

    async def _flee(self, opened: OpenInode) -> None:
        if opened.writing and opened.lane is Lane.TRACKED:
            await self.move_open(opened)
        elif opened.writing and self._is_abandoned(opened):
            await self._move_closed(opened)
        elif not opened.writing:
            row = self._meta.generations.get(opened.gen.gen)
            unsafe = row is not None and row.state != GenState.DURABLE and not row.synced
            if row is not None and unsafe and await self._copy(row, patient=False):
                await self._note([row])

    def _is_abandoned(self, opened: OpenInode) -> bool:
        """Whether all who had it open have closed it, and it is still to be sealed."""
        return not self._table.handles_of(opened) and opened.ino not in self._table.lingering

    async def _move_closed(self, opened: OpenInode) -> None:
        async with opened.lock:
            before = os.fstat(opened.fd)
            row = self._meta.generations.get(opened.gen.gen)
            if row is None or not await self._copy(row, patient=False):
                return
            fd = await self._open_copy(row.gen)
            now = os.fstat(opened.fd)
            same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
            if fd is None:
                return
            if same and self._is_abandoned(opened):  # Nobody has opened and written it meanwhile.
                self._switch_open(opened, fd)
            else:
                os.close(fd)

    # -- copies -------------------------------------------------------------------------------

    async def _copy(
        self, row: GenerationRow, *, patient: bool, target: CacheDevice | None = None
    ) -> bool:
        """Bring a second cache file of a generation, on `target` or where there is room, up to date
        and to the disk; False if the generation went meanwhile, or there is nowhere to put it.
        OSError; ENOSPC when there is no room (`patient`: as for any writer, it is waited for)."""
        async with self._locks[row.gen]:
            try:
                return await self._copy_locked(row.gen, target, patient=patient)
            finally:
                if not self._locks[row.gen].statistics().tasks_waiting:
                    del self._locks[row.gen]

    async def _copy_locked(self, gen: int, target: CacheDevice | None, *, patient: bool) -> bool:
        row = self._meta.generations.get(gen)
        if row is None or (target is None and row.device not in self.volatile):
            return row is not None
        reader = self._source(row)
        try:
            return await self._copy_from(reader, row, target, patient=patient)
        finally:
            os.close(reader)

    def _source(self, row: GenerationRow) -> int:
        """A descriptor of the cache file. That of one that is gone with its device is the one under
        which somebody has it open."""
        opened = self._table.inodes.get(row.ino)
        if opened is not None and opened.gen.gen == row.gen and not opened.device.healthy:
            return os.dup(opened.fd)
        return self._contents.device(row).open(row.file)

    async def _copy_from(
        self, reader: int, row: GenerationRow, target: CacheDevice | None, *, patient: bool
    ) -> bool:
        gen, needed = row.gen, os.fstat(reader).st_blocks * BLOCK_UNIT
        device = target or self._target(row, needed)
        if device is None:
            return False
        ledger, before = self._ledgers[device.index], 0
        if row.copy_file is not None:
            before = await device.apart.run(device.allocated, row.copy_file)
        wanted = max(0, needed - before)
        await self._admit(ledger, wanted, row.ino, patient=patient)
        try:
            begun = await self._begin(gen, device)
            if begun is None or begun.copy_file is None:
                return False
            size, takes = await device.apart.run(bring, reader, device, begun.copy_file)
            self._contents.on_account(device, takes - before)
            return self._finish(begun, size)
        except OSError:
            self._give_up(gen)
            raise
        finally:
            ledger.settle(wanted, 0)

    def _target(self, row: GenerationRow, needed: int) -> CacheDevice | None:
        if row.copy_device is not None and self._contents.devices[row.copy_device].healthy:
            return self._contents.devices[row.copy_device]
        ledger = self._placement.choose(needed, outlives=Level.PROCESS)
        return ledger.device if ledger is not None else None

    async def _admit(self, ledger: SpaceLedger, nbytes: int, ino: int, *, patient: bool) -> None:
        if ledger.try_admit(nbytes):
            return
        if patient:
            await self._admission.make_room(ledger, nbytes, ino)
        elif not await ledger.admit_after_eviction(nbytes):
            raise OSError(errno.ENOSPC, f"{ledger.device.directory} has no room for them")

    async def _begin(self, gen: int, device: CacheDevice) -> GenerationRow | None:
        """Give a generation a copy, empty, unless it has one there."""
        row = self._meta.generations.get(gen)
        if row is None or row.copy_device == device.index:
            return row
        fresh = await self._contents.fresh.take(device)
        device.let_go(fresh.fd)
        if self._meta.generations.get(gen) is None:
            self._contents.leave(device, fresh.file)
            return None
        try:
            with self._meta.transaction(Change.BEGIN_COPY):
                self._contents.drop_copy(gen)
                self._meta.generations.set_copy(gen, device.index, fresh.file, None)
        except BaseException:
            self._contents.leave(device, fresh.file)
            raise
        return self._meta.generations.get(gen)

    def _finish(self, made: GenerationRow, size: int) -> bool:
        """The copy counts, if it still is one of that generation."""
        row = self._meta.generations.get(made.gen)
        if row is None or (row.copy_device, row.copy_file) != (made.copy_device, made.copy_file):
            return False
        assert row.copy_device is not None
        assert row.copy_file is not None
        with self._meta.transaction(Change.COPIED):
            self._meta.generations.set_copy(row.gen, row.copy_device, row.copy_file, size)
        return True

    def _give_up(self, gen: int) -> None:
        """A copy that was never whole is of no use; one of what is in RAM that was still has what
        was synced."""
        row = self._meta.generations.get(gen)
        if row is not None and (row.copy_size is None or row.device not in self.volatile):
            with self._meta.transaction(Change.DROP_COPY):
                self._contents.drop_copy(gen)
