"""What SQLite passes over in silence: a write-ahead log that is damaged.

SQLite reads a WAL file up to the first frame that does not fit and takes the rest for leftovers,
and a WAL whose header makes no sense for an empty one. Either may be right, after a power cut, or
the loss of everything committed since the last checkpoint. Here the file is looked at before and
after SQLite does, so that nobody takes a tree of yesterday for that of today.

Format: https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = (0x377F0682, 0x377F0683)
_VALID_FRAMES_AT = 16
"""Where the shared-memory file tells how many frames SQLite took for valid (mxFrame)."""
_INDEX_HEADER = 48
"""Bytes; it is there twice, and the same unless it is being written."""
_SALTS_AT = 32


@dataclass(frozen=True, slots=True)
class Wal:
    """A WAL file as it lies there."""

    size: int
    """Bytes; 0: there is none, or nothing is in it."""
    page_size: int = 0
    salts: tuple[int, int] = (0, 0)
    damage: str | None = None
    """Why nothing in it can be read; None if it can, or if it is empty."""


def examine(path: Path) -> Wal:
    """Look at the WAL file of the database at `path`. OSError."""
    try:
        with open(f"{path}-wal", "rb") as file:
            size, raw = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
    except FileNotFoundError:
        return Wal(0)
    if size == 0 or (not any(raw) and _is_blank(path)):
        return Wal(0)  # Nothing of it had reached the disk when the machine went down.
    if len(raw) < _HEADER.size:
        return Wal(size, damage=f"it has {size} bytes, less than a header")
    magic, _, page_size, _, *salts, first, second = _HEADER.unpack(raw)
    if magic not in _MAGIC or not 512 <= page_size <= 65536 or page_size & (page_size - 1):
        return Wal(size, damage="its header is no header of a write-ahead log")
    if checksum(raw[:24], big_endian=bool(magic & 1)) != (first, second):
        return Wal(size, damage="the checksum of its header is wrong")
    return Wal(size, page_size, (salts[0], salts[1]))


def _is_blank(path: Path) -> bool:
    with open(f"{path}-wal", "rb") as file:
        return not any(any(block) for block in iter(lambda: file.read(1 << 16), b""))


def checksum(data: bytes, *, big_endian: bool, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """SQLite's own checksum of `data`, whose length is a multiple of 8, that follows `before`."""
    first, second = before
    words = struct.unpack(f"{'>' if big_endian else '<'}{len(data) // 4}I", data)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


def header(path: Path) -> bytes:
    """The first bytes of the WAL file. OSError."""
    with open(f"{path}-wal", "rb") as file:
        return file.read(_HEADER.size)


def salts_in(header: bytes) -> bytes:
    """What tells one round of the log from another; also in each of its frames."""
    return header[16:24]


def frames(path: Path, wal: Wal, start: int = 0) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """(offset of the page, its number, pages after the commit or 0, salts) of each frame from the
    one with index `start` on."""
    if not wal.page_size:
        return
    step = _FRAME.size + wal.page_size
    with open(f"{path}-wal", "rb") as file:
        for at in range(_HEADER.size + start * step, wal.size - step + 1, step):
            raw = os.pread(file.fileno(), _FRAME.size, at)
            if len(raw) == _FRAME.size:
                page, commit, one, other, *_ = _FRAME.unpack(raw)
                yield at + _FRAME.size, page, commit, (one, other)


def chain(path: Path, wal: Wal, offset: int) -> Iterator[tuple[int, bytes, int]]:
    """(offset, bytes, pages after the commit or 0) of each frame from `offset` on that follows
    from the one before: whose salts and checksum are right."""
    step = _FRAME.size + wal.page_size
    index = -(-(offset - _HEADER.size) // step) if offset > _HEADER.size else 0
    with open(f"{path}-wal", "rb") as file:
        at = _HEADER.size + index * step
        seed = os.pread(file.fileno(), 8, at - step + 16 if index else _HEADER.size - 8)
        (magic,) = struct.unpack(">I", os.pread(file.fileno(), 4, 0))
        while len(seed) == 8 and len(raw := os.pread(file.fileno(), step, at)) == step:
            before = struct.unpack(">2I", seed)
            found = checksum(raw[:8] + raw[24:], big_endian=bool(magic & 1), before=before)
            _, commit, *salts, one, other = _FRAME.unpack_from(raw)
            if (*salts, one, other) != (*wal.salts, *found):
                return
            yield at, raw, commit
            at, seed = at + step, raw[16:24]


def open_index(path: Path, index: Path | None = None) -> int:
    """A descriptor of the shared-memory file of an open database, `index` if it is not beside it.
    Close it after the database: that would end SQLite's locks on it, and another process would
    take it for nobody's."""
    return os.open(index or f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)


def valid_frames(index: int) -> int:
    """How many frames SQLite took for valid; ask while a connection is open that has read."""
    raw = os.pread(index, 4, _VALID_FRAMES_AT)
    return int(struct.unpack("=I", raw)[0]) if len(raw) == 4 else 0


def taken(index: int) -> tuple[int, bytes]:
    """(frames that are committed, salts of the round that they are of), now."""
    while True:
        raw = os.pread(index, 2 * _INDEX_HEADER, 0)
        if raw[:_INDEX_HEADER] == raw[_INDEX_HEADER:]:
            (count,) = struct.unpack_from("=I", raw.ljust(_INDEX_HEADER, b"\0"), _VALID_FRAMES_AT)
            return count, raw[_SALTS_AT : _SALTS_AT + 8]


def lost_commits(path: Path, wal: Wal, index: int) -> int:
    """Transactions in the WAL file, of its present round, that SQLite could not reach."""
    taken = valid_frames(index)
    return sum(
        bool(commit) and salts == wal.salts for _, _, commit, salts in frames(path, wal, taken)
    )
