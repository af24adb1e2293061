"""Requests whose mutation is committed, for the daemon that gets them again.

A request in flight when a daemon dies is sent again to the next one, which cannot tell from the
namespace whether it was applied: the name may have been there before. So a mutation that must not
happen twice writes the request's number in its own transaction. A ring is enough: no more requests
are in flight than the daemon has tasks.
"""

from __future__ import annotations

from contextvars import ContextVar

from cachefs.meta.database import Database

_SLOTS = 2048

current_request: ContextVar[int] = ContextVar("current_request", default=0)
"""Number of the request that the present task handles and must not apply twice; 0: none."""


class Applied:
    """The `applied` table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._next = 0
        db.before_commit = self._record

    def _record(self) -> None:
        request = current_request.get()
        if not request:
            return
        self._next = (self._next + 1) % _SLOTS
        self._db.execute("INSERT OR REPLACE INTO applied VALUES(?,?)", (self._next, request))
        # Not before: one that is rolled back may be tried again.
        self._db.after_commit(_done)

    def all(self) -> set[int]:
        """Numbers of the requests applied lately."""
        return {row[0] for row in self._db.all("SELECT request FROM applied")}

    def clear(self) -> None:
        """A new connection: numbers start anew."""
        self._db.execute("DELETE FROM applied")


def _done() -> None:
    current_request.set(0)
