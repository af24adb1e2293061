"""Every check finds what it is for; mending leaves a sound cache and every byte somewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.fsck.check import check
from cachefs.fsck.place import NotCheckable, Place
from cachefs.fsck.report import CHECKS, CLEAN, LEFTOVERS, MENDED, TROUBLE
from cachefs.model.states import NEVER_ON_DISK
from tests.cli.conftest import run as run
from tests.fsck.cache import BODIES, Cache

Run = Callable[..., object]
Spoil = Callable[[Cache], object] | tuple[str, ...]


def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _damage_index(cache: Cache) -> None:
    """An index with an entry that leads elsewhere, as only SQLite's own bugs or a bad disk make
    one: the last byte of its page is that of a row's number."""
    with contextlib.closing(sqlite3.connect(cache.database)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (size,) = database.execute("PRAGMA page_size").fetchone()
        named = "SELECT rootpage FROM sqlite_master WHERE name='dentry_ino'"
        (page,) = database.execute(named).fetchone()
    _flip(cache.database, page * size - 1)


def _foreign(cache: Cache) -> None:
    (cache.directory / "notes.txt").write_text("somebody's")


def _no_file(cache: Cache) -> None:
    os.unlink(cache.file(2))
    os.symlink("/etc/hostname", cache.file(2))


def _unknown(cache: Cache) -> None:
    cache.file(0x77).parent.mkdir()
    cache.file(0x77).write_bytes(b"whose?")


def _lose_power(cache: Cache) -> None:
    """Of a file that nobody synced the row alone is left; a daemon has seen that."""
    os.unlink(cache.file(1))
    cache.sql(f"UPDATE generation SET state='held',error='{NEVER_ON_DISK}' WHERE gen=1")


SPOIL: dict[str, Spoil] = {
    "database-missing": lambda c: os.unlink(c.database),
    "database-damaged": _damage_index,
    "database-too-new": ("UPDATE setting SET value='99' WHERE key='schema_version'",),
    "log-damaged": lambda c: c.log.write_bytes(b"garbage " * 1000),
    "commits-waiting": lambda c: (c.directory / "meta" / "cachefs.db-ring").write_text("garbage"),
    "odd-value": ("UPDATE generation SET size=x'00' WHERE gen=1",),
    "extents-without-sense": ("UPDATE generation SET dirty=x'80' WHERE gen=1",),
    "file-missing": lambda c: os.unlink(c.file(1)),
    "file-lost": _lose_power,
    "copy-missing": lambda c: os.unlink(c.file(2)),
    "second-missing": ("UPDATE generation SET copy_device=0,copy_file=7,copy_size=1 WHERE gen=1",),
    "file-size": lambda c: os.truncate(c.file(1), 100),
    "file-content": lambda c: _flip(c.file(2), 700),
    "file-unknown": _unknown,
    "no-file": _no_file,
    "open-to-others": lambda c: os.chmod(c.file(1), 0o644),
    "foreign-file": _foreign,
    "no-root": ("DELETE FROM inode WHERE ino=1",),
    "unknown-file-type": ("UPDATE inode SET mode=420 WHERE ino=3",),
    "negative-size": ("UPDATE inode SET size=-1 WHERE ino=3",),
    "entry-without-inode": ("DELETE FROM inode WHERE ino=3",),
    "entry-without-directory": ("UPDATE dentry SET parent=77 WHERE name=CAST('sent.bin' AS BLOB)",),
    "directory-with-two-names": ("INSERT INTO dentry VALUES(99,1,CAST('again' AS BLOB),2)",),
    "directory-cycle": ("UPDATE dentry SET parent=2 WHERE ino=2",),
    "inode-without-name": ("DELETE FROM dentry WHERE ino=3",),
    "unlinked-inode": ("INSERT INTO inode VALUES(50,33188,0,0,0,0,0,0,0,NULL,0,NULL,NULL,1)",),
    "link-count": ("UPDATE inode SET nlink=5 WHERE ino=3",),
    "name-twice": (),
    "impossible-name": ("UPDATE dentry SET name=CAST('../x' AS BLOB) WHERE ino=3",),
    "current-generation-missing": ("UPDATE inode SET gen=88 WHERE ino=4",),
    "generation-of-another": ("UPDATE inode SET gen=2 WHERE ino=3",),
    "generation-without-inode": (
        "INSERT INTO generation(gen,ino,device,file,state,lane,size,created_ns,used_ns)"
        " VALUES(60,90,0,60,'sealed','tracked',0,0,0)",
    ),
    "unknown-state": ("UPDATE generation SET state='asleep' WHERE gen=1",),
    "cache-file-shared": ("UPDATE generation SET file=1 WHERE gen=3",),
    "nothing-will-publish": ("DELETE FROM effect WHERE gen=1",),
    "durable-nowhere": ("DELETE FROM object",),
    "effect-without-entry": ("UPDATE effect SET dentry=99 WHERE gen=1",),
    "effect-without-generation": (
        "INSERT INTO effect VALUES(70,'publish',1,99,NULL,'data',9,9,'pending',NULL,0,0)",
    ),
    "effect-without-sense": ("UPDATE effect SET class='odd',since=99 WHERE gen=1",),
    "upload-without-generation": ("UPDATE upload SET gen=99",),
    "part-without-upload": ("INSERT INTO upload_part VALUES(55,1,0,1,'upload',NULL,NULL)",),
    "parts-with-gaps": ("DELETE FROM upload_part WHERE number=2",),
    "span-without-generation": ("INSERT INTO span VALUES('k',99,0,9,'e',NULL,0)",),
    "span-of-what-is-shown": ("INSERT INTO span VALUES('k',2,0,9,'e',NULL,0)",),
    "impossible-span": ("INSERT INTO span VALUES('k',1,0,9,'e',NULL,0),('l',1,5,20,'e',NULL,0)",),
    "attribute-of-nobody": ("INSERT INTO xattr VALUES(99,x'61',x'62')",),
    "object-of-no-entry": ("INSERT INTO object VALUES('k',99,'e',1,1,1,0,NULL,NULL,0,NULL)",),
    "impossible-key": ("INSERT INTO object VALUES('/k',NULL,'e',1,1,1,0,NULL,NULL,0,NULL)",),
    "half-a-copy": ("UPDATE generation SET copy_device=1 WHERE gen=1",),
    "unreadable-number": ("UPDATE setting SET value='many' WHERE key='next_inode'",),
    "counter-behind-inode": ("UPDATE setting SET value='2' WHERE key='next_inode'",),
    "counter-behind-dentry": ("UPDATE setting SET value='1' WHERE key='next_dentry'",),
    "counter-behind-generation": ("UPDATE setting SET value='1' WHERE key='next_generation'",),
}
"""Check -> what it takes for it to find something."""
LOST = {"file-missing", "file-lost", "copy-missing", "file-size", "file-content", "no-file"}
"""Checks whose damage is to bytes."""


def _spoil(cache: Cache, name: str) -> None:
    how = SPOIL[name]
    if not callable(how):
        cache.sql(*how)
    else:
        how(cache)


def _found(cache: Cache) -> set[str]:
    return {each.check for each in check([cache.directory]).findings}


def test_a_sound_cache_is_clean_and_stays_as_it_is(cache: Cache) -> None:
    before = {path: path.stat() for path in cache.directory.rglob("*") if path.name != "LOCK"}
    report = check([cache.directory])
    assert (report.findings, report.exit_code, report.files) == ([], CLEAN, 3)
    sent = BODIES["runs/sent.bin"]
    assert report.read_bytes == len(BODIES["safe.bin"]) + len(sent) // 2
    after = {path: path.stat() for path in cache.directory.rglob("*") if path.name != "LOCK"}
    assert {p: (s.st_mtime_ns, s.st_ino, s.st_size) for p, s in after.items()} == {
        p: (s.st_mtime_ns, s.st_ino, s.st_size) for p, s in before.items()
    }


def test_every_check_is_tried_here() -> None:
    assert SPOIL.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", [name for name in SPOIL if name != "name-twice"])
def test_each_finds_its_offence_and_it_is_mended(cache: Cache, name: str) -> None:
    _spoil(cache, name)
    report = check([cache.directory])
    assert name in {each.check for each in report.findings}
    assert report.exit_code == (CLEAN if name in LEFTOVERS else TROUBLE)
    mended = check([cache.directory], repair=True)
    assert name in {each.check for each in mended.findings}
    is_mended = all(each.repaired for each in mended.findings if each.check == name)
    if name != "database-damaged":
        assert is_mended == (CHECKS[name][1] or name == "copy-missing")
    if is_mended:
        assert mended.exit_code in (CLEAN, MENDED)
        assert {each for each in _found(cache) if each not in LEFTOVERS} == set()
        assert name == "file-unknown" or name not in _found(cache)
    if name not in LOST:
        assert set(BODIES.values()) <= cache.every_byte()


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("synced=0", "file-lost"),
        ("anchored=1", "file-missing"),
        ("synced=1", "file-missing"),
        ("copy_device=0,copy_file=7,copy_size=1", "file-missing"),
    ],
)
def test_what_was_ever_synced_is_missed_after_a_power_cut(
    cache: Cache, how: str, found: str
) -> None:
    """No daemon has seen it yet."""
    os.unlink(cache.file(1))
    cache.sql(f"UPDATE generation SET {how} WHERE gen=1")
    with patch.object(Place, "outlives_power", new=True):
        assert "file-missing" in _found(cache), "the machine never went down"
        cache.sql("INSERT OR REPLACE INTO setting VALUES('boot','an earlier run')")
        assert found in _found(cache)


