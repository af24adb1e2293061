"""The journal of small files: what the tap did by itself and the database does not know yet.

One file in memory (`tmpfs`), to which a symbolic link beside the database leads: a disk that takes
nothing for a while must not hold up who writes it. It outlives every process, but not the machine,
as it need not (below). The tap writes it (`cachefs/fuse/_tap_journal.c`), and it is read here: by
the daemon that made it each time it folds it into the database, or by the next one when that was
killed in between. After a header come records, one behind the other, each with a checksum and the
number that follows on the one before; what does not fit in ends them. The numbers go on and
the database knows the last one that it has, so nothing is taken in twice. The checksums begin with
a seed that is new at each start, so nothing older is taken for a record.

A journal of another boot counts for nothing: it was never synced, and neither were its files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cachefs.cache.system import DeviceKind, boot_id, device_kind, filesystem_type
from cachefs.failpoints import Point, reach

ROOM = 192 << 10
"""Bytes for records: more than all spare files can need."""
START = 64
"""Where records begin."""
CREATED, RELEASED = 1, 2
_MAGIC = b"CFSMALL1"
_HEADER = struct.Struct("=8sII40s")
_RECORD = struct.Struct("=IHHQQQQQQQqIIIIII")
_CHECKED_FROM = 4
_SUFFIX = ".journal"


class Record(NamedTuple):
    """One thing that was done. From `parent` on: of CREATED only."""

    seq: int
    kind: int
    unique: int
    """Of the request."""
    fh: int
    parent: int
    ino: int
    gen: int
    file: int
    time_ns: int
    device: int
    mode: int
    """With the type bits."""
    uid: int
    gid: int
    flags: int
    """As given to open(2)."""
    name: bytes


class Journal:
    """The file, from one start of a daemon to the next."""

    def __init__(self, path: Path, memory: Path | None = None) -> None:
        """`path`: beside the database. `memory`: a directory in memory for the file itself."""
        self._path = path
        self._memory = memory
        self.fd = -1
        self.seed = 0

    @property
    def file(self) -> Path | None:
        """The file in memory; None: there is none."""
        return self._target()

    def left(self) -> list[Record]:
        """What the daemon before left, oldest first; some of it may be in the database."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        if len(data) < START:
            return []
        magic, _, seed, boot = _HEADER.unpack_from(data)
        if magic != _MAGIC or boot.rstrip(b"\0") != boot_id().encode():
            return []
        return parse(data[START : START + ROOM], seed)[0]

    def left_after(self, known: int) -> list[Record]:
        """Of that, what a database lacks that has all up to `known`. Nothing if the journal does
        not go on from there: the cache is a copy, or was restored from one, and its link leads to
        what became of the original."""
        fresh = [record for record in self.left() if record.seq > known]
        return fresh if fresh and fresh[0].seq == known + 1 else []

    def begin(self) -> None:
        """An empty journal of this daemon's in place of the one before. OSError."""
        place = self._path
        if self._memory is not None:
            place = self._memory / f"{secrets.token_hex(16)}{_SUFFIX}"
        elif place.is_symlink():
            place.unlink()
        self.fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._fill(place)
        except OSError:
            self.close()
            if place is not self._path:
                place.unlink(missing_ok=True)
            raise

    def _fill(self, place: Path) -> None:
        self.seed = secrets.randbits(32)
        os.posix_fallocate(self.fd, 0, START + ROOM)
        reach(Point.JOURNAL_AFTER_ALLOCATE)
        os.pwrite(self.fd, _HEADER.pack(_MAGIC, 1, self.seed, boot_id().encode()), 0)
        reach(Point.JOURNAL_AFTER_HEADER)
        if place is not self._path:
            self._lead_to(place)

    def _lead_to(self, place: Path) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        former = self._target()
        self._link(place)
        if former is not None:
            _remove_unused(former)

    def _link(self, place: Path) -> None:
        link = self._path.with_name(f"{self._path.name}.new")
        link.unlink(missing_ok=True)
        link.symlink_to(place)
        reach(Point.JOURNAL_AFTER_LINK)
        link.replace(self._path)

    def _target(self) -> Path | None:
        """Where the link leads to, if that is a journal."""
        target = self._path.readlink() if self._path.is_symlink() else None
        return target if target is not None and target.suffix == _SUFFIX else None

    @property
    def in_memory(self) -> bool:
        """Whether writing to it waits for no disk."""
        place = self._memory if self._memory is not None else self._path.parent
        return device_kind(filesystem_type(place)) is DeviceKind.RAM

    def remove(self) -> None:
        """All that was in it is in the database, and nothing is added any more. OSError."""
        target = self._target()
        if target is not None:
            target.unlink(missing_ok=True)
            self._path.unlink()

    def read(self, size: int) -> list[Record]:
        """The first `size` bytes of records. OSError: not all of them can be read."""
        records, end = parse(os.pread(self.fd, size, START), self.seed)
        if end != size:
            raise OSError(errno.EIO, "the journal of small files is damaged")
        return records

    def close(self) -> None:
        """Give the file up; what is in it stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _remove_unused(place: Path) -> None:
    """A copy of a cache directory leads to the journal of the original, which may be in use."""
    try:
        fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    with open(fd, "rb"), suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        place.unlink()


def parse(data: bytes, seed: int) -> tuple[list[Record], int]:
    """The records that `data` begins with, and where they end."""
    found: list[Record] = []
    at = 0
    while at + _RECORD.size <= len(data):
        crc, size, name_size, seq, unique, fh, parent, ino, gen, file, time_ns, *rest = (
            _RECORD.unpack_from(data, at)
        )
        end, name = at + size, at + _RECORD.size
        if name + name_size > end or end > len(data) or (found and seq != found[-1].seq + 1):
            break
        if zlib.crc32(data[at + _CHECKED_FROM : end], seed) != crc:
            break
        kind, device, mode, uid, gid, flags = rest
        found.append(
            Record(
                seq, kind, unique, fh, parent, ino, gen, file, time_ns, device, mode, uid, gid,
                flags, data[name : name + name_size],
            )
        )  # fmt: skip
        at = end
    return found, at
