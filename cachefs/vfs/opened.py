"""Open inodes and handles: what the kernel holds open, and what is known while it does."""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import trio

from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.cache.filler import Fill
from cachefs.meta.rows import GenerationRow
from cachefs.model.extents import ExtentSet
from cachefs.model.spans import SMALLEST, SpanMap


class Lane(StrEnum):
    """How data moves while a file is open."""

    TRACKED = "tracked"
    PASSTHROUGH = "passthrough"


class OnDisk(NamedTuple):
    """What a file was like when it was synced: as long as it is, it was not written to."""

    gen: int
    size: int
    mtime_ns: int


@dataclass(slots=True, eq=False)
class Stream:
    """A generation that does not fit into the cache: what of it is in the store, and nowhere else.

    See `vfs.streaming`. There is one of a generation at a time, whoever has it open.
    """

    gen: int
    spans: SpanMap
    sending: dict[int, int] = field(default_factory=dict)
    """Start -> end of what is on its way there."""
    spoiled: set[int] = field(default_factory=set)
    """Starts of what was written to since it was sent."""
    written: dict[int, int] = field(default_factory=dict)
    """Number of a piece of the least length -> when it was last written (monotonic, ns), as far as
    that was seen."""
    trims: int = 0
    """Counts up when bytes leave the cache file."""
    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held while bytes leave the cache file or come back, and while it is cut."""
    reading: trio.Lock = field(default_factory=trio.Lock)
    blocks: OrderedDict[tuple[str, int], bytes] = field(default_factory=OrderedDict)
    """(key of a span, offset in the file) -> bytes that were read of it last."""

    def wrote(self, start: int, end: int) -> None:
        """Bytes [start, end) are other ones now."""
        for begin, stop in self.sending.items():
            if start < stop and begin < end:
                self.spoiled.add(begin)
        first, now = start // SMALLEST, time.monotonic_ns()
        for place in range(first, max(first, (end - 1) // SMALLEST) + 1):
            self.written[place] = now

    def last_write(self, start: int, end: int) -> int:
        """When any of these bytes was last written."""
        return max(
            self.written.get(place, 0) for place in range(start // SMALLEST, end // SMALLEST)
        )


@dataclass(slots=True, eq=False)
class OpenInode:
    """A regular file with at least one handle.

    While it exists its cache file is pinned: every open shares the lane and the descriptor.
    """

    ino: int
    gen: GenerationRow
    device: CacheDevice
    fd: int
    """Cache file: read-write in the tracked lane, read-only in passthrough, where the kernel
    writes, so that the daemon never looks like a writer to the lease probe."""
    lane: Lane
    size: int
    """In bytes. While it is written, what the cache file has (`refresh`)."""
    mtime_ns: int
    """Time of the last write, or the one that was set; the cache file's while it is written."""
    writing: bool = False
    """The generation is open: there were, or in passthrough may have been, writes to it."""
    untouched_ns: int | None = None
    """Time of writing that the cache file bears as long as nobody has written to it: meanwhile
    `mtime_ns` stands, which is another one."""
    punched: bool = False
    """Holes are made in the cache file just now, and nobody writes to it: `mtime_ns` stands."""
    dirty: ExtentSet | None = None
    """Extents written so far; None in passthrough and for new files, where all counts."""
    read_once: bool = False
    """A large file of data that has to be fetched: the kernel need not keep what is read of it."""
    fill: Fill | None = None
    """Set while the cache file does not hold all of the object's bytes."""
    trimmed: int = 0
    """`trims` of the fill that it had until it was complete."""
    stream: Stream | None = None
    """Set while the cache file does not hold all that was written, and the store does."""
    handles: int = 0
    writers: int = 0
    flushed_ns: int = 0
    """When a writer last closed a descriptor: it may or may not have been the last one."""
    privileged: bool = False
    """Set-user-id or set-group-id is on: the next write clears it."""
    snapshot: int | None = None
    """Generation of the last upload of this file as far as it had grown (logs)."""
    snapshot_size: int = 0
    """Bytes of it."""
    unsent: int = 0
    """Everything before this offset is as it was at the last snapshot."""
    orphaned: bool = False
    """The last name is gone: nothing of it is published any more."""
    accounted: int = 0
    """Bytes of this file that the space ledger knows of."""
    seen: int = 0
    """Bytes of all writes that passed here."""
    unasked: bool = False
    """A new file in the tracked lane whose first bytes may be written without asking."""
    uncounted: int = 0
    """Bytes written since it was last asked what the file allocates."""
    on_disk: OnDisk | None = None
    """As it was when all of it was last brought to the disk."""
    unbuffered: bool = False
    """A writer goes around the page cache: it may be at it while others sync the file."""
    writes: int = 0
    """Writes that are under way in the tracked lane."""
    moving: trio.Event | None = None
    """While its bytes move to another device: set when they have, and nothing is written before."""
    lock: trio.Lock = field(default_factory=trio.Lock)
    """Serialises changes of `gen`, `fd` and size that need an await."""

    @property
    def trims(self) -> int:
        """Changes when bytes that were here have to be fetched again."""
        fetched = self.fill.trims if self.fill is not None else 0
        return self.trimmed + fetched + (self.stream.trims if self.stream is not None else 0)

    @property
    def blocks(self) -> int:
        """512-byte units that hold data, here or, as long as it is written, in the store."""
        away = self.stream.spans.total if self.stream is not None else 0
        return os.fstat(self.fd).st_blocks + away // BLOCK_UNIT

    async def settled(self) -> None:
        """Return when its bytes are not being moved."""
        while self.moving is not None:
            await self.moving.wait()

    def switch(self, fd: int) -> None:
        """`fd` is its cache file from now on. In place: a read that is under way in a thread goes
        on with the same number. Cannot fail: the database says so already."""
        with suppress(OSError):  # Without descriptors it is closed here, which may wait.
            self.device.let_go(os.dup(self.fd))
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)

    @contextmanager
    def written_to(self) -> Iterator[None]:
        """Meanwhile its bytes are not to be moved."""
        self.writes += 1
        try:
            yield
        finally:
            self.writes -= 1

    def refresh(self) -> None:
        """While it is written, take size and write time from the cache file: not every write
        passes here."""
        if self.writing:
            self.take(os.fstat(self.fd))

    def take(self, found: os.stat_result) -> None:
        """Size and write time of the cache file are these."""
        self.size = found.st_size
        if not self.punched and found.st_mtime_ns != self.untouched_ns:
            self.mtime_ns, self.untouched_ns = found.st_mtime_ns, None

    def wrote(self, start: int, end: int) -> None:
        """Record a write of [start, end) in the tracked lane."""
        if self.dirty is not None:
            self.dirty.add(start, end)
        if self.stream is not None:
            self.stream.wrote(start, end)
        if start < self.unsent:
            self.unsent = start
        if end > self.size:
            self.size = end


