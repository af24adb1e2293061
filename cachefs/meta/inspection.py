"""A database seen by who checks it: as rows, with nothing taken for granted, no daemon about."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cachefs.meta.database import ADDED
from cachefs.meta.invariants import Invariant
from cachefs.model.extents import ExtentSet

_ROUNDS = 1000
"""Most times that one mending is repeated: cycles of directories are broken one at a time."""
_DEEPEST = 4096
SALVAGED = b"salvaged"


@dataclass(frozen=True, slots=True)
class FileRow:
    """A generation as far as its cache file is concerned. Sizes in bytes."""

    gen: int
    ino: int
    device: int
    file: int
    state: str
    size: int
    is_whole: bool
    """False for a copy of which only parts have been fetched."""
    grows: bool
    is_current: bool
    crc64: int | None
    copy_device: int | None = None
    copy_file: int | None = None
    copy_size: int | None = None
    """Of a second cache file."""
    error: str | None = None
    anchored: bool = False
    """It is known to have been on the disk with its directory entry."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A range of a generation that the store has confirmed, with its checksum."""

    gen: int
    start: int
    end: int
    crc64: int


class Inspection:
    """One open database. Everything may raise sqlite3.Error, for it may be damaged."""

    def __init__(self, path: Path) -> None:
        """Open the database at `path`, which is there."""
        uri = f"{path.absolute().as_uri()}?mode=rw"
        self._db = sqlite3.connect(uri, uri=True, timeout=1, isolation_level=None)

    def close(self) -> None:
        """Close; what was changed is in the database file then."""
        self._db.close()

    def damage(self) -> str | None:
        """What is wrong with the database as a file; None if it is whole."""
        try:
            rows = self._db.execute("PRAGMA integrity_check(1)").fetchall()
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        except sqlite3.Error as error:
            return str(error)
        if not tables:
            return "it is empty"
        text = str(rows[0][0])
        return None if text == "ok" else text.splitlines()[-1]

    def reindex(self) -> None:
        """Make every index anew: all that can be done about a damaged one."""
        self._db.execute("REINDEX")

    def version(self) -> int:
        """The schema's version, 0 when it says none."""
        rows = self._db.execute("SELECT value FROM setting WHERE key='schema_version'").fetchall()
        return int(rows[0][0]) if rows and str(rows[0][0]).isdigit() else 0

    def complete(self) -> None:
        """Add the columns that a database of an older version lacks, as opening it does."""
        for table, column, kind in ADDED:
            known = {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}
            if known and column not in known:
                self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")

    def devices(self) -> list[str] | None:
        """Names of the cache devices by number; None: the database does not know them by name."""
        row = self._db.execute("SELECT value FROM setting WHERE key='devices'").fetchone()
        try:
            return [str(each["name"]) for each in json.loads(row[0])] if row else None
        except (ValueError, TypeError, KeyError):
            return None

    def boot(self) -> str:
        """The run of the machine in which the cache was last in use; empty: all of it was brought
        to the disk since."""
        row = self._db.execute("SELECT value FROM setting WHERE key='boot'").fetchone()
        return str(row[0]) if row else ""

    def offences(self, invariant: Invariant) -> list[str]:
        """One line for each row that breaks an invariant."""
        return [str(row[0]) for row in self._db.execute(invariant.sql)]

    def mend(self, invariant: Invariant) -> list[str]:
        """Put right what breaks an invariant; what is left of it."""
        left = self.offences(invariant)
        for _ in range(_ROUNDS if invariant.mend else 0):
            with self.transaction():
                for statement in invariant.mend:
                    asked = ":salvaged" in statement
                    self._db.execute(statement, {"salvaged": self._salvaged()} if asked else {})
            before, left = left, self.offences(invariant)
            if not left or left == before:
                break
        return left

    def transaction(self) -> sqlite3.Connection:
        """All or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        return self._db

    def _salvaged(self) -> int:
        """The inode of the directory for what has lost its place, made when it is needed."""
        found = self._db.execute(
            "SELECT ino FROM dentry WHERE parent=1 AND name=?", (SALVAGED,)
        ).fetchone()
        if found:
            return int(found[0])
        ino, entry = (self._next(*each) for each in (("inode", "ino"), ("dentry", "id")))
        self._db.execute(
            "INSERT INTO inode(ino,mode,uid,gid,nlink,size,atime_ns,mtime_ns,ctime_ns,listed_ns)"
            " VALUES(?,16832,0,0,2,4096,0,0,0,0)",
            (ino,),
        )
        self._db.execute("INSERT INTO dentry VALUES(?,1,?,?)", (entry, SALVAGED, ino))
        return ino

    def _next(self, table: str, column: str) -> int:
        (top,) = self._db.execute(f"SELECT coalesce(max({column}),0) FROM {table}").fetchone()
        row = self._db.execute(
            "SELECT value FROM setting WHERE key=?", (f"next_{table}",)
        ).fetchone()
        number = max(int(top) + 1, int(row[0]) if row and str(row[0]).isdigit() else 0)
        self._db.execute(
            "INSERT OR REPLACE INTO setting VALUES(?,?)", (f"next_{table}", str(number + 1))
        )
        return number

    # -- cache files --------------------------------------------------------------------------

    def files(self) -> Iterator[FileRow]:
        """Every generation."""
        rows = self._db.execute(
            "SELECT g.gen,g.ino,g.device,g.file,g.state,g.size,"
            "g.present IS NULL AND g.gen NOT IN (SELECT gen FROM span),g.grows,"
            "i.gen IS g.gen,coalesce(g.crc64,(SELECT o.crc64 FROM object o WHERE o.gen=g.gen"
            " AND o.size=g.size AND g.state='durable' AND NOT o.stale AND o.etag<>''))"
            ",g.copy_device,g.copy_file,g.copy_size,g.error,g.anchored OR g.synced"
            " FROM generation g LEFT JOIN inode i ON i.ino=g.ino ORDER BY g.gen"
        )
        for row in rows.fetchall():
            crc64 = None if row[9] is None else int(row[9]) % (1 << 64)
            gen, ino, device, file, state, size = row[:6]
            flags = bool(row[6]), bool(row[7]), bool(row[8])
            more = *row[10:14], bool(row[14])
            yield FileRow(gen, ino, device, file, state, size, *flags, crc64, *more)

    def sent(self) -> list[Sent]:
        """Every part that is in the store already, of uploads that go on."""
        rows = self._db.execute(
            'SELECT u.gen,p.start,p."end",p.crc64 FROM upload_part p JOIN upload u ON u.id=p.upload'
            " WHERE p.source='upload' AND p.etag IS NOT NULL AND p.crc64 IS NOT NULL AND u.gen<>0"
        )
        return [Sent(gen, start, end, crc % (1 << 64)) for gen, start, end, crc in rows]

    def path_of(self, ino: int) -> str | None:
        """A path of an inode below the mount, as far as it can be followed; None: no name."""
        parts: list[bytes] = []
        while ino != 1 and len(parts) < _DEEPEST:
            row = self._db.execute(
                "SELECT parent,name FROM dentry WHERE ino=? ORDER BY id LIMIT 1", (ino,)
            ).fetchone()
            if row is None:
                break
            ino = row[0]
            parts.append(bytes(row[1]))
        return b"/".join(reversed(parts)).decode(errors="backslashreplace") if parts else None

    def odd_values(self) -> list[tuple[str, str]]:
        """(what is odd, the statement that mends it) of every column that holds values which are
        not of its type: SQLite keeps whatever it is given."""
        found = []
        for table in self._tables():
            columns = self._db.execute(f"PRAGMA table_info({table})").fetchall()
            for _, name, kind, is_needed, _, key in columns:
                allowed = [kind.lower(), *([] if is_needed or key else ["null"])]
                odd = f'typeof("{name}") NOT IN ({",".join(map(repr, allowed))})'
                (count,) = self._db.execute(f"SELECT count(*) FROM {table} WHERE {odd}").fetchone()
                value = f'CAST("{name}" AS {kind})'
                mended = f"coalesce({value},CAST('' AS {kind}))" if is_needed else "NULL"
                statement = f'UPDATE OR IGNORE {table} SET "{name}"={mended} WHERE {odd}'
                if count:
                    found.append((f"{count} in {table}.{name}", statement))
        return found

    def mend_values(self) -> list[str]:
        """Give values that are not of their column's type one that is; what is odd still."""
        with self.transaction():
            for _, statement in self.odd_values():
                self._db.execute(statement)
        return [what for what, _ in self.odd_values()]

    def _tables(self) -> list[str]:
        rows = self._db.execute(
            "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'"
        )
        return [row[0] for row in rows]

    def bad_extents(self) -> list[tuple[int, str]]:
        """(generation, what is wrong) of those whose packed extents make no sense."""
        rows = self._db.execute(
            "SELECT gen,size,dirty,present FROM generation"
            " WHERE state NOT IN ('open','held') AND (dirty IS NOT NULL OR present IS NOT NULL)"
        )
        found = []
        for gen, size, *packed in rows:
            for name, value in zip(("dirty", "present"), packed, strict=True):
                if value is not None and (why := _no_extents(value, size)):
                    found.append((gen, f"{name}: {why}"))
        return found

    # -- mending ------------------------------------------------------------------------------

    def forget_extents(self, gen: int) -> None:
        """Extents that make no sense: all is dirty, and a copy is fetched anew."""
        with self.transaction():
            self._db.execute(
                "UPDATE generation SET dirty=NULL,base=NULL WHERE gen=? AND present IS NULL", (gen,)
            )
            self._forget(gen, "state='durable' AND present IS NOT NULL")

    def forget_copy(self, gen: int) -> None:
        """A copy of what the store has is none: the file is read from there again."""
        with self.transaction():
            self._forget(gen, "state='durable'")

    def _forget(self, gen: int, condition: str) -> None:
        self._db.execute(
            f"UPDATE inode SET gen=NULL WHERE gen=? AND gen IN (SELECT gen FROM generation"
            f" WHERE {condition})",
            (gen,),
        )
        self._db.execute(f"DELETE FROM generation WHERE gen=? AND {condition}", (gen,))

    def forget_second(self, gen: int) -> None:
        """A second cache file that is not there."""
        with self.transaction():
            self._db.execute(
                "UPDATE generation SET copy_device=NULL,copy_file=NULL,copy_size=NULL WHERE gen=?",
                (gen,),
            )

    def hold(self, gen: int, why: str) -> None:
        """Dirty content that a person has to judge: neither published nor thrown away."""
        with self.transaction():
            self._db.execute("UPDATE generation SET state='held',error=? WHERE gen=?", (why, gen))
            self._db.execute("UPDATE effect SET state='blocked',error=? WHERE gen=?", (why, gen))
            self._db.execute("UPDATE upload SET gen=0 WHERE gen=?", (gen,))

    # -- salvaging ----------------------------------------------------------------------------

    def away(self) -> dict[int, list[tuple[int, int, str]]]:
        """Generation -> (start, end, key) of each range that is in the store and not in its cache
        file. Of the generations that an object shows nothing is: all of it is there."""
        found: dict[int, list[tuple[int, int, str]]] = {}
        if "span" not in self._tables():  # of an older version
            return found
        rows = self._db.execute(
            'SELECT gen,start,"end",key FROM span WHERE gen<>0 AND etag IS NOT NULL'
            " ORDER BY gen,start"
        )
        for gen, start, end, key in rows:
            found.setdefault(gen, []).append((start, end, str(key)))
        return found

    def partial(self) -> dict[int, list[tuple[int, int, str]]]:
        """The same of what was fetched in part, or has left the cache: what lacks is in the object,
        if it still is what it was."""
        rows = self._db.execute(
            "SELECT g.gen,g.size,g.present,o.key FROM generation g JOIN object o ON o.gen=g.gen"
            " WHERE g.present IS NOT NULL AND o.etag<>''"
        )
        found: dict[int, list[tuple[int, int, str]]] = {}
        for gen, size, packed, key in rows:
            if _no_extents(packed, size) is None:
                gaps = ExtentSet.unpack(packed).gaps(0, size)
                found[gen] = [(start, end, str(key)) for start, end in gaps]
        return found

    def names(self) -> Iterable[tuple[int, bytes, int]]:
        """(directory, name, inode) of every entry."""
        return self._db.execute("SELECT parent,name,ino FROM dentry ORDER BY id").fetchall()


def _no_extents(value: object, size: int) -> str | None:
    try:
        extents = ExtentSet.unpack(value) if isinstance(value, bytes) else None
    except ValueError as error:
        return str(error)
    if extents is None:
        return "no bytes"
    beyond = [end for _, end in extents if end > size]
    return f"reaches {beyond[-1]} of {size} bytes" if beyond else None
