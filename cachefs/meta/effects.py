"""Queries on effects."""

from __future__ import annotations

from collections.abc import Sequence

from cachefs.meta.database import Database
from cachefs.meta.rows import EffectRow

_COLUMNS = 'id,kind,dentry,gen,key,class,since,"end",state,error,queued_ns,first_ns'


class Effects:
    """The `effect` table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        row = db.one("SELECT coalesce(max(id),0) FROM effect")
        self._last = int(row[0]) if row else 0

    def all(self) -> list[EffectRow]:
        """Every pending effect in order of its end number."""
        rows = self._db.all(f'SELECT {_COLUMNS} FROM effect ORDER BY "end",id')
        return [EffectRow(*row) for row in rows]

    def contents(self) -> dict[int, tuple[int, bytes, int]]:
        """Effect -> (directory, name, bytes) of all that publish the content of a file: for who
        reads them all, one query instead of three for each."""
        rows = self._db.all(
            "SELECT e.id,d.parent,d.name,g.size FROM effect e JOIN dentry d ON d.id=e.dentry"
            " JOIN generation g ON g.gen=e.gen WHERE e.kind='publish'"
        )
        return {effect: (parent, name, size) for effect, parent, name, size in rows}

    def add(self, row: EffectRow) -> int:
        """Insert; returns and stores the new number, which this process uses only once: an effect
        that is gone may still be in the flusher's hands."""
        self.add_all([row])
        return row.id

    def add_all(self, rows: Sequence[EffectRow]) -> None:
        """The same with many."""
        for row in rows:
            self._last += 1
            row.id = self._last
        self._db.many(
            f"INSERT INTO effect({_COLUMNS}) VALUES(?,?,?,?,?,?,?,?,?,?,?,?)", map(_values, rows)
        )

    def save(self, row: EffectRow) -> None:
        """Write every column but the number back."""
        self._db.execute(
            'UPDATE effect SET kind=?,dentry=?,gen=?,key=?,class=?,since=?,"end"=?,state=?,'
            "error=?,queued_ns=?,first_ns=? WHERE id=?",
            (*_values(row)[1:], row.id),
        )

    def remove(self, effect: int) -> None:
        """It happened, or it never will."""
        self._db.execute("DELETE FROM effect WHERE id=?", (effect,))


def _values(row: EffectRow) -> tuple[object, ...]:
    return (
        row.id,
        row.kind,
        row.dentry,
        row.gen,
        row.key,
        row.klass,
        row.since,
        row.end,
        row.state,
        row.error,
        row.queued_ns,
        row.first_ns,
    )
