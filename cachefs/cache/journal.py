"""The journal of small files: what the tap did by itself and the database does not know yet.

One file beside the database, written by the tap (`cachefs/fuse/_tap_journal.c`) and read here: by
the daemon that made it each time it folds it into the database, or by the next one when that was
killed in between. After a header come records, one behind the other, each with a checksum and the
number that follows on the one before; what does not fit in ends them. The numbers go on and
the database knows the last one that it has, so nothing is taken in twice. The checksums begin with
a seed that is new at each start, so nothing older is taken for a record.

A journal of another boot counts for nothing: it was never synced, and neither were its files.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from cachefs.cache.system import boot_id
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

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fd = -1
        self.seed = 0

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

    def begin(self) -> None:
        """An empty journal of this daemon's. OSError."""
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.seed = secrets.randbits(32)
        os.posix_fallocate(self.fd, 0, START + ROOM)
        reach(Point.JOURNAL_AFTER_ALLOCATE)
        os.pwrite(self.fd, _HEADER.pack(_MAGIC, 1, self.seed, boot_id().encode()), 0)
        reach(Point.JOURNAL_AFTER_HEADER)

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
