"""Names that cannot have their places in the warm tier, because something else is there; and copies
that cannot be removed.

What can be seen (a directory where a file has to go, a file or symlink where a directory has to be)
is looked at in each round, and costs no copy. What shows only when it is tried (a file that may not
be replaced, a place where something is mounted) is tried again at growing intervals, since each try
copies the file anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
import trio

from cachefs.cache.warmdir import WarmDirectory
from cachefs.meta.warm import WarmRow
from cachefs.tiers.plan import Copy

log = structlog.get_logger("cachefs.warm")

_IN_THE_WAY = "something is in the way of a file in the warm tier"
_FIRST, _LONGEST = 5.0, 60.0
"""Seconds until the next try."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What one name waits for. `until`, `pause`: of one that was tried, when and after how many
    seconds it is tried again; 0: it is looked at."""

    path: str
    reason: str
    until: float = 0.0
    pause: float = 0.0


class Obstacles:
    """Which names wait for what. On the trio thread."""

    def __init__(self, directory: WarmDirectory) -> None:
        self._directory = directory
        self.found: dict[int, Obstacle] = {}
        """By name."""
        self.stuck: dict[int, Obstacle] = {}
        """Copies that are to be removed, and cannot be."""
        self._told: set[str] = set()

    @property
    def all(self) -> list[Obstacle]:
        """For people."""
        return [*self.found.values(), *self.stuck.values()]

    async def look(self, copies: Sequence[Copy], leaving: Collection[str]) -> set[int]:
        """Those among a round's names that have to wait; of others nothing is known any more.
        `leaving`: paths of copies that go by themselves. Raises OSError."""
        seen = await trio.to_thread.run_sync(self._see, copies, frozenset(leaving))
        now = trio.current_time()
        waiting = dict(seen)
        for copy in copies:
            known = self.found.get(copy.dentry)
            if known is not None and known.path == copy.path and known.until > now:
                waiting.setdefault(copy.dentry, known)
        names = {copy.dentry for copy in copies}
        # One that is due for a try stays known until that has succeeded: its pauses grow.
        tried = {k: v for k, v in self.found.items() if k in names and v.until and k not in seen}
        self.found = tried | waiting
        self._tell(_IN_THE_WAY, seen.values())
        return set(waiting)

    def _see(self, copies: Sequence[Copy], leaving: frozenset[str]) -> dict[int, Obstacle]:
        """In a thread."""
        clear: set[str] = set()
        found = {}
        for copy in copies:
            reason = self._directory.obstacle(copy.path, leaving, clear)
            if reason is not None:
                found[copy.dentry] = Obstacle(copy.path, reason)
        return found

    def note_failed(self, copy: Copy, reason: str) -> None:
        """A copy could not be shown when it was tried."""
        known = self.found.get(copy.dentry)
        again = known is not None and known.path == copy.path and known.pause
        pause = min(2 * known.pause, _LONGEST) if again and known is not None else _FIRST
        obstacle = Obstacle(copy.path, reason, trio.current_time() + pause, pause)
        self.found[copy.dentry] = obstacle
        self._tell(_IN_THE_WAY, [obstacle])

    def note_shown(self, names: Collection[int]) -> None:
        """They have their places."""
        for name in names:
            self.found.pop(name, None)

    def note_removed(self, rows: Iterable[WarmRow], refused: Mapping[int, str]) -> None:
        """Copies were to be removed; those whose names are in `refused`, with why, still are."""
        for row in rows:
            self.stuck.pop(row.dentry, None)
            if row.dentry in refused:
                self.stuck[row.dentry] = Obstacle(row.path, refused[row.dentry])
        self._tell("a copy cannot be removed from the warm tier", self.stuck.values())

    def forget_moot(self, places: Mapping[int, str]) -> None:
        """Of copies that cannot be removed those stay known that are there still; `places`: name ->
        path."""
        self.stuck = {k: each for k, each in self.stuck.items() if places.get(k) == each.path}

    def _tell(self, event: str, obstacles: Iterable[Obstacle]) -> None:
        """Each once for as long as it is there."""
        for each in obstacles:
            if each.reason not in self._told:
                log.warning(event, path=each.path, reason=each.reason)
        self._told = {each.reason for each in self.all}
