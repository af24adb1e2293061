"""Small files that the tap makes by itself, as far as it is not the tap's business.

Here are the spare files that it takes them from, and the fold: the journal's records become rows,
all in one transaction, just as if each request had been handled when it came. Whoever acts on the
namespace folds first (`fuse.smallfiles`), so nobody sees a state without them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import trio

from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.cache.fresh import write_time
from cachefs.cache.journal import CREATED, Journal, Record
from cachefs.cache.ledger import SpaceLedger
from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import EffectQueue, NewFile
from cachefs.meta import Meta
from cachefs.meta.applied import current_request
from cachefs.meta.rows import GenerationRow, InodeRow
from cachefs.model.states import GenState
from cachefs.vfs.contents import Contents
from cachefs.vfs.files import Files
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.opened import Handle, Lane, OpenInode
from cachefs.vfs.sealing import Sealed

_FOLDED = "journal"
_PROMISE = 64 << 10
"""Bytes that each spare file may grow by without asking."""
_SHARE = 16
"""All of them together may take one part in so many of a device's limit."""


@dataclass(frozen=True, slots=True)
class Spare:
    """Numbers and an empty cache file for a file that is to come."""

    ino: int
    gen: int
    file: int
    fh: int
    fd: int
    device: CacheDevice


@dataclass(slots=True)
class Made:
    """A file of the journal. Size and the like are stated once it is closed."""

    record: Record
    mtime_ns: int
    open: bool = True
    size: int = 0
    blocks: int = 0

    def close(self, status: os.stat_result | None) -> None:
        """As its cache file is; None: that is gone."""
        self.open = False
        if status is not None:
            self.size, self.blocks = status.st_size, status.st_blocks
            self.mtime_ns = write_time(status, self.mtime_ns)


