"""Small files without Python: which directories the tap may make them in, and when it is folded.

Of a request that the tap leaves to Python, the handler begins with `gather`: what the tap did
before is in the database then, and while the handler is at work the tap does nothing by itself
(`_tap_small.c` has the rules). Nobody waits for a file to be folded for longer than `_LAG`.

Files are made here only in the tracked lane: in passthrough one that turns out to be large would be
in the wrong lane. There a handler makes them, and the tap answers what is asked before.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
import trio

from cachefs.cache.journal import ROOM, START
from cachefs.fuse.lanes import note_closing
from cachefs.fuse.tap import Tap
from cachefs.meta import Meta
from cachefs.meta.rows import InodeRow
from cachefs.vfs.attributes import ROOT
from cachefs.vfs.namespace import Namespace
from cachefs.vfs.smallfiles import SmallFiles, Spare

log = structlog.get_logger("cachefs.fuse")

_LAG = 0.02
_IDLE = 1.0
"""Seconds without a new file after which spare ones are given up."""
_RETRY = 1.0
_LASTS = 1.0
"""Seconds for which a directory is granted; each handler that makes a file in it begins them anew,
and sees to it that others' changes of the bucket come into view in time."""
_FEW, _MANY = 8, 128
"""Spare files to begin with, and those kept ready as they go on being used up."""
_IN_A_ROW, _LONGEST_ROW = 2, 64
"""Files made in a directory before it is granted; the more, the more often that was of no use."""
_WORTH = 8
"""Names that the tap has to look up before a grant was of use."""
_NAMES_PER_FILE = 32
"""Names of a directory that are worth reading for each file made there since it was last."""
_REMEMBERED = 1000


@dataclass(slots=True)
class _Known:
    """What is known of a directory that files are made in."""

    row: int = _IN_A_ROW
    """Files in a row before it is granted."""
    made: int = 0
    names: int = 0
    served: int | None = None
    """Names that the tap had looked up when it was granted last."""


class NoSmallFiles:
    """Every file is made by a handler."""

    def start(self, ttl: float) -> None:
        """Nothing starts."""

    def gather(self) -> None:
        """There is nothing to fold."""

    def created(self, parent: int, name: bytes) -> None:
        """Nothing is granted."""

    @contextmanager
    def withheld(self) -> Iterator[None]:
        """Nothing is to be withheld."""
        yield

    @contextmanager
    def held(self, ino: int) -> Iterator[None]:
        """Nothing is to be withheld."""
        yield

    async def run(self) -> None:
        """There is nothing to do."""

    async def renew(self) -> None:
        """Nothing is kept ready."""

    async def stop(self) -> None:
        """Nothing was started."""


