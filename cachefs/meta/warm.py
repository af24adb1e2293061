"""Queries on copies in the warm tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from cachefs.meta.database import Database

_COLUMNS = "dentry,path,gen,size,mtime_ns,state"
_WRITTEN = "('sealed','uploading','stalled','conflicted','durable')"
_WANTED = (
    " FROM generation g JOIN inode i ON i.gen=g.gen JOIN dentry d ON d.ino=i.ino"
    " LEFT JOIN warm w ON w.dentry=d.id"
    f" WHERE g.state IN {_WRITTEN} AND g.present IS NULL AND g.grows=0"
    " AND g.gen NOT IN (SELECT gen FROM span)"
    " AND (w.state=2 OR (g.sealed_ns IS NOT NULL AND (w.gen IS NULL OR w.gen<>g.gen)))"
)
"""Content that was written here, or that a copy should be made of again; whole in the cache."""
_MEMBER = (
    "i.ino,i.size,i.gen,i.target IS NOT NULL,coalesce(g.state IN ('open','held'),0),"
    "g.sealed_ns IS NOT NULL,w.gen,w.path,w.state FROM {names} b JOIN inode i ON i.ino=b.ino"
    " LEFT JOIN generation g ON g.gen=i.gen LEFT JOIN warm w ON w.dentry=b.id"
    " WHERE (i.mode & 61440)<>16384"
)
_BELOW = (
    "WITH RECURSIVE below(id,ino,path) AS ("
    " SELECT id,ino,CAST(name AS TEXT) FROM dentry WHERE parent=?"
    " UNION ALL SELECT d.id,d.ino,b.path||'/'||CAST(d.name AS TEXT)"
    " FROM dentry d JOIN below b ON d.parent=b.ino)"
)


class WarmState(IntEnum):
    """What became of a copy."""

    HELD = 0
    """It is there."""
    RELEASED = 1
    """Retention has removed it; it does not come again."""
    LACKING = 2
    """It is not there, or not to be trusted, and comes once the content is in the cache."""


@dataclass(slots=True)
class WarmRow:
    """One name's copy. `gen` 0: a symlink."""

    dentry: int
    path: str
    gen: int
    size: int
    mtime_ns: int
    state: int = WarmState.HELD


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A name whose present content has no copy yet. `gen` 0: a symlink, with its `target`;
    `ended_ns`: since when it is as it is."""

    dentry: int
    ino: int
    gen: int
    device: int
    file: int
    size: int
    target: bytes | None
    ended_ns: int


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A file or symlink and its copy, if it has one."""

    dentry: int
    path: str
    ino: int
    size: int
    gen: int | None
    """What is in the cache of it."""
    is_link: bool
    is_open: bool
    """It is being written."""
    is_ours: bool
    """What is in the cache of it was written here."""
    copied_gen: int | None
    copied_path: str | None
    state: int | None


def outdated(gen: int) -> int:
    """What stands for the bytes that a generation had before it was written to again."""
    return -gen


