"""Files come out of a cache whose database is beyond repair, under their names if any are left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.errors import UsageError
from cachefs.fsck.carve import carve
from cachefs.fsck.salvage import salvage
from cachefs.meta import Meta
from cachefs.model.extents import ExtentSet
from tests.cli.conftest import run as run
from tests.fsck.cache import BODIES, Cache


def _tree(top: Path) -> dict[str, bytes]:
    return {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}


def _forget_notes(cache: Cache) -> None:
    for number in (1, 2, 3):
        os.removexattr(cache.file(number), "user.cachefs.path")


def _leave_commits_in_the_log(cache: Cache) -> None:
    """As a daemon that was killed does: part of the tree is in the log alone."""
    meta = Meta(cache.database)
    meta.db.execute("UPDATE dentry SET name=CAST('renamed.bin' AS BLOB) WHERE ino=3")
    spare = cache.directory.parent / "spare"
    shutil.copytree(cache.database.parent, spare)
    meta.close()
    shutil.rmtree(cache.database.parent)
    spare.rename(cache.database.parent)


def test_a_sound_cache(cache: Cache, tmp_path: Path) -> None:
    before = cache.every_byte()
    done = salvage([cache.directory], tmp_path / "out")
    assert _tree(tmp_path / "out") == BODIES
    assert done.failed == []
    assert {each.known_by for each in done.files} == {"database"}
    assert {each.state for each in done.files} == {"sealed", "durable"}
    assert cache.every_byte() == before


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize("how", ["no header", "cut short", "garbage log", "one page", "nothing"])
def test_a_database_beyond_repair(cache: Cache, tmp_path: Path, how: str, notes: bool) -> None:
    if not notes:
        _forget_notes(cache)
    with open(cache.database, "r+b") as file:
        if how == "no header":
            file.write(os.urandom(100))
        elif how == "cut short":
            file.truncate(os.path.getsize(cache.database) * 2 // 3)
        elif how == "one page":
            file.seek(4096)
            file.write(os.urandom(4096))
        elif how == "nothing":
            file.truncate(0)
    if how == "garbage log":
        cache.log.write_bytes(os.urandom(100_000))
    done = salvage([cache.directory], tmp_path / "out")
    assert set(_tree(tmp_path / "out").values()) == set(BODIES.values())
    if notes or how in ("no header", "garbage log"):
        assert _tree(tmp_path / "out") == BODIES
    if how == "nothing" and not notes:
        assert set(_tree(tmp_path / "out")) == {"gen-1", "gen-2", "gen-3"}
    assert done.failed == []


def test_names_that_only_the_log_knows(cache: Cache, tmp_path: Path) -> None:
    _leave_commits_in_the_log(cache)
    with open(cache.database, "r+b") as file:
        file.write(os.urandom(100))
    salvage([cache.directory], tmp_path / "out")
    body = BODIES["dirty.bin"]
    assert _tree(tmp_path / "out")["renamed.bin"] == body


def test_carving_finds_what_sqlite_finds(cache: Cache) -> None:
    meta = Meta(cache.database)
    with meta.transaction():
        for number in range(3000):
            name = f"{number:04}-{'n' * (number % 240)}".encode()
            meta.db.execute("INSERT INTO dentry VALUES(?,1,?,?)", (1000 + number, name, number + 9))
    rows = {row[0]: row[1:] for row in meta.db.all("SELECT * FROM dentry")}
    gens = {
        row[0]: (*row[1:4], row[4].encode())
        for row in meta.db.all("SELECT gen,ino,device,file,state FROM generation")
    }
    current = dict(meta.db.all("SELECT ino,gen FROM inode WHERE gen IS NOT NULL"))
    found = carve(cache.database)  # Most of it is in the log.
    assert (found.names, found.generations, found.current) == (rows, gens, current)
    meta.close()
    found = carve(cache.database)
    assert (found.names, found.generations, found.current) == (rows, gens, current)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    spots=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=64)), max_size=20),
    cut=st.floats(0, 1),
    junk=st.binary(max_size=200),
)
def test_whatever_became_of_the_database(
    tmp_path_factory: pytest.TempPathFactory,
    spots: list[tuple[float, bytes]],
    cut: float,
    junk: bytes,
) -> None:
    """All bytes come out, and nothing is written outside of the directory."""
    place = tmp_path_factory.mktemp("any")
    cache = Cache(place / "cache")
    data = bytearray(cache.database.read_bytes())
    for where, what in spots:
        at = int(where * len(data))
        data[at : at + len(what)] = what
    cache.database.write_bytes(data[: int(cut * len(data))] + junk)
    salvage([cache.directory], place / "out" / "in")
    assert set(_tree(place / "out" / "in").values()) == set(BODIES.values())
    assert {path.name for path in place.iterdir()} == {"cache", "out"}
    assert [path.name for path in (place / "out").iterdir()] == ["in"]
    shutil.rmtree(place)


@pytest.mark.parametrize("name", ["..", "../../escaped", "/etc/x", "a/../../b", "\\x00", ""])
def test_hostile_paths_lead_nowhere_but_down(cache: Cache, tmp_path: Path, name: str) -> None:
    cache.sql(f"UPDATE dentry SET name=CAST('{name}' AS BLOB) WHERE ino=3")
    os.setxattr(cache.file(1), "user.cachefs.path", b"../../noted")
    place = tmp_path / "deep" / "out"
    salvage([cache.directory], place)
    assert {p.name for p in tmp_path.iterdir()} == {"cache", "deep"}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    assert set(_tree(place).values()) == set(BODIES.values())


def test_older_versions_and_taken_names_get_others(cache: Cache, tmp_path: Path) -> None:
    cache.sql(
        "UPDATE generation SET ino=3 WHERE gen=2",
        "UPDATE dentry SET name=CAST('runs' AS BLOB),parent=3 WHERE ino=4",
    )
    salvage([cache.directory], tmp_path / "out")
    tree = _tree(tmp_path / "out")
    assert tree["dirty.bin"] == BODIES["dirty.bin"]
    assert tree["dirty.bin.gen-2"] == BODIES["safe.bin"]
    assert len(tree) == 3


def test_holes_stay_holes(cache: Cache, tmp_path: Path) -> None:
    os.truncate(cache.file(1), 1 << 30)
    salvage([cache.directory], tmp_path / "out")
    found = (tmp_path / "out" / "dirty.bin").stat()
    assert found.st_size == 1 << 30
    assert found.st_blocks * 512 < 1 << 20


def test_it_is_never_mixed_with_anything(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UsageError, match="not empty"):
        salvage([cache.directory], tmp_path / "full")
    with pytest.raises(UsageError, match="inside the cache"):
        salvage([cache.directory], cache.directory / "out")


def test_the_command(cache: Cache, tmp_path: Path, run: Callable[..., object]) -> None:
    os.truncate(cache.database, 0)
    told = run("fsck", str(cache.directory), "--salvage", str(tmp_path / "out"), "--json")
    assert told.code == 0  # type: ignore[attr-defined]
    result = json.loads(told.out)  # type: ignore[attr-defined]
    assert result.keys() == {"directory", "files", "failed", "bytes"}
    assert {each["path"] for each in result["files"]} == set(BODIES)
    assert {each["known_by"] for each in result["files"]} == {"note"}
    wrong = run("fsck", str(cache.directory))
    assert wrong.code == 1  # type: ignore[attr-defined]
    assert "--salvage DIR" in wrong.out  # type: ignore[attr-defined]


def test_what_is_in_the_store_only_is_told(
    cache: Cache, tmp_path: Path, run: Callable[..., object]
) -> None:
    """Ranges of a file that outgrew the cache, and of one that was fetched in part: which, and the
    objects that have them."""
    hidden = ".cachefs/spans/n1/abc"
    columns = 'key,gen,start,"end",etag,crc64,asked_ns'
    cache.sql(
        f"INSERT INTO span({columns}) VALUES('{hidden}',1,0,4096,'e',NULL,1)",
        f"INSERT INTO span({columns}) VALUES('.cachefs/spans/n1/c#8192',1,8192,9000,'e',NULL,1)",
        f"INSERT INTO span({columns}) VALUES('.cachefs/spans/n1/asked',1,9000,9100,NULL,NULL,1)",
        f"UPDATE generation SET present=X'{ExtentSet([(0, 1000)]).pack().hex()}' WHERE gen=2",
    )
    done = salvage([cache.directory], tmp_path / "out")
    told = {each.path: [(a.start, a.end, a.key, a.offset) for a in each.in_store]
            for each in done.files}  # fmt: skip
    size = len(BODIES["safe.bin"])
    assert told == {
        "dirty.bin": [(0, 4096, hidden, 0), (8192, 9000, ".cachefs/spans/n1/c", 8192)],
        "safe.bin": [(1000, size, "safe.bin", 1000)],
        "runs/sent.bin": [],
    }
    said = run("fsck", str(cache.directory), "--salvage", str(tmp_path / "again"))
    assert "INCOMPLETE" in said.out  # type: ignore[attr-defined]
    assert f"bytes 0-4095 are in {hidden} from 0 on" in said.out  # type: ignore[attr-defined]