class SmallFiles:
    """Spare files, and what became of them."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        contents: Contents,
        files: Files,
        ledgers: Sequence[SpaceLedger],
        lanes: LaneKeeper,
        announce: Callable[[Handle], bool],
        journal: Journal,
    ) -> None:
        """`announce`: see `Operations`; told of handles that are still open at the fold."""
        self._meta = meta
        self._queue = queue
        self._contents = contents
        self._files = files
        self._ledgers = ledgers
        self._lanes = lanes
        self._announce = announce
        self.journal = journal
        self.spares: dict[int, Spare] = {}
        """By handle: those that are ready, and those that the journal has used."""
        self._done: list[int] = []

    @property
    def folded(self) -> int:
        """Number of the last record that is in the database."""
        return int(self._meta.setting(_FOLDED) or 0)

    @property
    def quick(self) -> bool:
        """Whether the devices answer quickly: nobody is to wait for them here."""
        return all(each.direct_ok for each in self._contents.devices if each.healthy)

    # -- spare files --------------------------------------------------------------------------

    async def make(self, count: int) -> list[Spare]:
        """So many more, as far as there is room and the device is quick. OSError, sqlite3.Error:
        none that anybody knows of."""
        device = self._contents.place()
        ledger = self._ledgers[device.index]
        count = min(count, ledger.limit // _SHARE // _PROMISE - len(self.spares))
        made: list[Spare] = []
        if count <= 0 or not device.direct_ok or not ledger.try_admit(count * _PROMISE):
            return made
        try:
            numbers = [self._numbers() for _ in range(count)]
            files = [file for _, _, file, _ in numbers]
            fds = await device.apart.run(_create, device, files)
            reach(Point.SPARE_AFTER_CREATE)
            made += [Spare(*each, fd, device) for each, fd in zip(numbers, fds, strict=True)]
        finally:
            ledger.settle((count - len(made)) * _PROMISE, 0)
            self.spares.update((spare.fh, spare) for spare in made)
        return made

    def _numbers(self) -> tuple[int, int, int, int]:
        ino, gen = self._meta.inodes.new_number(), self._meta.generations.new_number()
        return ino, gen, self._contents.new_file_number(), self._files.table.number()

    def give_up(self) -> list[Spare]:
        """All that are left, to be removed: they are spare files no longer. Only after a fold that
        took in all there was."""
        given_up = list(self.spares.values())
        self.spares.clear()
        for spare in given_up:
            self._ledgers[spare.device.index].settle(_PROMISE, 0)
        return given_up

    @staticmethod
    def remove(given_up: Iterable[Spare]) -> None:
        """Waits for the device, which may be the reason why they were given up. OSError."""
        for spare in given_up:
            os.close(spare.fd)
            spare.device.remove(spare.file)

    # -- the fold -----------------------------------------------------------------------------

    def store(self, records: Sequence[Record]) -> list[Made]:
        """Take in what the tap did; to be followed by `settle`. sqlite3.Error: nothing happened."""
        return self._store(records, lambda record: os.fstat(self.spares[record.fh].fd))

    def settle(self, made: Iterable[Made]) -> None:
        """What was stored is like any other file now: closed, or open."""
        promised: Counter[int] = Counter()
        grown: Counter[int] = Counter()
        written = 0
        for each in made:
            spare = self.spares.pop(each.record.fh)
            promised[spare.device.index] += _PROMISE
            if each.open:
                self._hand_over(each, spare)
                continue
            self._close(each, spare)
            grown[spare.device.index] += each.blocks * BLOCK_UNIT
            written += each.size
        for device, nbytes in promised.items():
            self._ledgers[device].settle(nbytes, 0)
            self._contents.on_account(self._contents.devices[device], grown[device])
        self._files.on_written(Lane.TRACKED, written)

    def _close(self, made: Made, spare: Spare) -> None:
        """As the last close does."""
        if spare.device.apart.direct:
            spare.device.let_go(spare.fd)
        else:
            self._done.append(spare.fd)
        spare.device.written(spare.file)
        self._contents.on_sealed(Sealed(spare.gen, spare.ino, made.size, made.record.parent))
        self._lanes.keep(spare.ino)

    async def close_done(self) -> None:
        """Close what was made and its program has closed, where a disk may hold that up."""
        done, self._done = self._done, []
        if done:
            await trio.to_thread.run_sync(_close, done)
            reach(Point.SPARE_AFTER_CLOSE)

    def recover(self) -> int:
        """Take in what a daemon left that was killed; returns how many files.

        The last one may have been made without an answer: its request is known as applied.
        """
        fresh = self.journal.left_after(self.folded)
        created = [record for record in fresh if record.kind == CREATED]
        if created:
            current_request.set(created[-1].unique)
        if fresh:
            self._store(fresh, self._found)
        return len(created)

    def _found(self, record: Record) -> os.stat_result | None:
        try:
            return self._contents.devices[record.device].stat(record.file)
        except (FileNotFoundError, IndexError):
            return None  # recovery tells of it

    def _store(
        self, records: Sequence[Record], stat: Callable[[Record], os.stat_result | None]
    ) -> list[Made]:
        made = {each.fh: Made(each, each.time_ns) for each in records if each.kind == CREATED}
        closed = [made[each.fh] for each in records if each.kind != CREATED and each.fh in made]
        now = time.time_ns()
        with self._meta.transaction(Change.FOLD):
            for each in closed:
                each.close(stat(each.record))
            files = list(made.values())
            names = self._meta.dentries.add_all(
                [(each.record.parent, each.record.name, each.record.ino) for each in files]
            )
            self._meta.inodes.add_all(map(_inode, files))
            self._meta.generations.add_all(_generation(each, now) for each in files)
            self._queue.publish_new(
                [NewFile(names[each.record.ino], each.record.gen, each.size) for each in closed]
            )
            for parent, time_ns in {
                each.record.parent: each.record.time_ns for each in files
            }.items():
                self._meta.inodes.touch_directory(parent, time_ns)
            self._meta.set_setting(_FOLDED, str(records[-1].seq))
        return files

    def _hand_over(self, made: Made, spare: Spare) -> None:
        """It goes on as any open file does."""
        opened = OpenInode(
            spare.ino, _generation(made, made.record.time_ns), spare.device, spare.fd,
            Lane.TRACKED, 0, made.record.time_ns, writing=True,
        )  # fmt: skip
        opened.untouched_ns = _untouched(spare, made)
        record = made.record
        path = self._meta.dentries.path(record.parent, record.name).decode()
        opened.unasked = not self._files.is_log(path)
        self._announce(self._files.table.add(opened, record.flags, record.fh))


def _create(device: CacheDevice, files: Iterable[int]) -> list[int]:
    """In a thread: new cache files, all or none; returns their descriptors. OSError."""
    made: dict[int, int] = {}
    try:
        for file in files:
            made[file] = device.create(file)
    except OSError:
        _close(made.values())
        for file in made:
            device.remove(file)
        raise
    return list(made.values())


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _untouched(spare: Spare, made: Made) -> int | None:
    """Time of writing that its cache file bears from before it was made."""
    found = os.fstat(spare.fd)
    return None if write_time(found, made.mtime_ns) == found.st_mtime_ns else found.st_mtime_ns


def _inode(made: Made) -> InodeRow:
    record = made.record
    return InodeRow(
        record.ino, record.mode, record.uid, record.gid, 1, made.size, record.time_ns,
        made.mtime_ns, max(record.time_ns, made.mtime_ns), None, made.blocks, record.gen,
    )  # fmt: skip


def _generation(made: Made, now: int) -> GenerationRow:
    record = made.record
    return GenerationRow(
        gen=record.gen, ino=record.ino, device=record.device, file=record.file,
        state=GenState.OPEN if made.open else GenState.SEALED, lane=Lane.TRACKED,
        size=made.size, dirty=None, base=None, present=None, crc64=None,
        created_ns=record.time_ns, sealed_ns=None if made.open else now, used_ns=now,
    )  # fmt: skip
