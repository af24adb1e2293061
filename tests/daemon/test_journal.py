"""The journal of small files: what is a record, and what only looks like one."""

from __future__ import annotations

import errno
import os
import random
import struct
import zlib
from pathlib import Path

import pytest

from cachefs.cache import journal
from cachefs.cache.journal import CREATED, RELEASED, ROOM, START, Journal, Record, parse

SEED = 4711
_HEAD = struct.Struct("=HHQQQQQQQqIIIIII")


def packed(record: Record, seed: int = SEED) -> bytes:
    """As the tap writes it."""
    size = (4 + _HEAD.size + len(record.name) + 7) // 8 * 8
    head = _HEAD.pack(
        size, len(record.name), record.seq, record.unique, record.fh, record.parent, record.ino,
        record.gen, record.file, record.time_ns, record.kind, record.device, record.mode,
        record.uid, record.gid, record.flags,
    )  # fmt: skip
    rest = (head + record.name).ljust(size - 4, b"\0")
    return struct.pack("=I", zlib.crc32(rest, seed)) + rest


def records(first: int, count: int) -> list[Record]:
    return [
        Record(
            seq, CREATED if seq % 2 else RELEASED, seq + 7, seq * 3, 1, seq, seq, seq, 10**18 + seq,
            0, 0o100644, 1, 2, 1, b"name" * (seq % 50),
        )
        for seq in range(first, first + count)
    ]  # fmt: skip


def test_records_come_back_as_they_were_written() -> None:
    wanted = records(1, 60)
    data = b"".join(map(packed, wanted))
    assert parse(data, SEED) == (wanted, len(data))
    assert parse(data + bytes(500), SEED) == (wanted, len(data))


def test_nothing_follows_what_is_cut_or_changed() -> None:
    wanted = records(1, 30)
    data = b"".join(map(packed, wanted))
    rng = random.Random(1)
    for _ in range(300):
        at = rng.randrange(len(data))
        found, end = parse(data[:at], SEED)
        assert found == wanted[: len(found)] and end <= at
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        found, end = parse(bytes(damaged), SEED)
        assert found == wanted[: len(found)] and end <= at


def test_older_records_behind_newer_ones_do_not_count() -> None:
    """The journal is begun anew after each fold, over what was in it."""
    old, new = records(1, 20), records(21, 3)
    data = b"".join(map(packed, new))
    over = data + b"".join(map(packed, old))[len(data) :]
    assert parse(over, SEED)[0] == new
    assert parse(b"".join(map(packed, records(5, 3))), SEED + 1)[0] == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_what_is_left_is_found_by_the_next(path: Path) -> None:
    first = Journal(path)
    assert first.left() == []
    first.begin()
    wanted = records(1, 5)
    with path.open("r+b") as file:
        file.seek(START)
        for record in wanted:
            file.write(packed(record, first.seed))
    assert Journal(path).left() == wanted
    size = sum(len(packed(record)) for record in wanted)
    assert first.read(size) == wanted
    with pytest.raises(OSError, match="damaged"):
        first.read(size + 8)
    second = Journal(path)
    second.begin()
    assert Journal(path).left() == []
    assert path.stat().st_size == START + ROOM
    first.close()
    second.close()


def test_a_journal_in_memory_is_found_from_beside_the_database(path: Path, ram_dir: Path) -> None:
    """Whoever follows takes it away, unless the daemon that made it lives."""
    first = Journal(path, ram_dir)
    first.begin()
    (place,) = ram_dir.iterdir()
    place.write_bytes(place.read_bytes()[:START] + packed(records(1, 1)[0], first.seed))
    assert first.in_memory and not Journal(path).in_memory
    assert len(Journal(path).left()) == len(Journal(path, ram_dir).left()) == 1
    second = Journal(path, ram_dir)  # as of a copy of the cache's directory
    second.begin()
    assert place.exists() and Journal(path).left() == []
    second.close()
    third = Journal(path, ram_dir)
    third.begin()
    assert len(list(ram_dir.iterdir())) == 2
    third.remove()
    assert list(ram_dir.iterdir()) == [place] and not path.is_symlink()
    assert Journal(path).left() == []
    first.close()
    third.close()


def test_the_journal_of_another_boot_counts_for_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Journal(path)
    first.begin()
    with path.open("r+b") as file:
        file.seek(START)
        file.write(packed(records(1, 1)[0], first.seed))
    assert len(Journal(path).left()) == 1
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    assert Journal(path).left() == []
    first.close()


def test_a_database_takes_in_what_goes_on_from_it(path: Path) -> None:
    """One of a copy of the cache, made before, finds the journal of the original further on."""
    first = Journal(path)
    first.begin()
    with path.open("r+b") as file:
        file.seek(START)
        file.write(b"".join(packed(record, first.seed) for record in records(8, 3)))
    assert Journal(path).left_after(7) == records(8, 3)
    assert Journal(path).left_after(8) == records(9, 2)
    assert Journal(path).left_after(10) == Journal(path).left_after(6) == []
    first.close()


def test_memory_without_room_for_a_journal(
    path: Path, ram_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, start: int, count: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    made = Journal(path, ram_dir)
    with pytest.raises(OSError, match="full"):
        made.begin()
    assert made.fd == -1 and list(ram_dir.iterdir()) == [] and not path.is_symlink()


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"CFSMALL1", bytes(70), b"\xff" * 5000])
def test_a_file_of_anything(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert Journal(path).left() == []
