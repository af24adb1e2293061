"""Queries on what the bucket is known to hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cachefs.meta.database import Database
from cachefs.meta.rows import ObjectRow, to_signed, to_unsigned

_COLUMNS = "key,dentry,etag,size,crc64,gen,parts,meta,mtime_ns,stale,intents"


class Objects:
    """The `object` table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._watchers: list[set[str]] = []

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """For the length of the block, the keys of which something else was noted (or was about to
        be) gather in the set: what was learnt of them before may be old."""
        changed: set[str] = set()
        self._watchers.append(changed)
        try:
            yield changed
        finally:
            self._watchers[:] = [each for each in self._watchers if each is not changed]

    def _note(self, *keys: str) -> None:
        for each in self._watchers:
            each.update(keys)

    def get(self, key: str) -> ObjectRow | None:
        """What is known under a key."""
        row = self._db.one(f"SELECT {_COLUMNS} FROM object WHERE key=?", (key,))
        return _row(row) if row else None

    def among(self, keys: Sequence[str]) -> dict[str, ObjectRow]:
        """What is known under any of up to some thousands of keys."""
        marks = ",".join("?" * len(keys))
        rows = self._db.all(f"SELECT {_COLUMNS} FROM object WHERE key IN ({marks})", keys)
        return {row[0]: _row(row) for row in rows}

    def shown_among(self, keys: Sequence[str]) -> set[str]:
        """Those of some keys under which the bucket shows something, as far as is known."""
        rows = self._db.all(
            "SELECT key FROM object WHERE key IN (SELECT value FROM json_each(?)) AND etag<>''",
            (json.dumps(keys),),
        )
        return {row[0] for row in rows}

    def any_below(self, prefix: str) -> bool:
        """Whether anything is known under a key that starts with `prefix`."""
        sql = "SELECT 1 FROM object WHERE key>=? AND key<? LIMIT 1"
        return self._db.one(sql, (prefix, prefix + "\U0010ffff")) is not None

    def of_dentry(self, dentry: int) -> list[ObjectRow]:
        """Objects that show an entry's content; more than one while a rename is under way."""
        rows = self._db.all(f"SELECT {_COLUMNS} FROM object WHERE dentry=?", (dentry,))
        return [_row(row) for row in rows]

    def of_inode(self, ino: int) -> list[ObjectRow]:
        """Objects of every name of an inode."""
        columns = ",".join(f"o.{column}" for column in _COLUMNS.split(","))
        rows = self._db.all(
            f"SELECT {columns} FROM object o JOIN dentry d ON o.dentry=d.id WHERE d.ino=?", (ino,)
        )
        return [_row(row) for row in rows]

    def gen_of(self, version: ObjectRow) -> int | None:
        """The generation that is known by now to hold the bytes of a version of an object."""
        row = self.get(version.key)
        return row.gen if row is not None and row.etag == version.etag else version.gen

    def holding(self, ino: int, gen: int) -> list[ObjectRow]:
        """Those of an inode's objects that hold the bytes of generation `gen` now."""
        rows = self.of_inode(ino)
        return [row for row in rows if row.gen == gen and row.etag and not row.stale]

    def put(self, row: ObjectRow) -> None:
        """Insert or replace."""
        self._note(row.key)
        self._db.execute(
            f"INSERT OR REPLACE INTO object({_COLUMNS}) VALUES(?,?,?,?,?,?,?,?,?,?,?)",
            (
                row.key,
                row.dentry,
                row.etag,
                row.size,
                to_signed(row.crc64),
                row.gen,
                row.parts,
                row.meta,
                row.mtime_ns,
                row.stale,
                row.intents,
            ),
        )

    def outdate(self, gen: int) -> None:
        """Generation `gen` is written to again: no object has its bytes any more."""
        rows = self._db.all("SELECT key FROM object WHERE gen=?", (gen,))
        self._note(*(row[0] for row in rows))
        self._db.execute("UPDATE object SET gen=NULL WHERE gen=?", (gen,))

    def forget_dentry(self, dentry: int) -> list[str]:
        """The name is gone: its objects belong to nobody. Returns their keys."""
        keys = [row.key for row in self.of_dentry(dentry)]
        self._note(*keys)
        self._db.execute("UPDATE object SET dentry=NULL WHERE dentry=?", (dentry,))
        return keys

    def unanswered(self) -> list[ObjectRow]:
        """Deleted keys for which requests are without an answer."""
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM object WHERE dentry IS NULL AND etag='' AND intents NOT NULL"
        )
        return [_row(row) for row in rows]

    def remove(self, key: str) -> None:
        """The bucket no longer holds it."""
        self._note(key)
        self._db.execute("DELETE FROM object WHERE key=?", (key,))

    def below(self, prefix: str) -> list[ObjectRow]:
        """Objects whose key starts with `prefix`."""
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM object WHERE key>=? AND key<? ORDER BY key",
            (prefix, prefix + "\U0010ffff"),
        )
        return [_row(row) for row in rows]


def _row(values: tuple[Any, ...]) -> ObjectRow:
    row = ObjectRow(*values)
    row.crc64 = to_unsigned(row.crc64)
    return row
