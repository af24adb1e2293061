"""A cache that an older cachefs left is gone on with: nothing is lost, no number is used twice."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cachefs.meta import Meta
from cachefs.meta.database import SCHEMA_VERSION
from cachefs.meta.invariants import INVARIANTS
from cachefs.meta.rows import GenerationRow, InodeRow, UploadRow

STORED = sorted((Path(__file__).parent / "data").glob("*.sql"))


def _columns(db: sqlite3.Connection) -> dict[str, set[str]]:
    tables = db.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
    named = (name for (name,) in tables if not name.startswith("sqlite_"))
    return {name: {row[1] for row in db.execute(f"PRAGMA table_info({name})")} for name in named}


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.stem)
def test_a_database_of_an_older_version(tmp_path: Path, stored: Path) -> None:
    path = tmp_path / "db"
    old = sqlite3.connect(path)
    old.executescript(stored.read_text())
    names = set(old.execute("SELECT id,parent,name,ino FROM dentry"))
    old.close()
    meta = Meta(path)
    assert set(meta.db.all("SELECT id,parent,name,ino FROM dentry")) == names
    version = str(SCHEMA_VERSION)
    assert meta.setting("schema_version") == version, "the older one would not know all of it"
    Meta(tmp_path / "new").close()
    new = sqlite3.connect(tmp_path / "new")
    assert _columns(meta.db._db) == _columns(new)
    new.close()
    for invariant in INVARIANTS:
        assert meta.db.all(invariant.sql) == [], invariant.name
    with meta.transaction():
        inode = InodeRow(0, 0o100644, 0, 0, 1, 0, 0, 0, 0)
        ino = meta.inodes.add(inode)
        assert meta.dentries.add(1, b"new", ino) > max(name[0] for name in names)
        row = GenerationRow(0, ino, 0, 9, "open", "tracked", 0, None, None, None, None, 0, None, 0)
        assert meta.generations.add(row) > 3
        assert ino > max(name[3] for name in names)
        meta.uploads.add(UploadRow(0, row.gen, "new", "", 0, None, 0, "{}"), ())
    assert [each.state for each in meta.generations.of_inode(3)] == ["sealed"]
    meta.close()
    Meta(path).close()  # And once more: nothing is left to be done.


def test_there_are_databases_of_older_versions() -> None:
    assert len(STORED) >= 4
