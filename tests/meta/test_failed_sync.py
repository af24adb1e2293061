"""A disk that loses what it was given to write tells so once; nobody says that it is there then."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.meta import Meta
from cachefs.meta.database import Database
from tests.meta.committer import Committer

Open = Callable[[], Committer]
FAILED = "OSError: "
LATE = 1_000_000
"""Bytes: more than there may be room for in blocks that were in use before."""


class LossyDisk:
    """An ext4 whose image is on a filesystem that can be filled: then the kernel's write-back of
    what is new fails, and after that everything works again."""

    def __init__(self, folder: Path) -> None:
        self.below, self.top = folder / "below", folder / "disk"
        self.image, self._others = self.below / "disk.img", self.below / "others"
        self.below.mkdir()
        self.top.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "none", self.below], check=True)
        with open(self.image, "wb") as image:
            image.truncate(20 << 20)
        words = ["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0"]
        subprocess.run([*words, "-b", "4096", self.image], check=True)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self.image, self.top], check=True)
        source = subprocess.check_output(["findmnt", "-no", "SOURCE", self.top], text=True)
        # A loop device takes a write for done of which the first pages were.
        limit = Path("/sys/block") / Path(source.strip()).name / "queue/max_sectors_kb"
        limit.write_text("4")

    def fail(self) -> None:
        os.sync()
        with open(self._others, "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def work(self) -> None:
        self._others.unlink()

    def lose_power(self) -> None:
        """What is not on the disk is gone. (Nobody has anything open there.)"""
        subprocess.run(["umount", self.top], check=True)
        self._mount()

    def end(self) -> None:
        subprocess.run(["umount", self.top], check=True)
        subprocess.run(["umount", self.below], check=True)


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


def test_what_was_lost_is_written_anew(disk: LossyDisk, opened: Open, memory: Path | None) -> None:
    """Where SQLite writes the log itself, by the next process."""
    database = opened()
    database("commit", "before", 10)
    assert database("sync") == "ok"
    disk.fail()
    database("commit", "late", LATE)
    assert database("sync").startswith(FAILED)
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
    database = opened()
    database("commit", "before", 10)
    assert database("sync") == "ok"
    disk.fail()
    database("commit", "late", LATE)
    assert database("sync").startswith(FAILED)
    end(database)
    disk.work()
    database = opened()
    assert database("sync") == "ok"
    end(database)
    assert kept(disk) == ["before", "late"]


@pytest.mark.parametrize("what", ["sync", "checkpoint"])
def test_what_cannot_be_written_anew(disk: LossyDisk, opened: Open, what: str) -> None:
    """The kernel has let go of it: nobody says that it is there, and the database is left alone."""
    database = opened()
    database("commit", "before", 10)
    assert database("sync") == "ok"
    disk.fail()
    database("commit", "late", LATE)
    assert database("sync").startswith(FAILED)
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
