"""Queries on names: dentries, paths, subtrees."""

from __future__ import annotations

from collections.abc import Sequence

from cachefs.meta.database import Database
from cachefs.meta.numbers import Numbers
from cachefs.meta.rows import DentryRow

_COLUMNS = "id,parent,name,ino"
_PATHS = 4096
"""Directory paths remembered."""
_TOGETHER = 500
"""Entries that one query asks for."""

_SUBTREE = (
    "WITH RECURSIVE below(id,ino) AS ("
    " SELECT id,ino FROM dentry WHERE parent=?"
    " UNION ALL SELECT d.id,d.ino FROM dentry d JOIN below b ON d.parent=b.ino)"
)


class Dentries:
    """The `dentry` table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._numbers = Numbers(db, "next_dentry")
        self._directories: dict[int, bytes] = {}
        """Paths of directories asked for lately; emptied whenever a name moves."""
        db.on_rollback.append(self._directories.clear)

    def get(self, parent: int, name: bytes) -> DentryRow | None:
        """The entry `name` of directory `parent`."""
        row = self._db.one(
            f"SELECT {_COLUMNS} FROM dentry WHERE parent=? AND name=?", (parent, name)
        )
        return DentryRow(*row) if row else None

    def by_id(self, dentry: int) -> DentryRow | None:
        """The entry of that number."""
        row = self._db.one(f"SELECT {_COLUMNS} FROM dentry WHERE id=?", (dentry,))
        return DentryRow(*row) if row else None

    def of_inode(self, ino: int) -> list[DentryRow]:
        """Every name of an inode, oldest first."""
        rows = self._db.all(f"SELECT {_COLUMNS} FROM dentry WHERE ino=? ORDER BY id", (ino,))
        return [DentryRow(*row) for row in rows]

    def add(self, parent: int, name: bytes, ino: int) -> int:
        """New entry; returns its number. Raises sqlite3.IntegrityError when the name is taken."""
        number = self._numbers.take()
        self._db.execute("INSERT INTO dentry VALUES(?,?,?,?)", (number, parent, name, ino))
        return number

    def add_all(self, entries: Sequence[tuple[int, bytes, int]]) -> dict[int, DentryRow]:
        """Many new entries, each (directory, name, inode); by inode. Raises as `add`."""
        rows = [DentryRow(self._numbers.take(), *entry) for entry in entries]
        values = ((row.id, row.parent, row.name, row.ino) for row in rows)
        self._db.many("INSERT INTO dentry VALUES(?,?,?,?)", values)
        return {row.ino: row for row in rows}

    def move(self, dentry: int, parent: int, name: bytes) -> None:
        """Rename: the number stays."""
        self._directories.clear()
        self._db.execute("UPDATE dentry SET parent=?,name=? WHERE id=?", (parent, name, dentry))

    def swap(self, one: DentryRow, other: DentryRow) -> None:
        """Exchange two names (RENAME_EXCHANGE)."""
        # The unique index forbids both rows holding one name, even for a moment.
        self.move(one.id, -1, b"")
        self.move(other.id, one.parent, one.name)
        self.move(one.id, other.parent, other.name)

    def remove(self, dentry: int, ino: int | None = None) -> None:
        """Delete the entry; `ino`: of a directory, whose path is then no more."""
        if ino is not None:
            self._directories.pop(ino, None)
        self._db.execute("DELETE FROM dentry WHERE id=?", (dentry,))

    def has_children(self, ino: int) -> bool:
        """True when directory `ino` has any entry."""
        return self._db.one("SELECT 1 FROM dentry WHERE parent=? LIMIT 1", (ino,)) is not None

    def names(self, parent: int) -> set[bytes]:
        """Every name in a directory."""
        return {row[0] for row in self._db.all("SELECT name FROM dentry WHERE parent=?", (parent,))}

    def below(self, ino: int) -> list[int]:
        """Numbers of every entry below directory `ino`, at any depth."""
        return [row[0] for row in self._db.all(f"{_SUBTREE} SELECT id FROM below", (ino,))]

    def longest_below(self, ino: int) -> int:
        """Bytes of the longest path below directory `ino`, seen from there; 0: there is none."""
        row = self._db.one(
            "WITH RECURSIVE below(ino,bytes) AS ("
            " SELECT ino,length(name) FROM dentry WHERE parent=?"
            " UNION ALL SELECT d.ino,b.bytes+1+length(d.name)"
            " FROM dentry d JOIN below b ON d.parent=b.ino)"
            " SELECT coalesce(max(bytes),0) FROM below",
            (ino,),
        )
        return int(row[0]) if row else 0

    def many(self, dentries: Sequence[int]) -> dict[int, tuple[DentryRow, bool, bool]]:
        """(entry, whether it is a directory, whether the bucket shows it) of each of these numbers
        that there is: one query for hundreds."""
        found: dict[int, tuple[DentryRow, bool, bool]] = {}
        for first in range(0, len(dentries), _TOGETHER):
            some = dentries[first : first + _TOGETHER]
            rows = self._db.all(
                "SELECT d.id,d.parent,d.name,d.ino,(i.mode&61440)=16384,"
                " EXISTS(SELECT 1 FROM object o WHERE o.dentry=d.id) FROM dentry d"
                f" LEFT JOIN inode i ON i.ino=d.ino WHERE d.id IN ({','.join('?' * len(some))})",
                some,
            )
            for *columns, is_dir, is_shown in rows:
                entry = DentryRow(*columns)
                found[entry.id] = (entry, bool(is_dir), bool(is_shown))
        return found

    def files_below(self, ino: int) -> list[tuple[int, int]]:
        """(dentry, inode) of every regular file below directory `ino`."""
        return self._db.all(
            f"{_SUBTREE} SELECT b.id,b.ino FROM below b JOIN inode i ON i.ino=b.ino"
            " WHERE (i.mode & 61440)=32768",
            (ino,),
        )

    def path(self, parent: int, name: bytes) -> bytes:
        """Path from the mount's root, without a leading slash."""
        base = self.directory_path(parent)
        return base + b"/" + name if base else name

    def path_of(self, dentry: int) -> bytes | None:
        """Path of an entry by number, None when it is gone."""
        row = self._db.one("SELECT parent,name FROM dentry WHERE id=?", (dentry,))
        return self.path(row[0], row[1]) if row else None

    def directory_path(self, ino: int) -> bytes:
        """Path of a directory; the root's is empty. LookupError when it has no name."""
        if ino == 1:
            return b""
        known = self._directories.get(ino)
        if known is not None:
            return known
        row = self._db.one("SELECT parent,name FROM dentry WHERE ino=? LIMIT 1", (ino,))
        if row is None:
            raise LookupError(f"directory {ino} has no name")
        if len(self._directories) >= _PATHS:
            self._directories.clear()
        path = self._directories[ino] = self.path(row[0], row[1])
        return path

    def is_below(self, ino: int, ancestor: int) -> bool:
        """True when directory `ino` is `ancestor` or below it."""
        while ino != ancestor:
            if ino == 1:
                return False
            row = self._db.one("SELECT parent FROM dentry WHERE ino=? LIMIT 1", (ino,))
            if row is None:
                return False
            ino = row[0]
        return True
