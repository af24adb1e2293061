"""A daemon never takes a damaged database for an empty one, nor an old state for the last one."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.cache.system import boot_id
from cachefs.daemon.storage import open_meta
from cachefs.errors import CacheError
from cachefs.flush.queue import EffectQueue
from cachefs.flush.recovery import Recovery
from cachefs.meta import Meta, ring
from cachefs.meta.database import SCHEMA_VERSION
from cachefs.model.effects import OrderRules
from tests.fsck.cache import BODIES, Cache

PAGE = 4096
FRAME = PAGE + 24


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def _killed(cache: Cache, changes: int = 3) -> None:
    """What a daemon that was killed leaves: its last changes are in the log alone."""
    meta = Meta(cache.database)
    meta.set_setting("boot", boot_id())
    meta.db.checkpoint()
    for number in range(changes):
        meta.set_setting(f"change {number}", "x" * 3000)
    spare = cache.directory.parent / "spare"
    shutil.copytree(cache.database.parent, spare)
    meta.close()
    shutil.rmtree(cache.database.parent)
    spare.rename(cache.database.parent)


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def _first_commit(cache: Cache) -> int:
    """Where the log's first frame that ends a transaction begins."""
    log = cache.log.read_bytes()
    starts = range(32, len(log), FRAME)
    return next(at for at in starts if struct.unpack(">I", log[at + 4 : at + 8])[0])


def _remove(cache: Cache) -> None:
    for path in cache.database.parent.glob("cachefs.db*"):
        path.unlink()


DAMAGE: dict[str, Callable[[Cache], object]] = {
    "missing": _remove,
    "missing, the log is there": lambda c: c.database.unlink(),
    "empty": lambda c: os.truncate(c.database, 0),
    "no tables": lambda c: _replace_by_empty(c.database),
    "garbage": lambda c: c.database.write_bytes(os.urandom(50_000)),
    "zeros": lambda c: c.database.write_bytes(bytes(50_000)),
    "cut short": lambda c: os.truncate(c.database, 5 * PAGE),
    "a page of garbage": lambda c: _overwrite(c.database, 2 * PAGE, os.urandom(PAGE)),
    "a garbage log": lambda c: c.log.write_bytes(os.urandom(50_000)),
    "a log without header": lambda c: _overwrite(c.log, 0, bytes(32)),
    "a log with a wrong header": lambda c: _overwrite(c.log, 8, b"\x00\x00\x08\x00"),
    "a bit in the log": lambda c: _overwrite(c.log, _first_commit(c) + 2000, b"\xff\x00\xff"),
    "a few bytes of a log": lambda c: os.truncate(c.log, 20),
}


def _replace_by_empty(path: Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA user_version=7")
    db.close()


def _contents(cache: Cache) -> dict[str, bytes]:
    kept = (path for path in cache.directory.rglob("*") if path.is_file())
    ours = ("LOCK", "heartbeat", "cachefs.db-shm")
    found = {str(path): path.read_bytes() for path in kept if path.name not in ours}
    return {path: data for path, data in found.items() if data or not path.endswith("-wal")}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_database_stops_the_start(cache: Cache, how: str) -> None:
    """One line that says what and what to do; nothing is changed."""
    _killed(cache)
    DAMAGE[how](cache)
    before = _contents(cache)
    device = CacheDevice(0, cache.directory)
    try:
        with pytest.raises(CacheError) as caught:
            open_meta([device]).close()
    finally:
        device.close()
    assert "cachefs.db" in str(caught.value)
    assert "\n" not in f"{caught.value}{caught.value.hint}"
    assert "--salvage" in caught.value.hint
    assert _contents(cache) == before


def test_a_sound_one_is_opened(cache: Cache) -> None:
    _killed(cache)
    device = CacheDevice(0, cache.directory)
    meta = open_meta([device])
    assert meta.setting("change 2") is not None
    assert meta.db.lost_commits == 0
    meta.close()
    device.close()


def test_a_new_cache_is_made(tmp_path: Path) -> None:
    for _ in range(2):  # and one that was killed before anything was in it
        device = CacheDevice(0, tmp_path / "new")
        open_meta([device]).close()
        device.close()
        os.truncate(tmp_path / "new" / "meta" / "cachefs.db", 0)


def test_a_newer_schema_is_refused(cache: Cache) -> None:
    cache.sql(f"UPDATE setting SET value='{SCHEMA_VERSION + 1}' WHERE key='schema_version'")
    before = _contents(cache)
    device = CacheDevice(0, cache.directory)
    with pytest.raises(CacheError, match=f"schema version {SCHEMA_VERSION + 1}") as caught:
        open_meta([device])
    device.close()
    assert "newer cachefs" in caught.value.hint
    assert _contents(cache) == before


def _recover(cache: Cache, boot: str) -> None:
    device = CacheDevice(0, cache.directory)
    meta = Meta(cache.database)
    queue = EffectQueue(meta, OrderRules())
    recovery = Recovery(meta, queue, [device], forget_inode=lambda ino: None, boot=lambda: boot)
    recovery.run()
    meta.close()
    device.close()


def _new_file(cache: Cache, number: int, body: bytes) -> None:
    cache.file(number).parent.mkdir(exist_ok=True)
    cache.file(number).write_bytes(body)


@pytest.mark.parametrize("how", ["log cut", "log gone", "power cut", "memory gone"])
def test_what_a_lost_log_described_is_set_aside(cache: Cache, how: str) -> None:
    """Files that the database forgot with its last commits are kept, for a person to look at."""
    _killed(cache, changes=5)
    _new_file(cache, 9, b"acknowledged")
    _new_file(cache, 2**20, b"")
    if how == "log cut":
        os.truncate(cache.log, _first_commit(cache) + FRAME)
    elif how == "log gone":
        cache.log.unlink()
        _new_file(cache, 0, b"of old")
    elif how == "memory gone":
        ring.pointer(cache.database).write_text(
            json.dumps({"ring": "/dev/shm/none.ring", "id": "00", "boot": boot_id()})
        )
        _new_file(cache, 0, b"of old")
    else:
        _overwrite(cache.log, _first_commit(cache) + FRAME + 2000, b"\xff\x00\xff")
        _new_file(cache, 0, b"of old")
    _recover(cache, "another boot" if how == "power cut" else boot_id())
    aside = {path.read_bytes() for path in (cache.directory / "salvaged").iterdir()}
    assert b"acknowledged" in aside
    assert (b"of old" in aside) == (how != "log cut")
    assert b"" not in aside
    assert set(BODIES.values()) <= cache.every_byte()
    _recover(cache, "another boot")
    meta = Meta(cache.database)
    assert meta.db.lost_commits == 0
    meta.close()


def test_a_leftover_of_an_ordinary_kill_is_removed(cache: Cache) -> None:
    """The row went first, the file should have followed: nobody wants it."""
    _killed(cache)
    _new_file(cache, 0, b"removed by its owner")
    _recover(cache, boot_id())
    assert not (cache.directory / "salvaged").exists()
    assert b"removed by its owner" not in cache.every_byte()
