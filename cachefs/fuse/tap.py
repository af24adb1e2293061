"""Python's face of the tap: passthrough, FALLOCATE and takeover for pyfuse3.

Import this module and call `load` before anything imports pyfuse3. Order of events in
a daemon::

    tap = load(state_fd, want_passthrough=True, stack_depth=1)   # Tap, or a Reason
    pyfuse3.init(ops, f"/dev/fd/{fuse_fd}", options)             # a takeover happens in here; it
                                                                 # raises RuntimeError when refused
                                                                 # and `tap.refusal` says why
    if tap.is_takeover: rebuild handles from tap.open_handles(), see tap.poisoned()
    await pyfuse3.main()

A handler that opens an inode in the passthrough lane (`fd` may be O_RDONLY)::

    backing_id = tap.acquire(inode, fd)       # same id for every handle of the inode; OSError: none
    tap.set_passthrough(fh, backing_id)       # before FileInfo(fh=fh) is returned
    tap.set_handle_fd(fh, fd)                 # FALLOCATE works on it; any lane
    ...
    tap.release(inode)                        # in release() of that handle, before its fd is closed

What to know:

- **fh numbers must be unique for the life of the mount**, across daemons: handles opened before a
  takeover come back with the number they were given then.
- A handler that fails after `acquire` calls `release`, and `drop_handle(fh)` if it got that far.
- After a takeover the handle count of an inode is what `open_handles` shows; handlers of requests
  that are sent again `acquire` anew. `release` is called once for each handle with `passthrough`.
- Requests sent again come in the order of their first arrival. A mutation among them may have
  been applied already.
- `passthrough_ok` is known once the kernel has answered INIT: in a first daemon that is when the
  first request is handled, after a takeover when `pyfuse3.init` returns.
- HANDLE_KILLPRIV_V2 is on: clearing suid and sgid at write, truncate and chown is the daemon's;
  `kills_privileges` tells when.
- Times that a caller wants to be those of now (touch) reach handlers with a value that may be older
  than the last change; `times_of_now` tells them apart.
- A live mount needs the tap to be taken over: `load` then raises MountError instead of giving a
  Reason.
- Every call takes a microsecond or so, is made with the GIL held and never waits for a disk.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from cachefs.errors import MountError

_dlopenflags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_GLOBAL | os.RTLD_NOW)  # so that pyfuse3 finds its functions first
try:
    from cachefs.fuse import _tap

    _missing = ""
except ImportError as _error:
    _missing = f"this installation has no tap (was there a C compiler?): {_error}"
finally:
    sys.setdlopenflags(_dlopenflags)

_CAP_SYS_ADMIN = 21
_INIT2_DIRECT_IO_ALLOW_MMAP = 1 << 4
_INIT2_PASSTHROUGH = 1 << 5
_INIT_STATE = 28
"""Offset in the state; see the head of _tap.c."""


class Opcode(IntEnum):
    """Requests of the FUSE protocol (linux/fuse.h); OTHER stands for numbers unknown here."""

    OTHER = 0
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52

    @classmethod
    def _missing_(cls, value: object) -> Opcode:
        return cls.OTHER


_FIXED_PART = {
    Opcode.SYMLINK: 0,
    Opcode.MKNOD: 16,
    Opcode.MKDIR: 8,
    Opcode.UNLINK: 0,
    Opcode.RMDIR: 0,
    Opcode.RENAME: 8,
    Opcode.RENAME2: 16,
    Opcode.LINK: 8,
    Opcode.CREATE: 16,
    Opcode.LOOKUP: 0,
}
"""Bytes before the names in a request's body."""
_WITH_HANDLE = frozenset(
    {Opcode.READ, Opcode.WRITE, Opcode.RELEASE, Opcode.FLUSH, Opcode.FSYNC, Opcode.FALLOCATE,
     Opcode.RELEASEDIR, Opcode.READDIR, Opcode.READDIRPLUS, Opcode.FSYNCDIR}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reason:
    """Why there is no tap, in one line."""

    text: str

    def __str__(self) -> str:
        return self.text


class OpenHandle(NamedTuple):
    """A handle that the kernel holds."""

    fh: int
    nodeid: int
    flags: int
    """As given to open(2), without O_CREAT, O_EXCL and O_NOCTTY; 0 for directories."""
    is_dir: bool
    passthrough: bool


class Request(NamedTuple):
    """A request that is not answered yet."""

    unique: int
    opcode: Opcode
    nodeid: int
    charge: int
    """5 for each failure of a daemon that was handling it, 2 for each kill; given up on at 10."""


class Poisoned(NamedTuple):
    """A request that brought the daemon down twice; its caller has been answered EIO."""

    unique: int
    opcode: Opcode
    nodeid: int
    body: bytes
    """What followed the request's header, at most 8 KiB of it."""

    @property
    def names(self) -> list[bytes]:
        """The names in it: [name], of a rename [old, new], of a symlink [name, target]."""
        start = _FIXED_PART.get(self.opcode)
        if start is None:
            return []
        return self.body[start:].split(b"\0")[:-1]

    @property
    def fh(self) -> int | None:
        """The handle it was for, if any."""
        if self.opcode not in _WITH_HANDLE:
            return None
        return int.from_bytes(self.body[:8], sys.byteorder)


class EventKind(IntEnum):
    """What the tap did by itself."""

    FALLOCATE = 0
    """Space of a handle's file was allocated, punched or zeroed (and its size may have grown)."""
    ABANDONED = 1
    """The reply that would have opened `fh` reached nobody: no RELEASE will follow."""
    FLUSHED = 2
    """A descriptor of `fh` was closed, perhaps not the last (only after `answer_briefly`)."""
    WRITTEN = 3
    """Bytes were written to the handle's file by a thread, while other requests were read."""


class Event(NamedTuple):
    """Something that Python has to know of before it seals or states a file's size."""

    kind: EventKind
    fh: int
    mode: int
    """FALLOC_FL_* of fallocate(2)."""
    offset: int
    length: int


def is_dying(thread: int) -> bool:
    """Whether a signal that cannot be caught, or is not, waits for a thread: the kernel then has
    SIGKILL pending for it (proc_pid_status(5), SigPnd and ShdPnd)."""
    try:
        lines = Path(f"/proc/{thread}/status").read_text().splitlines()
    except OSError:
        return False
    pending = [line.split()[1] for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


class Tap:
    """The tap of this process's one mount. Made by `load`."""

    def __init__(self, passthrough_reason: str) -> None:
        self._unwanted = passthrough_reason
        self._ok = self._direct_ok = False
        # Straight to C: these are called for every open and release.
        self.acquire = _tap.acquire
        """(inode, fd) -> backing id; counts a handle. OSError: EBUSY the inode is pinned to
        another file, ENFILE the table is full, ELOOP the cache device is stacked too deep,
        EPERM no passthrough, and what fstat says."""
        self.release = _tap.release
        """(inode) -> handles that remain; at 0 the id is closed. OSError ENOENT: no such entry."""
        self.backing_for = _tap.backing_for
        """(inode) -> its backing id while a handle is open, else None."""
        self.set_passthrough = _tap.set_passthrough
        """(fh, backing_id): the reply that opens `fh` will say so. Once per open."""
        self.set_handle_fd = _tap.set_handle_fd
        """(fh, fd): the file FALLOCATE works on; forgotten when the handle's RELEASE is answered.
        For a handle without one `write` is called with no bytes first, which may name it;
        EOPNOTSUPP if it does not."""
        self.use_close_table = _tap.use_close_table
        """(device, memory) -> done: where closes of files on that device are noted, for good."""
        self.set_closing = _tap.set_closing
        """(fh, device, slot, file) -> done: where those of a handle are; on the file otherwise."""
        self.set_listing = _tap.set_listing
        """(fh, keep): the kernel may keep what is read from that directory and give it out again;
        `keep`: what it has kept of it before as well. Before its opendir is answered."""
        self.set_budget = _tap.set_budget
        """(fh, bytes, in_memory): so much may be written to that file without asking, by a thread
        that may wait for its disk, unless it is in memory; 0: nothing any more."""
        self.left = _tap.left
        """(inode) -> how many such writes to that file, and FALLOCATEs, are under way now."""
        self.hold = _tap.hold
        """(inode, on): FALLOCATEs of that file call `write` first, as for a handle without a file,
        and go to the file that the handle has then."""
        self.set_reader = _tap.set_reader
        """(fh, fd, in_memory): what the page cache has of that file is read without asking, all of
        it where it is in memory anyway; fd -1: nothing any more. Forgotten as the above."""
        self.arrived = _tap.arrived
        """(inode, fd, in_memory, size, start, end, chunk): so is this extent of a file that is not
        there as a whole, but for the beginning of each `chunk` bytes."""
        self.take_back = _tap.take_back
        """(inode): undo `arrived`, for all extents; before the descriptor is closed."""
        self.take_read = _tap.take_read
        """() -> bytes read so since the last call."""
        self.drop_handle = _tap.drop_handle
        """(fh): forget all of the above, for an open that fails after all."""
        self.open_backing = _tap.backing_open
        """(fd) -> backing id outside the table. `acquire` is what handlers want."""
        self.close_backing = _tap.backing_close
        """(backing_id): undo `open_backing`."""
        self.current = _tap.current
        """() -> number of the request that was read last. To be asked at the very start of a
        handler, before it awaits anything. The same when the request is sent again."""
        self.caller = _tap.caller
        """() -> (`current`, the thread that waits for its answer; 0: not to be seen from here)."""
        self.kills_privileges = _tap.kills_privileges
        """() -> whether that request (CREATE, OPEN, SETATTR or WRITE) is to clear suid and sgid:
        the kernel says so for callers without CAP_FSETID. Root's writes keep them."""
        self.times_of_now = _tap.times_of_now
        """() -> whether that request, a SETATTR, sets (atime, mtime) to the time of now."""
        # For `cachefs.fuse.smallfiles` alone.
        self.small_start = _tap.small_start
        self.small_grant = _tap.small_grant
        self.small_note = _tap.small_note
        self.small_revoke = _tap.small_revoke
        self.small_spare = _tap.small_spare
        self.small_pending = _tap.small_pending
        self.small_folded = _tap.small_folded
        self.small_withhold = _tap.small_withhold
        self.small_info = _tap.small_info
        self.watch = _tap.watch
        """(nodeid): count requests for this inode; see `counts`."""
        self.unwatch = _tap.unwatch

    def is_given_up(self, asker: tuple[int, int]) -> bool:
        """Whether who made a request (`caller`) is being killed, and waits for its answer alone."""
        request, thread = asker
        return _tap.is_interrupted(request) and is_dying(thread)

    @property
    def is_mounted(self) -> bool:
        """Whether pyfuse3.init went through the tap."""
        return bool(_tap.info()["mounted"])

    @property
    def passthrough_ok(self) -> bool:
        """Whether the kernel agreed to passthrough (False until INIT is answered)."""
        if not self._ok and not self._unwanted:
            self._ok = bool(_tap.info()["flags2"] & _INIT2_PASSTHROUGH)
        return self._ok

    @property
    def direct_ok(self) -> bool:
        """Whether what is opened for direct I/O can be mapped as well (Linux 6.6 or newer)."""
        if not self._direct_ok:
            self._direct_ok = bool(_tap.info()["flags2"] & _INIT2_DIRECT_IO_ALLOW_MMAP)
        return self._direct_ok

    @property
    def passthrough_reason(self) -> str:
        """Why `passthrough_ok` is False, in one line; empty if it is True."""
        info = _tap.info()
        if self._unwanted or info["flags2"] & _INIT2_PASSTHROUGH:
            return self._unwanted
        if not info["negotiated"]:
            return "the kernel has not been asked yet"
        return "the kernel does not offer passthrough (Linux 6.9 or newer has it)"

    @property
    def takeover_possible(self) -> bool:
        """Whether the next daemon can take this mount over."""
        return bool(_tap.info()["takeover_possible"])

    @property
    def is_takeover(self) -> bool:
        """Whether this process took over a live mount (known when pyfuse3.init returns)."""
        return bool(_tap.info()["taken_over"])

    @property
    def takeovers(self) -> int:
        """How often a daemon of this mount was replaced, as the supervisor counts."""
        return _tap.info()["takeovers"]

    @property
    def refusal(self) -> str:
        """Why pyfuse3.init failed, in one line; empty if the tap knows of nothing."""
        return _tap.why()

    def info(self) -> dict[str, int]:
        """What was negotiated: flags, flags2, max_write (bytes), stack_depth, epoch, ..."""
        return _tap.info()

    def open_handles(self) -> list[OpenHandle]:
        """Every handle the kernel holds, files and directories."""
        return [OpenHandle(*entry) for entry in _tap.open_handles()]

    def backings(self) -> dict[int, tuple[int, int]]:
        """inode -> (backing id, handles)."""
        return {inode: (number, count) for inode, number, count, _, _ in _tap.backings()}

    def reconcile(self, open_inodes: Iterable[int]) -> int:
        """Close the ids of all inodes but these; how many were closed.

        A takeover has already closed those without a handle in `open_handles`.
        """
        return _tap.retain(open_inodes)

    def inflight(self) -> list[Request]:
        """Requests that are not answered yet."""
        return [Request(u, Opcode(op), node, c) for u, op, node, c in _tap.inflight()]

    def poisoned(self) -> list[Poisoned]:
        """Requests given up on at this takeover; their effects may be there, in part or whole."""
        return [Poisoned(u, Opcode(op), node, body) for u, op, node, body in _tap.poisoned()]

    def drain_events(self) -> list[Event]:
        """Events since the last call, oldest first. Cheap when there are none."""
        return [Event(EventKind(kind), *rest) for kind, *rest in _tap.drain_events()]

    def counts(self, nodeid: int | None = None) -> dict[Opcode, int]:
        """Requests by opcode since the start: all, or those for an inode that is watched."""
        return {Opcode(op): n for op, n in _tap.counts(nodeid).items()}

    def answer_briefly(self, on: bool = True) -> None:
        """Answer FLUSH and swallow FORGET without asking Python; FLUSH comes as an event."""
        _tap.brief(on)

    def rehearse(self) -> None:
        """pyfuse3.init is to end once libfuse has negotiated as it would in a takeover: the state
        is a copy, and the descriptor leads nowhere."""
        _tap.rehearse()

    def pause(self, on: bool) -> None:
        """Take no further requests (they wait in the kernel), or go on.

        For a planned restart: pause, wait until `inflight` is empty, exit; nothing is sent twice.
        """
        _tap.pause(on)


def load(
    state_fd: int | None,
    want_passthrough: bool = True,
    stack_depth: int = 1,
    *,
    want_takeover: bool = True,
    by_hook: bool = False,
) -> Tap | Reason:
    """Get between pyfuse3 and libfuse; once per process, before pyfuse3 is imported.

    `state_fd`: memory shared with the supervisor, None for none (then no takeover).
    `stack_depth`: 1, or 2 when a cache device is itself a stacked filesystem (overlayfs).
    `by_hook`: go around libfuse's custom I/O as where it has none (from 3.18 on that is usual).
    Raises MountError when the mount is live and there can be no tap.
    """
    fd = -1 if state_fd is None else state_fd
    tap = _load(fd, want_passthrough, stack_depth, want_takeover, by_hook)
    if isinstance(tap, Reason) and state_fd is not None and is_live(state_fd):
        raise MountError(f"the mount cannot be taken over: {tap}")
    return tap


def is_live(state_fd: int) -> bool:
    """Whether a daemon has served this mount before: the kernel will not negotiate again."""
    state = os.pread(state_fd, 4, _INIT_STATE)
    return int.from_bytes(state, sys.byteorder) != 0


def _load(
    state_fd: int, want_passthrough: bool, depth: int, want_takeover: bool, by_hook: bool
) -> Tap | Reason:
    if _missing:
        return Reason(_missing)
    if "pyfuse3" in sys.modules:
        return Reason("the tap must be loaded before pyfuse3")
    unwanted = _no_passthrough(want_passthrough)
    try:
        _tap.configure(state_fd, not unwanted, want_takeover, depth)
    except RuntimeError as error:
        return Reason(str(error))
    import pyfuse3

    problem = _tap.resolve(pyfuse3.__file__, by_hook)
    return Reason(problem) if problem else Tap(unwanted)


def _no_passthrough(wanted: bool) -> str:
    if not wanted:
        return "switched off (mount.passthrough = off)"
    if not _may_administer():
        return "the daemon lacks CAP_SYS_ADMIN"
    return ""


def _may_administer() -> bool:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False
