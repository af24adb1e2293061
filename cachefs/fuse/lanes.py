"""The passthrough lane: backing files by the tap, space by the ledger."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from cachefs.cache.device import CacheDevice
from cachefs.cache.filler import CHUNK, Fill
from cachefs.cache.ledger import SpaceLedger
from cachefs.fuse.tap import EventKind, Tap
from cachefs.model.watermark import passthrough_need
from cachefs.vfs.lanes import Change, suits_passthrough
from cachefs.vfs.opened import Handle, Lane, OpenInode
from cachefs.vfs.sizes import Sizes

log = structlog.get_logger("cachefs.fuse")

_REMEMBERED = 100_000
_SHARE = 16
"""Budgets take one part in so many of the cache at most: files that stay open keep theirs."""
_FIRST, _LARGEST = 64 << 10, 16 << 20
"""Bytes of a new file that are written without a word of Python: all of a small file's, and of a
large one's more each time that Python is asked."""

_LARGEST_TOLD = 1 << 38
"""Bytes of a file whose arrival the tap is told of: it keeps a byte for each 128 KiB."""


@dataclass(slots=True)
class _Budget:
    """Bytes promised to a handle in the tracked lane, on account of a ledger."""

    ledger: SpaceLedger
    nbytes: int
    withdrawn: bool = False


