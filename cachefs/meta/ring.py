"""Commits that a disk has not taken yet, in memory that outlives the daemon.

While the disk is slow, the write-ahead log (WAL) lacks what was committed last; it waits in a ring,
a file of a tmpfs (`_walring.c` writes it, and describes in what order). A file beside the database
names the ring. Whoever opens the database first brings what a dead daemon left there to the log:
the same bytes to the same places, so it may be done any number of times.

It is done only where it fits: the ring has to name the directory that it is found from, and the log
has to begin as the ring remembers it; a log that went on without the ring, with commits of its own
where the ring has others, is left alone. What does not fit, or is gone, is told (`Left.note`).

None of this outlives the machine, nor need it: what was not synced before is not trusted then.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cachefs.failpoints import Point, reach
from cachefs.meta import wal

SIZE = 16 << 20
"""Bytes of commits that a stalled disk may be behind. Memory is taken as it is needed."""
_MAGIC = b"cfswal1\0"
_HEAD = struct.Struct("=8sQ16sQQQQ32s")
"""Magic, size of the data, id, inode number of the directory, first and last entry that are
pending, position up to which the log has the data, the log's header before what is pending."""
_HEAD_BYTES = 8192
_TABLE = 512
_ENTRY = struct.Struct("=4Q")
"""Place in the log, position of the bytes, how many, kind."""
_ENTRIES = 240
_DATA, _SYNC = 0, 1
_MODE = 0o600
_DYING, _DYING_PAUSE = 10.0, 0.02
"""Seconds."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes for the log; none: what came before has to be on the disk first."""

    offset: int
    data: bytes


@dataclass(slots=True)
class Left:
    """What was found of a ring."""

    writes: list[Write] = field(default_factory=list)
    base: bytes = b""
    fd: int | None = None
    """The ring, locked, if it may be used again."""
    note: str = ""
    """What a person should know."""
    is_gone: bool = False
    """The ring is not there any more; whether anything was pending cannot be told. As a rule
    nothing was: a disk that is well takes all of it at once."""

    def close(self) -> None:
        """Leave the ring alone."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def pointer(database: Path) -> Path:
    """The file that names the ring of a database."""
    return database.with_name(f"{database.name}-ring")


def files(database: Path) -> list[Path]:
    """What a database has in memory: its ring, and the index that goes with that."""
    named = _named(database)
    if isinstance(named, str):
        return []
    return [Path(named[0]), Path(named[0]).with_suffix(".index")]


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


# -- what was left --------------------------------------------------------------------------------


def recover(database: Path) -> Left:
    """Bring what a dead daemon left to the log. The caller has the cache's lock, and closes what
    is returned. OSError: the log cannot be written; the ring is as it was."""
    left = _find(database)
    try:
        left.note = left.note or (_why_not(database, left) if left.writes else "")
        if left.note:
            left.close()  # It stays where it is, for people.
        elif left.writes:
            _replay(database, left.writes)
        if left.fd is not None:
            _forget(left.fd)
    except BaseException:
        left.close()
        raise
    return left


def pending(database: Path) -> int:
    """Bytes that a daemon, which may live, has not brought to the log yet."""
    named = _named(database)
    if isinstance(named, str):
        return 0
    path, _ = named
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    with _closing(fd):
        return sum(len(each.data) for each in _read(fd)[0])


def _find(database: Path) -> Left:
    named = _named(database)
    if isinstance(named, str):
        return Left(note=named)
    path, name = named
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        note = f"the memory where commits wait for the disk is gone: {error}"
        return Left(note=note, is_gone=True)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        foreign = _whose(database, fd, path, name)
        if foreign is not None:
            return Left(note=foreign)
        if not _take(fd):
            return Left(note=f"{path}, where commits wait for the disk, is in use")
        stack.pop_all()
        return Left(*_read(fd), fd)


def _whose(database: Path, fd: int, path: str, name: bytes) -> str | None:
    """None: the ring of this database. Else what is to be said; nothing of a copy's original."""
    status, raw = os.fstat(fd), os.pread(fd, _HEAD.size, 0)
    if status.st_uid != pointer(database).stat().st_uid:
        return f"{path}, where commits wait for the disk, is another user's"
    if len(raw) < _HEAD.size:
        return f"{path} is no ring"
    magic, size, found, directory, *_ = _HEAD.unpack(raw)
    ours = directory == database.parent.stat().st_ino and found == name and magic == _MAGIC
    if ours and status.st_size == _HEAD_BYTES + size:
        return None
    return "" if directory else f"{path} is no ring"


def _take(fd: int) -> bool:
    """Lock it. The caller has the cache, so who has its ring is dying: whatever looks at the memory
    of a process that was killed may keep that from going for a moment."""
    deadline = time.monotonic() + _DYING
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(_DYING_PAUSE)


def _named(database: Path) -> tuple[str, bytes] | str:
    """Path and id of the ring, or what is to be said."""
    try:
        told = json.loads(pointer(database).read_bytes())
        path, name, boot = str(told["ring"]), bytes.fromhex(told["id"]), told["boot"]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{pointer(database)} makes no sense: {error}"
    if boot != _boot_id():
        return ""  # The machine went down, and memory with it.
    return path, name


