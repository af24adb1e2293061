"""Queries on copies in the warm tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from cachefs.meta.database import Database

_COLUMNS = "dentry,path,gen,size,mtime_ns,state"
_WRITTEN = "('sealed','uploading','stalled','conflicted','durable')"


class WarmState(IntEnum):
    """What became of a copy."""

    HELD = 0
    """It is there."""
    RELEASED = 1
    """Retention has removed it; it does not come again."""
    MISSED = 2
    """The cache file had to go before it was copied."""


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
    """A name whose present content has no copy yet. `gen` 0: a symlink, with its `target`."""

    dentry: int
    ino: int
    gen: int
    device: int
    file: int
    size: int
    target: bytes | None


class WarmCopies:
    """The `warm` table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def wanted(self) -> list[WantedRow]:
        """Names whose content was written here, is sealed, whole in the cache and not copied, in
        the order in which it was sealed; symlinks last."""
        rows = self._db.all(
            "SELECT d.id,d.ino,g.gen,g.device,g.file,g.size,NULL FROM generation g"
            " JOIN inode i ON i.gen=g.gen JOIN dentry d ON d.ino=i.ino"
            " LEFT JOIN warm w ON w.dentry=d.id"
            f" WHERE g.state IN {_WRITTEN} AND g.present IS NULL AND g.grows=0"
            " AND g.sealed_ns IS NOT NULL AND (w.gen IS NULL OR w.gen<>g.gen)"
            " ORDER BY g.sealed_ns,d.id"
        )
        rows += self._db.all(
            "SELECT d.id,d.ino,0,0,0,0,i.target FROM inode i JOIN dentry d ON d.ino=i.ino"
            " LEFT JOIN warm w ON w.dentry=d.id"
            " WHERE (i.mode & 61440)=40960 AND i.target IS NOT NULL AND w.gen IS NULL ORDER BY d.id"
        )
        return [WantedRow(*row) for row in rows]

    def all(self) -> list[WarmRow]:
        """Every row."""
        return [WarmRow(*row) for row in self._db.all(f"SELECT {_COLUMNS} FROM warm")]

    def of_gen(self, gen: int) -> list[WarmRow]:
        """The copies of one generation that are there."""
        rows = self._db.all(f"SELECT {_COLUMNS} FROM warm WHERE gen=? AND state=0", (gen,))
        return [WarmRow(*row) for row in rows]

    def all_of_inode(self, ino: int) -> list[WarmRow]:
        """The rows of all names of an inode."""
        rows = self._db.all(
            "SELECT w.dentry,w.path,w.gen,w.size,w.mtime_ns,w.state FROM warm w"
            " JOIN dentry d ON d.id=w.dentry WHERE d.ino=?",
            (ino,),
        )
        return [WarmRow(*row) for row in rows]

    def missed_below(self, folder: str) -> bool:
        """Whether anything below a directory (empty: the root) had to go before it was copied."""
        base = f"{folder}/" if folder else ""
        row = self._db.one(
            "SELECT 1 FROM warm WHERE state=2 AND substr(path,1,?)=? LIMIT 1", (len(base), base)
        )
        return row is not None

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
