"""A disk that loses what it was given to write tells so once; nobody says that it is there then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.meta import Meta
from cachefs.meta.database import Database
from tests.meta.committer import Committer
from tests.support.lossydisk import LossyDisk

Open = Callable[[], Committer]
FAILED = "OSError: "
LATE = 1_000_000
"""Bytes: more than there may be room for in blocks that were in use before."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LossyDisk]:
    made = LossyDisk(tmp_path)
    yield made
    made.end()


@pytest.fixture(params=["deferred", "plain"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where commits may wait, if they do."""
    if request.param == "plain":
        return None
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def kept(disk: LossyDisk) -> list[str]:
    """What a power cut leaves."""
    disk.lose_power()
    database = Database(disk.top / "db")
    rows = database.all("SELECT key FROM setting WHERE value LIKE key||' %' ORDER BY key")
    assert database.one("PRAGMA integrity_check") == ("ok",)
    database.close()
    return [str(key) for (key,) in rows]


@pytest.fixture
def opened(disk: LossyDisk, memory: Path | None) -> Iterator[Open]:
    """Opens the database on the disk in a process of its own; one after the other."""
    started: list[Committer] = []

    def opened() -> Committer:
        started.append(Committer(disk.top / "db", memory))
        return started[-1]

    yield opened
    for each in started:
        end(each)


def end(database: Committer) -> None:
    database.kill()
    database.gone()


def failed(disk: LossyDisk, opened: Open) -> Committer:
    """A process whose second commit the disk has lost, and that was told so."""
    database = opened()
    database("commit", "before", 10)
    assert database("sync") == "ok"
    disk.fail()
    database("commit", "late", LATE)
    assert database("sync").startswith(FAILED)
    return database


def test_what_was_lost_is_written_anew(disk: LossyDisk, opened: Open, memory: Path | None) -> None:
    """Where SQLite writes the log itself, by the next process."""
    database = failed(disk, opened)
    disk.work()
    if memory is None:
        assert database("sync").startswith(FAILED)
        end(database)
        database = opened()
    assert database("sync") == "ok"
    end(database)
    assert kept(disk) == ["before", "late"]


def test_a_process_that_is_not_told(disk: LossyDisk, opened: Open) -> None:
    """Another one was, before."""
    database = failed(disk, opened)
    end(database)
    disk.work()
    database = opened()
    assert database("sync") == "ok"
    end(database)
    assert kept(disk) == ["before", "late"]


@pytest.mark.parametrize("what", ["sync", "checkpoint"])
def test_what_cannot_be_written_anew(disk: LossyDisk, opened: Open, what: str) -> None:
    """The kernel has let go of it: nobody says that it is there, and the database is left alone."""
    database = failed(disk, opened)
    disk.work()
    Path("/proc/sys/vm/drop_caches").write_text("1")
    for _ in range(2):
        assert "Error: " in database(what)
    end(database)
    assert kept(disk) == ["before"]


def test_all_goes_on_meanwhile(tmp_path: Path) -> None:
    """Commits, reads, and new rounds of the log, while that is written anew."""
    (tmp_path / "memory").mkdir()
    meta = Meta(tmp_path / "db", memory=tmp_path / "memory")
    other = meta.db._connect()
    for each in (meta.db, other):
        each.execute("PRAGMA cache_size=10")
    renewing = threading.Thread(target=lambda: [meta.db._sync._is_renewed() for _ in range(20)])
    renewing.start()
    number = 0
    while renewing.is_alive():
        number += 1
        meta.set_setting(f"k{number % 50}", "x" * (number * 377 % 9000))
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if number % 5 == 0:
            meta.db.checkpoint()
    other.close()
    assert meta.db.one("PRAGMA integrity_check") == ("ok",)
    meta.close()