def test_part_of_what_was_sent_is_other_bytes_now(cache: Cache) -> None:
    """It is held for a person, its upload is begun anew, and its bytes stay where they are."""
    _flip(cache.file(3), 10)
    report = check([cache.directory], repair=True)
    (found,) = report.findings
    assert found.check == "file-content"
    assert found.subject.startswith("runs/sent.bin ")
    assert cache.file(3).exists()
    assert check([cache.directory]).exit_code == CLEAN


def test_bytes_are_not_read_when_that_is_not_wanted(cache: Cache) -> None:
    _flip(cache.file(2), 700)
    assert check([cache.directory], content=False).exit_code == CLEAN
    assert check([cache.directory]).exit_code == TROUBLE


def test_many_offences_at_once_are_mended(cache: Cache) -> None:
    for name in ("directory-cycle", "link-count", "nothing-will-publish", "entry-without-inode"):
        _spoil(cache, name)
    assert check([cache.directory], repair=True).exit_code == MENDED
    assert check([cache.directory]).exit_code == CLEAN
    assert set(BODIES.values()) <= cache.every_byte()


def test_the_database_before_a_repair_is_kept(cache: Cache) -> None:
    _spoil(cache, "link-count")
    check([cache.directory], repair=True)
    kept = list((cache.directory / "salvaged").glob("cachefs.db.*"))
    assert len(kept) == 1
    assert kept[0].read_bytes()[:15] == b"SQLite format 3"


