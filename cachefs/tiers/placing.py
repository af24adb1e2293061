"""What shows and removes copies in the warm tier's directory: in a thread, step by step.

What concerns one place alone (`OBSTRUCTING`) ends nothing; every other OSError is raised.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import structlog

from cachefs.cache.warmdir import OBSTRUCTING, WarmDirectory
from cachefs.meta.warm import WarmRow
from cachefs.tiers.plan import Copy, Plan, shown

log = structlog.get_logger("cachefs.warm")


class Placer:
    """Nothing of it awaits, or touches the database."""

    def __init__(self, directory: WarmDirectory) -> None:
        self._directory = directory

    def show(
        self, copies: Sequence[Copy], plan: Plan, in_the_way: Mapping[int, Sequence[WarmRow]]
    ) -> tuple[list[tuple[WarmRow, Copy]], list[tuple[Copy, str]]]:
        """One after the other, then all names to the disk: (what was shown, what could not be and
        why). `in_the_way`: name -> what goes before it.

        Nothing follows a sign that could not. What a copy leaves behind goes before the new place
        is on record, or nobody would know of it after a kill.
        """
        leaving = {row.path for row in plan.leaving}
        rows: list[tuple[WarmRow, Copy]] = []
        failed: list[tuple[Copy, str]] = []
        for copy in copies:
            try:
                for row in in_the_way.get(copy.dentry, ()):
                    self._directory.remove(shown(row))
                rows.append((self._show_one(copy, leaving), copy))
            except OSError as error:
                if error.errno not in OBSTRUCTING:
                    raise
                failed.append((copy, self._why(copy, error)))
                self._directory.drop(str(copy.dentry))
                if copy in plan.signs:
                    break
        self._directory.sync([row.path for row, _ in rows])
        return rows, failed

    def _show_one(self, copy: Copy, leaving: Container[str]) -> WarmRow:
        wanted, name = copy.wanted, str(copy.dentry)
        mtime = self._directory.show(name, copy.path)
        if copy.moved:
            self._directory.drop(name)  # It stays where both were links to one file.
        if copy.old is not None and copy.old.path in leaving:
            self._leave(copy.old)
        return WarmRow(wanted.dentry, copy.path, wanted.gen, wanted.size, mtime)

    def _leave(self, old: WarmRow) -> None:
        """What cannot be removed is nobody's any more."""
        reason = self._remove_one(old)
        if reason is not None:
            log.warning("a copy stays in the warm tier", path=old.path, reason=reason)

    def _why(self, copy: Copy, error: OSError) -> str:
        """What is in a copy's way, for people."""
        seen = self._directory.obstacle(copy.path, (), set())
        place = self._directory.directory / copy.path
        return seen or f"{place}: {error.strerror}: move away what is there"

    def remove(self, rows: Sequence[WarmRow]) -> dict[int, str]:
        """The names of those that cannot be removed, and why, for people."""
        self._directory.check()
        refused = {}
        for row in rows:
            reason = self._remove_one(row)
            if reason is not None:
                refused[row.dentry] = reason
        self._directory.sync([row.path for row in rows])
        return refused

    def _remove_one(self, row: WarmRow) -> str | None:
        """Why a copy cannot be removed, for people; None: it is gone, or is somebody else's."""
        try:
            self._directory.remove(shown(row))
        except OSError as error:
            if error.errno not in OBSTRUCTING:
                raise
            return f"{self._directory.directory / row.path}: {error.strerror}: remove it"
        return None
