"""Rows out of a database that SQLite refuses, read page by page.

The format is https://sqlite.org/fileformat2.html: leaf pages of tables say all about their rows, so
neither the header nor the inner pages are needed. Pages of the write-ahead log stand in for those
of the database. A row is known by its shape, since what table a page belongs to is told by pages
that may be gone. Freed pages are read too: a name or two may be older than the last one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cachefs.meta import wal
from cachefs.model.states import GenState

_LEAF = 0x0D
_DEFAULT_PAGE = 4096
_FRAME_HEADER = 24
_LOG_HEADER = 32
_SIZES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8}
_STATES = {state.encode() for state in GenState}
Value = int | bytes | None


@dataclass(slots=True)
class Carved:
    """What was found. Later rows of one number take the place of earlier ones."""

    names: dict[int, tuple[int, bytes, int]] = field(default_factory=dict)
    """Entry -> (directory, name, inode)."""
    generations: dict[int, tuple[int, int, int, bytes]] = field(default_factory=dict)
    """Generation -> (inode, device, file, state)."""
    current: dict[int, int] = field(default_factory=dict)
    """Inode -> generation."""


def carve(database: Path) -> Carved:
    """Every row that can be told from the database and its write-ahead log."""
    found = Carved()
    for rowid, values in _rows(_pages(database)):
        _recognise(found, rowid, values)
    return found


def _recognise(found: Carved, rowid: int, values: list[Value]) -> None:
    match values:
        case [None, int(parent), bytes(name), int(ino)] if _is_name(name):
            found.names[rowid] = (parent, name, ino)
        case [None, int(ino), int(device), int(file), bytes(state), *_] if state in _STATES:
            found.generations[rowid] = (ino, device, file, state)
        case [None, int(), int(), int(), int(), int(), int(), int(), int(), _, _, gen, *_]:
            if isinstance(gen, int) and len(values) >= 13:
                found.current[rowid] = gen


def _is_name(name: bytes) -> bool:
    return 0 < len(name) <= 255 and b"/" not in name and b"\0" not in name


def _pages(database: Path) -> dict[int, bytes]:
    """Number -> page, the newest there is."""
    raw = database.read_bytes() if database.exists() else b""
    size = struct.unpack(">H", raw[16:18])[0] if len(raw) >= 18 else 0
    size = 65536 if size == 1 else size
    if size < 512 or size & (size - 1):
        size = _DEFAULT_PAGE
    pages = {at // size + 1: raw[at : at + size] for at in range(0, len(raw) - size + 1, size)}
    pages.update(_log_pages(database, size))
    return pages


def _log_pages(database: Path, size: int) -> Iterator[tuple[int, bytes]]:
    try:
        log = Path(f"{database}-wal").read_bytes()
    except FileNotFoundError:
        return
    step = _FRAME_HEADER + size
    sound = wal.examine(database)
    # Without its header, the first frame tells which round of the log is the last.
    salts = struct.pack(">2I", *sound.salts) if sound.page_size else log[40:48]
    for at in range(_LOG_HEADER, len(log) - step + 1, step):
        if log[at + 8 : at + 16] == salts:
            yield struct.unpack(">I", log[at : at + 4])[0], log[at + _FRAME_HEADER : at + step]


def _rows(pages: dict[int, bytes]) -> Iterator[tuple[int, list[Value]]]:
    for number, page in sorted(pages.items()):
        start = 100 if number == 1 else 0
        if page[start] != _LEAF:
            continue
        (count,) = struct.unpack_from(">H", page, start + 3)
        for index in range(min(count, len(page) // 4)):
            try:
                (at,) = struct.unpack_from(">H", page, start + 8 + 2 * index)
                yield _cell(pages, page, at)
            except (IndexError, ValueError, struct.error):
                continue  # That one is beyond reading; its neighbours need not be.


def _cell(pages: dict[int, bytes], page: bytes, at: int) -> tuple[int, list[Value]]:
    total, at = _varint(page, at)
    rowid, at = _varint(page, at)
    usable = len(page)
    most, least = usable - 35, (usable - 12) * 32 // 255 - 23
    local = total
    if total > most:
        local = least + (total - least) % (usable - 4)
        local = least if local > most else local
    payload = bytearray(page[at : at + local])
    if local < total:
        (following,) = struct.unpack_from(">I", page, at + local)
        while following and len(payload) < total:
            more = pages.get(following, b"")
            if len(more) < 4:
                raise ValueError("a page is missing")
            (following,) = struct.unpack_from(">I", more)
            payload += more[4 : 4 + total - len(payload)]
    if len(payload) < total:
        raise ValueError("cut short")
    return rowid, _record(bytes(payload))


def _record(payload: bytes) -> list[Value]:
    length, at = _varint(payload, 0)
    if not at <= length <= len(payload):
        raise ValueError("no record")
    kinds = []
    while at < length:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values: list[Value] = []
    for kind in kinds:
        size = _SIZES.get(kind, (kind - 12) // 2 if kind >= 12 else 0)
        raw = payload[at : at + size]
        if len(raw) < size:
            raise ValueError("cut short")
        at += size
        values.append(_value(kind, raw))
    return values


def _value(kind: int, raw: bytes) -> Value:
    if kind >= 12:
        return raw
    if kind in (8, 9):
        return kind - 8
    return int.from_bytes(raw, "big", signed=True) if kind in _SIZES else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(9):
        byte = data[at + count]
        if count == 8:
            return value << 8 | byte, at + 9
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + count + 1
    raise ValueError("no number")