def test_a_cache_in_use_is_left_alone(cache: Cache) -> None:
    device = CacheDevice(0, cache.directory)
    try:
        with pytest.raises(NotCheckable, match=f"in use by pid {os.getpid()}"):
            check([cache.directory])
    finally:
        device.close()


def test_the_command(cache: Cache, run: Callable[..., object], tmp_path: Path) -> None:
    from tests.cli.conftest import Ran

    def ran(*words: str) -> Ran:
        result = run("fsck", *words)
        assert isinstance(result, Ran)
        return result

    where = str(cache.directory)
    clean = ran(where)
    assert (clean.code, clean.err) == (0, "")
    assert re.fullmatch(r"\d+ checks, 3 cache files, .* read: sound\n", clean.out)
    _spoil(cache, "link-count")
    wrong = ran(where)
    assert wrong.code == 1
    assert "WRONG: link-count: " in wrong.out
    assert "--repair" in wrong.out
    told = json.loads(ran(where, "--json").out)
    assert told["clean"] is False and told["exit_code"] == 1
    (finding,) = told["findings"]
    assert finding.keys() == {"check", "subject", "repaired", "trouble", "meaning"}
    assert ran(where, "--repair").code == 3
    assert ran(where).code == 0
    assert ran(str(tmp_path)).code == 4
    assert "is no cache directory" in ran(str(tmp_path)).err
    assert ran(where, "--repair", "--salvage", "x").code == 2
    assert ran().code == 2


def test_in_use_by_another_process(cache: Cache, run: Callable[..., object]) -> None:
    script = (
        "import sys; from cachefs.cache.device import CacheDevice;"
        "d = CacheDevice(0, sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(cache.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        done = run("fsck", str(cache.directory))
        assert done.code == 4  # type: ignore[attr-defined]
        assert f"in use by pid {process.pid}" in done.err  # type: ignore[attr-defined]
        assert done.err.count("\n") == 1  # type: ignore[attr-defined]
    finally:
        process.communicate(b"")
