"""Queries on inodes and their extended attributes."""

from __future__ import annotations

import stat
from collections.abc import Iterable

from cachefs.meta.database import Database
from cachefs.meta.numbers import Numbers
from cachefs.meta.rows import InodeRow

_COLUMNS = (
    "ino,mode,uid,gid,nlink,size,atime_ns,mtime_ns,ctime_ns,target,blocks,gen,listed_ns,attrs_known"
)
_PREFIXED = ",".join(f"i.{column}" for column in _COLUMNS.split(","))

_INSERT = f"INSERT INTO inode({_COLUMNS}) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?)"

_LATEST, _FOLDERS = 4096, 64
"""Entries, and directories, that are looked at to learn how large files are."""


class Inodes:
    """The `inode` and `xattr` tables."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._numbers = Numbers(db, "next_inode", first=2)  # 1 is the root

    def get(self, ino: int) -> InodeRow | None:
        """One inode, None when there is none of that number."""
        row = self._db.one(f"SELECT {_COLUMNS} FROM inode WHERE ino=?", (ino,))
        return InodeRow(*row) if row else None

    def lookup(self, parent: int, name: bytes) -> InodeRow | None:
        """The inode that `name` names in directory `parent`."""
        row = self._db.one(
            f"SELECT {_PREFIXED} FROM dentry d JOIN inode i ON i.ino=d.ino"
            " WHERE d.parent=? AND d.name=?",
            (parent, name),
        )
        return InodeRow(*row) if row else None

    def largest_in(self, folder: int) -> int:
        """Bytes of the largest file among the latest entries of a directory, 0 without any."""
        return self._largest("SELECT ino FROM dentry WHERE parent=? ORDER BY id DESC", folder)

    def largest_below(self, folder: int) -> int:
        """The same, of the directories in it."""
        latest = f"SELECT ino FROM dentry WHERE parent=? ORDER BY id DESC LIMIT {_FOLDERS}"
        return self._largest(f"SELECT ino FROM dentry WHERE parent IN ({latest})", folder)

    def _largest(self, entries: str, folder: int) -> int:
        sql = (
            f"SELECT max(size) FROM inode WHERE ino IN ({entries} LIMIT {_LATEST})"
            f" AND (mode&{0o170000})={stat.S_IFREG}"
        )
        row = self._db.one(sql, (folder,))
        return int(row[0] or 0) if row else 0

    def children(self, parent: int, after: int, limit: int) -> list[tuple[int, bytes, InodeRow]]:
        """Up to `limit` entries (dentry id, name, inode) with ids above `after`, in id order."""
        rows = self._db.all(
            f"SELECT d.id,d.name,{_PREFIXED} FROM dentry d JOIN inode i ON i.ino=d.ino"
            " WHERE d.parent=? AND d.id>? ORDER BY d.id LIMIT ?",
            (parent, after, limit),
        )
        return [(row[0], row[1], InodeRow(*row[2:])) for row in rows]

    def add(self, row: InodeRow) -> int:
        """Insert; `row.ino` 0 takes a new number. Returns and stores the number."""
        row.ino = row.ino or self._numbers.take()
        self._db.execute(_INSERT, _values(row))
        return row.ino

    def add_all(self, rows: Iterable[InodeRow]) -> None:
        """Insert many that have their numbers."""
        self._db.many(_INSERT, map(_values, rows))

    def new_number(self) -> int:
        """A number for an inode that is to be added."""
        return self._numbers.take()

    def save(self, row: InodeRow) -> None:
        """Write every column back."""
        self._db.execute(
            "UPDATE inode SET mode=?,uid=?,gid=?,nlink=?,size=?,atime_ns=?,mtime_ns=?,ctime_ns=?,"
            "target=?,blocks=?,gen=?,listed_ns=?,attrs_known=? WHERE ino=?",
            (
                row.mode,
                row.uid,
                row.gid,
                row.nlink,
                row.size,
                row.atime_ns,
                row.mtime_ns,
                row.ctime_ns,
                row.target,
                row.blocks,
                row.gen,
                row.listed_ns,
                row.attrs_known,
                row.ino,
            ),
        )

    def set_content(self, ino: int, size: int, blocks: int, mtime_ns: int) -> bool:
        """Size, blocks and times after writing; False when the inode is gone. An `mtime_ns` that is
        known was set by utimens, and no write came after it."""
        cursor = self._db.execute(
            "UPDATE inode SET size=?,blocks=?,mtime_ns=?,"
            "ctime_ns=CASE mtime_ns WHEN ? THEN ctime_ns ELSE max(ctime_ns,?) END WHERE ino=?",
            (size, blocks, mtime_ns, mtime_ns, mtime_ns, ino),
        )
        return cursor.rowcount > 0

    def set_gen(self, ino: int, gen: int | None) -> None:
        """Point the inode at another generation."""
        self._db.execute("UPDATE inode SET gen=? WHERE ino=?", (gen, ino))

    def clear_gen(self, ino: int, gen: int) -> None:
        """The inode's content is the object's, if `gen` was its generation."""
        self._db.execute("UPDATE inode SET gen=NULL WHERE ino=? AND gen=?", (ino, gen))

    def set_listed(self, ino: int, listed_ns: int) -> None:
        """The directory's entries in the bucket are all in the database, as of `listed_ns`."""
        self._db.execute("UPDATE inode SET listed_ns=? WHERE ino=?", (listed_ns, ino))

    def touch_directory(self, ino: int, now_ns: int, nlink_delta: int = 0) -> None:
        """A directory's entries changed: times, and links when a subdirectory came or went."""
        self._db.execute(
            "UPDATE inode SET mtime_ns=?,ctime_ns=?,nlink=nlink+? WHERE ino=?",
            (now_ns, now_ns, nlink_delta, ino),
        )

    def add_link(self, ino: int, delta: int, now_ns: int) -> int:
        """Change the link count, return the new one."""
        row = self._db.one(
            "UPDATE inode SET nlink=nlink+?,ctime_ns=? WHERE ino=? RETURNING nlink",
            (delta, now_ns, ino),
        )
        assert row is not None
        return int(row[0])

    def set_links(self, ino: int, nlink: int, now_ns: int) -> None:
        """Set the link count."""
        self._db.execute("UPDATE inode SET nlink=?,ctime_ns=? WHERE ino=?", (nlink, now_ns, ino))

    def remove(self, ino: int) -> None:
        """Delete the inode and its extended attributes."""
        self._db.execute("DELETE FROM inode WHERE ino=?", (ino,))
        self._db.execute("DELETE FROM xattr WHERE ino=?", (ino,))

    def unlinked(self) -> list[int]:
        """Inodes with no name left: their last handle was open when the daemon ended."""
        return [row[0] for row in self._db.all("SELECT ino FROM inode WHERE nlink=0")]

    def count(self) -> int:
        """How many inodes there are, about: the highest number given out."""
        row = self._db.one("SELECT coalesce(max(ino),0) FROM inode")
        return int(row[0]) if row else 0

    def get_xattr(self, ino: int, name: bytes) -> bytes | None:
        """Value of an extended attribute, None when unset."""
        row = self._db.one("SELECT value FROM xattr WHERE ino=? AND name=?", (ino, name))
        return row[0] if row else None

    def xattrs(self, ino: int) -> list[tuple[bytes, bytes]]:
        """All (name, value) of an inode, by name."""
        return self._db.all("SELECT name,value FROM xattr WHERE ino=? ORDER BY name", (ino,))

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        """Set or replace."""
        self._db.execute(
            "INSERT INTO xattr VALUES(?,?,?)"
            " ON CONFLICT(ino,name) DO UPDATE SET value=excluded.value",
            (ino, name, value),
        )

    def remove_xattr(self, ino: int, name: bytes) -> bool:
        """Remove; False when it was not set."""
        cursor = self._db.execute("DELETE FROM xattr WHERE ino=? AND name=?", (ino, name))
        return cursor.rowcount > 0


def _values(row: InodeRow) -> tuple[object, ...]:
    return (
        row.ino,
        row.mode,
        row.uid,
        row.gid,
        row.nlink,
        row.size,
        row.atime_ns,
        row.mtime_ns,
        row.ctime_ns,
        row.target,
        row.blocks,
        row.gen,
        row.listed_ns,
        row.attrs_known,
    )