class PassthroughLanes:
    """Grants passthrough where kernel, headroom and the file itself allow it.

    A passthrough writer cannot be slowed down, so it is admitted only where at least the larger of
    `headroom`, a fraction of what the cache may take on its device, and twice the largest file seen
    in its directory are free, and that much is reserved for it. In RAM, whose end comes while there
    may be room on a disk, files beside its directory count where it has none; and a file of whose
    like nothing is known is tracked there, since it can move then.
    """

    def __init__(
        self, tap: Tap, ledgers: Sequence[SpaceLedger], sizes: Sizes, *, headroom: float
    ) -> None:
        self._tap = tap
        self._ledgers = ledgers
        self._headroom = headroom
        self._sizes = sizes
        self.volatile: frozenset[int] = frozenset()
        """Numbers of the devices in RAM whose files can move to a disk."""
        self._coherent: set[int] = set()
        self._budgets: dict[int, _Budget] = {}
        self._promised = 0
        self._told: set[int] = set()
        self.on_overrun: Callable[[], None] = lambda: None
        """Called for each writer that is found, at its end, to have outgrown its reservation."""

    def wants(self, mode: int, flags: int) -> bool:
        """See `LaneKeeper`."""
        return self._tap.passthrough_ok and suits_passthrough(mode, flags)

    def grant_writer(self, ino: int, parent: int, device: CacheDevice, file: int, fd: int) -> bool:
        """See `LaneKeeper`."""
        ledger = self._ledgers[device.index]
        if device.index in self.volatile and not self._sizes.likely(parent):
            return False
        if not ledger.reserve(file, self._needed(ledger, parent)):
            return False
        if not self._acquire(ino, fd):
            ledger.release(file)
            return False
        return True

    def _needed(self, ledger: SpaceLedger, parent: int) -> int:
        in_ram = ledger.device.index in self.volatile
        largest = self._sizes.likely(parent) if in_ram else self._sizes.seen(parent)
        return passthrough_need(ledger.limit, self._headroom, largest)

    def expected(self, parent: int) -> int:
        """See `LaneKeeper`."""
        return 2 * self._sizes.likely(parent)

    def grant_reader(self, ino: int, fd: int) -> bool:
        """See `LaneKeeper`."""
        return self._acquire(ino, fd)

    def _acquire(self, ino: int, fd: int) -> bool:
        try:
            self._tap.acquire(ino, fd)
        except OSError as error:
            log.info("no passthrough for this file", inode=ino, reason=str(error))
            return False
        self._coherent.discard(ino)
        return True

    def join(self, ino: int, fd: int) -> None:
        """See `LaneKeeper`."""
        self._tap.acquire(ino, fd)

    def leave(self, ino: int) -> None:
        """See `LaneKeeper`."""
        self._tap.release(ino)

    def writer_gone(self, device: CacheDevice, file: int) -> int | None:
        """See `LaneKeeper`."""
        ledger = self._ledgers[device.index]
        counted: int | None = None
        if file in ledger.reservations():
            counted = device.allocated(file)
            if ledger.note_growth(file, counted):  # Since the reaper looked last.
                log.warning("writer outgrew its reservation", device=device.index, gen=file)
                self.on_overrun()
            ledger.release(file)
        return counted

    def resume_writer(self, device: CacheDevice, file: int, parent: int) -> None:
        """See `LaneKeeper`."""
        ledger = self._ledgers[device.index]
        present = device.allocated(file)  # counted already, with all that was found here
        if ledger.reserve(file, present + self._needed(ledger, parent)):
            ledger.credit(present)
            ledger.note_growth(file, present)

    def changes(self) -> Iterable[Change]:
        """See `LaneKeeper`."""
        return [
            Change(
                event.fh,
                event.offset,
                event.offset + event.length,
                abandoned=event.kind is EventKind.ABANDONED,
                flushed=event.kind is EventKind.FLUSHED,
            )
            for event in self._tap.drain_events()
        ]

    def now_writable(self, handle: Handle) -> None:
        """See `LaneKeeper`."""
        tell_of_writer(self._tap, handle)

    def now_readable(self, handle: Handle) -> None:
        """See `LaneKeeper`."""
        opened = handle.inode
        if opened.lane is not Lane.TRACKED:
            return
        if opened.stream is not None:
            self._tap.set_reader(handle.fh, -1, False)
        elif opened.fill is None:
            self._tap.set_reader(handle.fh, opened.fd, opened.device.in_memory)
        elif opened.fill.served and opened.size <= _LARGEST_TOLD:
            self._tell_of(opened, opened.fill)

    def _tell_of(self, opened: OpenInode, fill: Fill) -> None:
        self._told.add(opened.ino)
        memory, step = opened.device.in_memory, fill.stride * CHUNK
        for start, end in fill.present:
            self._tap.arrived(opened.ino, opened.fd, memory, fill.size, start, end, step)

    def take_back(self, opened: OpenInode) -> None:
        """See `LaneKeeper`."""
        if opened.ino in self._told:
            self._told.discard(opened.ino)
            self._tap.take_back(opened.ino)

    def announce(self, handle: Handle) -> bool:
        """Tell the tap of a handle before its open is answered; whether the kernel may keep pages.

        Pages cached before a passthrough session may be stale after it.
        """
        opened = handle.inode
        if handle.writable and opened.writing:
            tell_of_writer(self._tap, handle)
            if opened.unasked and opened.lane is Lane.TRACKED:
                self._give_budget(handle)
        self.now_readable(handle)
        if opened.lane is Lane.PASSTHROUGH:
            backing = self._tap.backing_for(opened.ino)
            if backing is not None:
                self._tap.set_passthrough(handle.fh, backing)
            return False
        if opened.read_once and opened.fill is not None and not handle.writable:
            handle.direct = self._tap.direct_ok
        keep = opened.ino in self._coherent or handle.flags & os.O_CREAT != 0
        if len(self._coherent) > _REMEMBERED:
            self._coherent.clear()
        self._coherent.add(opened.ino)
        return keep

    def _give_budget(self, handle: Handle) -> None:
        ledger = self._ledgers[handle.inode.gen.device]
        if not handle.synchronous and handle.fh not in self._budgets:
            self._budgets[handle.fh] = budget = _Budget(ledger, 0)
            self._promise(handle, budget, _FIRST)

    def _promise(self, handle: Handle, budget: _Budget, nbytes: int) -> None:
        ledger, share = budget.ledger, budget.ledger.limit // _SHARE
        if self._promised + nbytes > share or not handle.inode.device.direct_ok:
            return
        if ledger.try_admit(nbytes):
            budget.nbytes = nbytes
            self._promised += nbytes
            self._tap.set_budget(handle.fh, nbytes, handle.inode.device.in_memory)

    def _settle(self, budget: _Budget) -> None:
        budget.ledger.settle(budget.nbytes, 0)
        self._promised -= budget.nbytes
        budget.nbytes = 0

    def used_up(self, handle: Handle) -> bool:
        """See `LaneKeeper`."""
        budget = self._budgets.get(handle.fh)
        return budget is not None and not budget.withdrawn

    def renew(self, handle: Handle) -> None:
        """See `LaneKeeper`."""
        budget = self._budgets[handle.fh]
        wanted = min(4 * budget.nbytes or _FIRST, _LARGEST)
        self._settle(budget)
        self._promise(handle, budget, wanted)

    def keep(self, ino: int) -> None:
        """See `LaneKeeper`."""
        self._coherent.add(ino)

    def closed(self, handle: Handle) -> None:
        """See `LaneKeeper`."""
        if not handle.inode.handles:
            self.take_back(handle.inode)
        budget = self._budgets.pop(handle.fh, None)
        if budget is not None:
            self._settle(budget)

    def withdraw(self, handle: Handle) -> None:
        """See `LaneKeeper`."""
        budget = self._budgets.get(handle.fh)
        if budget is not None:
            budget.withdrawn = True
            self._tap.set_budget(handle.fh, 0, False)

    def streams(self, handle: Handle) -> None:
        """See `LaneKeeper`."""
        self.withdraw(handle)
        budget = self._budgets.get(handle.fh)
        if budget is not None:
            self._settle(budget)
        if handle.writable:
            self.now_writable(handle)
        self.now_readable(handle)

    def moved(self, handle: Handle) -> None:
        """See `LaneKeeper`."""
        opened = handle.inode
        self.closed(handle)
        if handle.writable and opened.writing:
            tell_of_writer(self._tap, handle)
        if handle.writable and opened.unasked and not opened.privileged:
            self._give_budget(handle)
        self.now_readable(handle)

    def take_read(self) -> int:
        """See `LaneKeeper`."""
        return self._tap.take_read()


def tell_of_writer(tap: Tap, handle: Handle) -> None:
    """The tap may allocate space in the handle's cache file, unless that does not hold all of the
    file, and notes when it is closed."""
    opened = handle.inode
    tap.set_handle_fd(handle.fh, opened.fd if opened.stream is None else ~opened.fd)
    note_closing(tap, handle.fh, opened.device, opened.gen.file)


def note_closing(tap: Tap, fh: int, device: CacheDevice, file: int) -> None:
    """Closes of a handle that writes are noted where that waits for no disk, if there is room."""
    times = device.closings
    slot = times.claim(file) if times is not None else None
    if slot is not None:
        tap.set_closing(fh, device.index, slot, file)
