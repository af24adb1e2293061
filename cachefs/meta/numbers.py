"""Numbers that are never used twice, taken from memory.

SQLite's AUTOINCREMENT keeps a counter row per table and rewrites it at every insert. Here a block
of numbers is reserved with one write, and handed out from memory; what a crash or a rollback
leaves unused of it is never used.
"""

from __future__ import annotations

from cachefs.meta.database import Database

_BLOCK = 4096


class Numbers:
    """One sequence, kept in the settings under `name`; the first number is `first`."""

    def __init__(self, db: Database, name: str, first: int = 1) -> None:
        self._db = db
        self._name = name
        row = db.one("SELECT value FROM setting WHERE key=?", (name,))
        self._next = self._limit = int(row[0]) if row else first
        db.on_rollback.append(self._forget_block)

    def _forget_block(self) -> None:
        # The reservation may have been rolled back: make a new one before the next number.
        self._limit = self._next

    def take(self) -> int:
        """The next number."""
        if self._next >= self._limit:
            self._limit = self._next + _BLOCK
            self._db.execute(
                "INSERT INTO setting VALUES(?,?)"
                " ON CONFLICT(key) DO UPDATE SET value=excluded.value",
                (self._name, str(self._limit)),
            )
        self._next += 1
        return self._next - 1