def open_cache_file(device: CacheDevice, file: int) -> int:
    """A descriptor for the tracked lane. Where the disk has turned read-only it is one for reading:
    what is there can be had all the same, and writers are told by the metadata."""
    try:
        return device.open(file, os.O_RDWR)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return device.open(file, os.O_RDONLY)


@dataclass(slots=True, eq=False)
class Handle:
    """One open file description of the kernel's."""

    fh: int
    inode: OpenInode
    flags: int
    direct: bool = False
    """What it reads goes straight into its memory, past the kernel's cache of the mount."""

    @property
    def writable(self) -> bool:
        """Opened for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def synchronous(self) -> bool:
        """O_SYNC or O_DSYNC: each write reaches the disk before it returns."""
        return bool(self.flags & os.O_DSYNC)


class OpenTable:
    """All handles and open inodes of the mount.

    Handle numbers are never used twice, not even by a later daemon of the same mount: the kernel
    goes on with the handles that a dead daemon gave out.
    """

    def __init__(self) -> None:
        self._next = time.time_ns()
        self.handles: dict[int, Handle] = {}
        self.inodes: dict[int, OpenInode] = {}
        self.directories: dict[int, int] = {}
        self.lingering: dict[int, OpenInode] = {}
        """Files without a writing handle that may be written to still, through a mapping that has
        outlived its descriptor; in the order in which they were closed."""
        self.on_settle: Callable[[], None] = _nothing
        self.lingers = trio.Event()
        """Set when there are some (again)."""

    def number(self) -> int:
        """A new handle number."""
        self._next += 1
        return self._next

    def add(self, inode: OpenInode, flags: int, fh: int | None = None) -> Handle:
        """A new handle of an open inode."""
        handle = Handle(fh if fh is not None else self.number(), inode, flags)
        self.handles[handle.fh] = handle
        self.inodes[inode.ino] = inode
        inode.handles += 1
        if handle.writable:
            inode.writers += 1
            inode.unbuffered |= bool(flags & os.O_DIRECT)
        return handle

    def is_here(self, inode: OpenInode) -> bool:
        """Whether an inode was not closed meanwhile. If it was, its descriptor may be another
        file's by now, and so may the inode's number be another `OpenInode`'s."""
        return self.inodes.get(inode.ino) is inode

    def is_written(self, inode: OpenInode) -> bool:
        """Whether it is here, and open for writing."""
        return inode.writing and self.is_here(inode)

    def handles_of(self, inode: OpenInode) -> list[Handle]:
        """The handles of an open inode."""
        return [handle for handle in self.handles.values() if handle.inode is inode]

    def remove(self, fh: int) -> Handle | None:
        """Take a handle out; None for a number that is unknown."""
        handle = self.handles.pop(fh, None)
        if handle is None:
            return None
        inode = handle.inode
        inode.handles -= 1
        if handle.writable:
            inode.writers -= 1
        if not inode.handles and self.inodes.get(inode.ino) is inode:
            del self.inodes[inode.ino]
        return handle

    def linger(self, inode: OpenInode) -> None:
        """Keep an inode, whether or not it has handles, until its last mapping is gone."""
        self.inodes[inode.ino] = self.lingering[inode.ino] = inode
        self.lingers.set()

    def settle(self) -> None:
        """Find out which files have no writer any more, so that what comes next comes after them.
        Costs nothing when there is nothing to find out."""
        if self.lingering:
            self.on_settle()

    def open_for_writing(self) -> Iterator[OpenInode]:
        """Inodes with a writer."""
        return (inode for inode in self.inodes.values() if inode.writers)


def _nothing() -> None:
    """Nobody settles anything."""
