"""Sums and sets over many rows, for status and for those who wait.

Counted in SQL, so that ten thousand dirty files cost some milliseconds, not ten thousand queries.
"""

from __future__ import annotations

from collections.abc import Collection

from cachefs.meta.database import Database

_DIRTY = "('sealed','uploading','held','stalled','conflicted')"

_SUBTREE = (
    "WITH RECURSIVE below(id,name,ino) AS ("
    " SELECT id,name,ino FROM dentry WHERE parent=?"
    " UNION ALL SELECT d.id,d.name,d.ino FROM dentry d JOIN below b ON d.parent=b.ino)"
)


class Summary:
    """Questions about all of a mount at once."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def dirty(self) -> tuple[int, int]:
        """(files, bytes) of closed content that the store lacks. What has no name is left out."""
        return self._files(f"g.state IN {_DIRTY}")

    def in_state(self, state: str) -> tuple[int, int]:
        """(files, bytes) of generations in one state."""
        return self._files("g.state=?", state)

    def _files(self, condition: str, *args: str) -> tuple[int, int]:
        row = self._db.one(
            "SELECT count(DISTINCT g.ino),coalesce(sum(g.size),0) FROM generation g"
            f" JOIN inode i ON i.ino=g.ino WHERE {condition} AND i.nlink>0",
            args,
        )
        assert row is not None
        return row[0], row[1]

    def has_dirty(self, ino: int) -> bool:
        """Whether any closed content of an inode is not in the store."""
        sql = f"SELECT 1 FROM generation WHERE ino=? AND state IN {_DIRTY} LIMIT 1"
        return self._db.one(sql, (ino,)) is not None

    def other_changes(self, uid: int, gid: int) -> int:
        """Pending effects other than content: renames, deletes, links, symlinks, attributes.

        A new directory with entries counts through those: it needs no marker while its owner is
        `uid` and `gid`, whom directories without one have.
        """
        row = self._db.one(
            "SELECT count(*) FROM effect e LEFT JOIN generation g ON g.gen=e.gen"
            " LEFT JOIN dentry d ON d.id=e.dentry LEFT JOIN inode i ON i.ino=d.ino"
            " WHERE (g.gen IS NULL OR g.state='durable') AND NOT (e.kind='publish'"
            " AND i.mode IS 16877 AND i.uid IS ? AND i.gid IS ?"
            " AND EXISTS (SELECT 1 FROM dentry c WHERE c.parent=i.ino))",
            (uid, gid),
        )
        assert row is not None
        return int(row[0])

    def unsynced(self, volatile: Collection[int] = ()) -> set[int]:
        """Dirty generations whose bytes would not survive a power cut. `volatile`: the numbers of
        devices that do not."""
        marks = ",".join("?" * len(volatile))
        sql = (
            f"SELECT gen FROM generation WHERE state IN {_DIRTY}"
            f" AND (synced=0 OR (device IN ({marks}) AND copy_size IS NULL))"
        )
        return {row[0] for row in self._db.all(sql, tuple(volatile))}

    def sent(self) -> dict[int, int]:
        """Bytes that the store has confirmed of each generation whose upload is under way."""
        rows = self._db.all(
            'SELECT u.gen,sum(p."end"-p.start) FROM upload u JOIN upload_part p ON p.upload=u.id'
            " WHERE p.etag IS NOT NULL GROUP BY u.gen"
        )
        return dict(rows)

    def subtree(self, ino: int) -> list[tuple[int, bytes, int, int, int]]:
        """(dentry, name, inode, size, mtime_ns) of all below directory `ino` but directories."""
        return self._db.all(
            f"{_SUBTREE} SELECT b.id,b.name,b.ino,i.size,i.mtime_ns FROM below b"
            " JOIN inode i ON i.ino=b.ino WHERE (i.mode & 61440)<>16384",
            (ino,),
        )