def _read(fd: int) -> tuple[list[Write], bytes]:
    """What is pending, in order. Of an entry that is being published, what is published."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as ring:
        magic, size, _, _, first, last, done, base = _HEAD.unpack_from(ring)
        found: list[Write] = []
        if magic != _MAGIC or last < first or last - first > _ENTRIES or size <= 0:
            return [], base
        for number in range(first, last):
            offset, at, length, kind = _ENTRY.unpack_from(
                ring, _TABLE + number % _ENTRIES * _ENTRY.size
            )
            skipped = max(done - at, 0) if kind == _DATA else 0
            if kind == _SYNC:
                found.append(Write(0, b""))
            elif skipped < length <= skipped + size:
                data = _bytes(ring, size, at + skipped, length - skipped)
                found.append(Write(offset + skipped, data))
        return found, base


def _bytes(ring: mmap.mmap, size: int, at: int, length: int) -> bytes:
    start = at % size
    data = ring[_HEAD_BYTES + start : _HEAD_BYTES + min(start + length, size)]
    return data + ring[_HEAD_BYTES : _HEAD_BYTES + length - len(data)]


def _forget(fd: int) -> None:
    """Nothing is pending any more."""
    with mmap.mmap(fd, _HEAD_BYTES) as head:
        first = _HEAD.size - 32 - 24  # as long as `last` is not beyond it, nothing is pending
        struct.pack_into("=Q", head, first, struct.unpack_from("=Q", head, first + 8)[0])


# -- does it fit ----------------------------------------------------------------------------------


def _why_not(database: Path, left: Left) -> str:
    """Why what is pending does not belong into the log as it is now; empty if it does."""
    total = sum(len(each.data) for each in left.writes)
    what = f"{total} bytes of commits that waited in memory do not fit to {database}-wal"
    header = _log_bytes(database, 0, len(left.base)).ljust(len(left.base), b"\0")
    fresh = _pending_bytes(left.writes, 0, len(left.base))
    if header not in (left.base, fresh):
        return f"{what}: it is another one"
    if fresh in (None, header) and _went_on(database, left.writes):
        return f"{what}: it went on without them"
    return ""


def _log_bytes(database: Path, at: int, count: int) -> bytes:
    try:
        with open(f"{database}-wal", "rb") as file:
            return os.pread(file.fileno(), count, at)
    except FileNotFoundError:
        return b""


def _pending_bytes(writes: list[Write], at: int, count: int) -> bytes | None:
    """A range of the log, if what is pending has all of it."""
    found = bytearray(count)
    known = bytearray(count)
    for each in writes:
        start, end = max(each.offset, at), min(each.offset + len(each.data), at + count)
        if start < end:
            found[start - at : end - at] = each.data[start - each.offset : end - each.offset]
            known[start - at : end - at] = b"\1" * (end - start)
    return bytes(found) if all(known) else None


def _went_on(database: Path, writes: list[Write]) -> bool:
    """Whether the log has a commit where the ring has another."""
    log = wal.examine(database)
    if log.damage is not None or not log.page_size:
        return False
    places = [each.offset for each in writes if each.data]
    for at, data, commit in wal.chain(database, log, min(places)):
        ours = _pending_bytes(writes, at, len(data))
        if ours is None:
            return False  # Beyond what is pending.
        if commit and ours != data:
            return True
    return False


def _replay(database: Path, writes: list[Write]) -> None:
    fd = os.open(f"{database}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    with _closing(fd):
        for each in writes:
            _write_at(fd, each)
        os.fdatasync(fd)


def _write_at(fd: int, write: Write) -> None:
    if not write.data:
        os.fdatasync(fd)
    done = 0
    while done < len(write.data):
        done += os.pwrite(fd, write.data[done:], write.offset + done)


@contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


# -- a ring for this daemon -----------------------------------------------------------------------


def make(database: Path, directory: Path) -> int:
    """A new ring in `directory`, which is in memory; its descriptor, locked. OSError."""
    name = secrets.token_bytes(16)
    path = directory / f"{name.hex()}.ring"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, _HEAD_BYTES + SIZE)
        inode = database.parent.stat().st_ino
        os.posix_fallocate(fd, 0, _HEAD_BYTES)
        os.pwrite(fd, _HEAD.pack(_MAGIC, SIZE, name, inode, 0, 0, 0, bytes(32)), 0)
        reach(Point.RING_AFTER_CREATE)
        _name(database, path, name)
        reach(Point.RING_AFTER_NAME)
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise
    return fd


def _name(database: Path, path: Path, name: bytes) -> None:
    told = {"ring": str(path), "id": name.hex(), "boot": _boot_id()}
    fresh = pointer(database).with_suffix(".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(fresh, flags, _MODE), "w") as file:
        json.dump(told, file)
    os.replace(fresh, pointer(database))


def index_of(fd: int) -> Path:
    """Where SQLite's shared-memory file of the database with that ring is to be."""
    return Path(os.readlink(f"/proc/self/fd/{fd}")).with_suffix(".index")


def discard(database: Path) -> None:
    """Of a ring of this daemon: nothing is pending, and nobody goes on. It goes, with its name;
    both stay, to be used again, where nothing can be removed."""
    named = _named(database)
    with suppress(OSError):
        pointer(database).unlink(missing_ok=True)
        if not isinstance(named, str):
            Path(named[0]).with_suffix(".index").unlink(missing_ok=True)
            Path(named[0]).unlink(missing_ok=True)