class SmallFileMaker(NoSmallFiles):
    """Lets the tap make small files where that is safe and pays."""

    def __init__(self, tap: Tap, meta: Meta, namespace: Namespace, small: SmallFiles) -> None:
        self._tap = tap
        self._meta = meta
        self._namespace = namespace
        self._small = small
        self._journal = small.journal
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._on = False
        self._withheld = 0
        self._held: Counter[int] = Counter()
        self._lasts = 0
        self._granted: set[int] = set()
        self._known: dict[int, _Known] = {}
        self._wanted = _FEW // 2
        self._more = trio.Event()
        self._making = trio.Lock()

    def start(self, ttl: float) -> None:
        """From now on the tap may serve. `ttl`: seconds that the kernel may remember names for."""
        try:
            self._journal.begin()
        except OSError as error:
            log.warning("small files are made the long way", reason=str(error))
            return
        if not self._journal.in_memory:
            log.warning("small files are made the long way", reason="no memory for a journal")
            return
        folded = self._small.folded
        self._tap.small_start(
            self._journal.fd, self._wake, self._journal.seed, folded, START, ROOM, ttl
        )
        self._lasts = int(min(_LASTS, ttl / 4) * 1e9)
        self._on = self._lasts > 0

    def gather(self) -> None:
        """Fold what the tap did into the database. OSError, sqlite3.Error: still to be done."""
        size = self._tap.small_pending()
        if not size:
            return
        records = self._journal.read(size)
        try:
            made = self._small.store(records)
        except sqlite3.Error:
            made = self._small.store(records)  # on a full disk the first one made the database room
        self._tap.small_folded()
        self._small.settle(made)
        if self._granted:
            self._refill()

    def created(self, parent: int, name: bytes) -> None:
        """A handler made a file: the directory may be worth granting, or is already."""
        if not self._on or self._withheld or self._held[parent]:
            return
        try:
            if not self._is_granted(parent, name):
                self._count(parent)
        except (OSError, sqlite3.Error) as error:  # the file is made, whatever comes of this
            log.info("small files are made the long way", reason=str(error))
            self._revoke()

    def _is_granted(self, parent: int, name: bytes) -> bool:
        """Tell the tap of a name; False if it need not know."""
        if parent not in self._granted:
            return False
        row = self._meta.inodes.get(parent)
        current = self._small.quick and not self._namespace.views.is_old(parent)
        if row and current and self._tap.small_note(parent, name, row.mtime_ns, self._lasts):
            self._refill()
            return True
        self._forget(parent)
        return False

    def _count(self, parent: int) -> None:
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        known = self._known.setdefault(parent, _Known())
        known.made += 1
        if known.made >= max(known.row, known.names // _NAMES_PER_FILE):
            known.made = 0
            self._grant(parent, known)

    def _grant(self, parent: int, known: _Known) -> None:
        row = self._meta.inodes.get(parent)
        if row is None or not _is_grantable(row) or self._namespace.views.is_old(parent):
            return
        if not self._small.quick or not self._refill():
            return
        served, _ = self._tap.small_info()
        hasty = known.served is not None and served - known.served < _WORTH
        known.row = min(2 * known.row, _LONGEST_ROW) if hasty else _IN_A_ROW
        known.served = served
        names = self._meta.dentries.names(parent)
        known.names = len(names)
        attributes = (
            row.ino, row.mode, row.uid, row.gid, row.nlink, row.size, row.blocks, row.atime_ns,
            row.mtime_ns, row.ctime_ns,
        )  # fmt: skip
        room = self._namespace.name_room(parent)
        if self._tap.small_grant(attributes, room, parent == ROOT, names, self._lasts):
            self._granted.add(parent)

    def _refill(self) -> bool:
        """See to it that there are enough spare files in a moment; False: there is none now, though
        they are wanted."""
        if self._tap.passthrough_ok:
            return True
        _, left = self._tap.small_info()
        if not left:
            self._wanted = min(2 * self._wanted, _MANY)
        if left <= self._wanted // 2:
            self._more.set()
        return left > 0

    async def _make(self) -> None:
        """Make spare files when they are asked for, or as many as can be had: in a thread, since a
        disk may hold it up."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            async with self._making:
                if self._withheld:
                    continue
                try:
                    made = await self._small.make(self._wanted - self._tap.small_info()[1])
                except (OSError, sqlite3.Error) as error:
                    log.info("small files are made the long way", reason=str(error))
                    continue
                for spare in made:
                    self._give(spare)

    def _give(self, spare: Spare) -> None:
        note_closing(self._tap, spare.fh, spare.device, spare.file)
        self._tap.small_spare(
            spare.ino, spare.gen, spare.file, spare.fh, spare.device.index, spare.fd,
            spare.device.in_memory,
        )  # fmt: skip

    def _revoke(self) -> None:
        self._tap.small_withhold(self._withheld > 0, False)
        self._granted.clear()

    @contextmanager
    def withheld(self) -> Iterator[None]:
        """While names change other than by a request, the tap makes none."""
        self._withheld += 1
        try:
            self.gather()
            self._revoke()
            yield
        finally:
            self._withheld -= 1
            self._revoke()

    @contextmanager
    def held(self, ino: int) -> Iterator[None]:
        """While directory `ino` is compared with the bucket, the tap makes none in it. OSError:
        what it has made cannot be recorded."""
        try:
            self.gather()
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"new files cannot be recorded: {error}") from error
        self._held[ino] += 1
        self._forget(ino)
        try:
            yield
        finally:
            self._held[ino] -= 1
            self._held += Counter()  # without the zeros

    def _forget(self, ino: int) -> None:
        self._granted.discard(ino)
        self._tap.small_revoke(ino)

    async def run(self) -> None:
        """Fold in time; make spare files, and give them up when nobody needs them."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._make)
            await self._fold(nursery)

    async def _fold(self, nursery: trio.Nursery) -> None:
        while True:
            with trio.move_on_after(_IDLE) as idle:
                await trio.lowlevel.wait_readable(self._wake)
            if not idle.cancelled_caught:
                os.eventfd_read(self._wake)
                await trio.sleep(_LAG)
            try:
                self.gather()
                nursery.start_soon(self._small.close_done)
            except (OSError, sqlite3.Error) as error:
                log.warning("new files wait to be recorded", reason=str(error))
                await trio.sleep(_RETRY)
                os.eventfd_write(self._wake, 1)
            else:
                if idle.cancelled_caught and self._small.spares:
                    await self.renew()

    def _give_up(self) -> list[Spare]:
        self._tap.small_withhold(self._withheld > 0, True)
        self._wanted = _FEW // 2
        self._granted.clear()
        given_up = self._small.give_up()
        for spare in given_up:
            self._tap.drop_handle(spare.fh)
        return given_up

    async def renew(self) -> None:
        """Give up spare files: the device that they are on may have failed, or be slow."""
        try:
            self.gather()
            given_up = self._give_up()
            await trio.to_thread.run_sync(self._small.remove, given_up, abandon_on_cancel=True)
        except (OSError, sqlite3.Error) as error:
            log.warning("spare files stay", reason=str(error))

    async def stop(self) -> None:
        """The end is near: no more of them. OSError, sqlite3.Error as `gather`."""
        self._withheld += 1
        async with self._making:
            self._revoke()
            self.gather()
            self._small.remove(self._give_up())
            self._journal.remove()


def _is_grantable(row: InodeRow) -> bool:
    """Whether all there is to know of a directory is known here."""
    known = row.listed_ns is not None and bool(row.attrs_known)
    return stat.S_ISDIR(row.mode) and row.nlink > 0 and known