class WarmCopies:
    """The `warm` table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def wanted(self) -> list[WantedRow]:
        """Names whose content was written here, is sealed, whole in the cache and not copied, in
        the order in which it was sealed; symlinks last."""
        rows = self._db.all(
            "SELECT d.id,d.ino,g.gen,g.device,g.file,g.size,NULL,coalesce(g.sealed_ns,0)"
            f"{_WANTED} ORDER BY g.sealed_ns,d.id"
        )
        rows += self._db.all(
            "SELECT d.id,d.ino,0,0,0,0,i.target,min(i.mtime_ns,i.ctime_ns) FROM inode i"
            " JOIN dentry d ON d.ino=i.ino LEFT JOIN warm w ON w.dentry=d.id"
            " WHERE (i.mode & 61440)=40960 AND i.target IS NOT NULL"
            " AND (w.gen IS NULL OR w.state=2) ORDER BY d.id"
        )
        return [WantedRow(*row) for row in rows]

    def wanting(self, gen: int) -> list[int]:
        """The names that `wanted` has a generation for."""
        return [row[0] for row in self._db.all(f"SELECT d.id{_WANTED} AND g.gen=?", (gen,))]

    def members(self, ino: int, path: str) -> list[MemberRow]:
        """Every file and symlink below directory `ino`, which has that path (empty: the root)."""
        sql = f"{_BELOW} SELECT b.id,b.path,{_MEMBER.format(names='below')}"
        base = f"{path}/" if path else ""
        return [_member(row, base + row[1]) for row in self._db.all(sql, (ino,))]

    def member(self, dentry: int, path: str) -> MemberRow | None:
        """One file or symlink, which has that path; None for a directory."""
        sql = f"SELECT b.id,NULL,{_MEMBER.format(names='dentry')} AND b.id=?"
        row = self._db.one(sql, (dentry,))
        return _member(row, path) if row else None

    def all(self) -> list[WarmRow]:
        """Every row."""
        return [WarmRow(*row) for row in self._db.all(f"SELECT {_COLUMNS} FROM warm")]

    def of_gen(self, gen: int) -> list[WarmRow]:
        """The copies of one generation that are there."""
        rows = self._db.all(f"SELECT {_COLUMNS} FROM warm WHERE gen=? AND state=0", (gen,))
        return [WarmRow(*row) for row in rows]

    def lacking_below(self, folder: str) -> list[str]:
        """Paths below a directory (empty: the root) of what has no copy, or none to be trusted."""
        base = f"{folder}/" if folder else ""
        rows = self._db.all(
            "SELECT path FROM warm WHERE state=2 AND substr(path,1,?)=?", (len(base), base)
        )
        return [row[0] for row in rows]

    def of_dentry(self, dentry: int) -> WarmRow | None:
        """A name's row."""
        row = self._db.one(f"SELECT {_COLUMNS} FROM warm WHERE dentry=?", (dentry,))
        return WarmRow(*row) if row else None

    def of_object(self, key: str, etag: str) -> WarmRow | None:
        """A copy of what the bucket holds under a key in that version."""
        row = self._db.one(
            "SELECT w.dentry,w.path,w.gen,w.size,w.mtime_ns,w.state FROM object o"
            " JOIN warm w ON w.gen=o.gen WHERE o.key=? AND o.etag=? AND w.state=0",
            (key, etag),
        )
        return WarmRow(*row) if row else None

    def hand_on(self, gen: int, to: int) -> None:
        """Generation `to` has the same bytes as `gen`, which has left the cache."""
        self._db.execute("UPDATE warm SET gen=? WHERE gen=?", (to, gen))

    def outdate(self, gen: int) -> None:
        """Generation `gen` is written to again: its copies have the bytes of none that there is."""
        self._db.execute("UPDATE warm SET gen=? WHERE gen=?", (outdated(gen), gen))

    def put(self, row: WarmRow) -> None:
        """Insert or replace a name's row."""
        self._db.execute(
            f"INSERT OR REPLACE INTO warm({_COLUMNS}) VALUES(?,?,?,?,?,?)",
            (row.dentry, row.path, row.gen, row.size, row.mtime_ns, row.state),
        )

    def forget(self, dentry: int) -> None:
        """Delete a name's row."""
        self._db.execute("DELETE FROM warm WHERE dentry=?", (dentry,))

    def totals(self) -> tuple[int, int]:
        """(files, bytes) of the copies that are there."""
        row = self._db.one("SELECT count(*),coalesce(sum(size),0) FROM warm WHERE state=0")
        assert row is not None
        return row[0], row[1]


def _member(row: Sequence[Any], path: str) -> MemberRow:
    dentry, _, ino, size, gen, is_link, is_open, is_ours, *copied = row
    return MemberRow(
        dentry, path, ino, size, gen, bool(is_link), bool(is_open), bool(is_ours), *copied
    )
