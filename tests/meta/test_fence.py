"""Other programs and a database whose commits wait in memory."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cachefs.meta import fence
from cachefs.meta.database import SCHEMA_VERSION, Database, check_version
from tests.meta.committer import Committer

WRITE = "INSERT INTO setting VALUES('theirs','theirs ')"


def stock(path: Path, sql: str, *options: str) -> str:
    """What sqlite3 has to say."""
    words = ["sqlite3", *options, str(path), sql]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "db"


@pytest.fixture
def database(path: Path, tmp_path: Path) -> Iterator[Committer]:
    (tmp_path / "memory").mkdir()
    found = Committer(path, tmp_path / "memory")
    yield found
    found.end()


@pytest.mark.parametrize(
    "sql",
    [
        WRITE,
        "PRAGMA wal_checkpoint(TRUNCATE)",
        "PRAGMA journal_mode=DELETE",
        "VACUUM",
        f"PRAGMA locking_mode=EXCLUSIVE; {WRITE}",
    ],
)
def test_nobody_else_writes(path: Path, database: Committer, sql: str) -> None:
    database("many", "k", 20, 2000)
    assert "database is locked" in stock(path, sql)
    database("many", "l", 20, 2000)
    assert database("checkpoint") == "ok"
    database("many", "m", 20, 2000)
    assert len(database("keys")) == 60 and database("integrity") == "ok"
    database.end()
    assert stock(path, WRITE) == ""
    assert stock(
        path, "PRAGMA integrity_check; SELECT count(*) FROM setting WHERE key='theirs'"
    ) == ("ok\n1\n")


def test_nobody_else_reads(path: Path, database: Committer) -> None:
    """Instead of what is half of today and half of yesterday."""
    assert "database is locked" in stock(path, "SELECT * FROM setting", "-readonly")


def test_its_version_is_known(path: Path, database: Committer, tmp_path: Path) -> None:
    """Of one that nobody can open."""
    assert fence.fenced_schema(path) == SCHEMA_VERSION
    check_version(path)
    database("sync")
    database.kill()
    database.gone()
    assert fence.fenced_schema(path) is None
    check_version(path)


def test_a_program_that_came_first(path: Path, tmp_path: Path) -> None:
    """It is waited for, as long as it does something."""
    Database(path).close()
    with closing(sqlite3.connect(path, timeout=0)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM setting").fetchall()
        with pytest.raises(OSError, match="another program is using the database"):
            fence.Fence(path, SCHEMA_VERSION, patience=0.1)
        other.execute("COMMIT")
        database = Committer(path, tmp_path)
        database("commit", "k", 10)
        for sql in (WRITE, "SELECT * FROM setting"):
            with pytest.raises(sqlite3.OperationalError, match="database is locked"):
                other.execute(sql)
        assert database("checkpoint") == "ok"
        database.end()
        other.execute(WRITE)
        assert other.execute("SELECT value FROM setting WHERE key='k'").fetchone()
