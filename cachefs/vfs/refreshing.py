"""Keeping up with what others do in the bucket.

A directory that is in use is listed again in the background before its listing is older than the
time to live. The first look at one that nobody used for longer waits for that, but not for long,
and not while the store is out of reach. So nobody sees a view that is older, and what is made here
waits for nothing.

What a round does with a directory is in `rounds`. Rounds run in the nursery of `run`: a looker who
gives up waiting ends none.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
import trio

from cachefs.errors import StoreError
from cachefs.meta import Meta
from cachefs.vfs.rounds import Rounds

SHORTEST = 0.5
"""Seconds that a listing is good for at least, whatever is asked for."""
PATIENCE = 1.0
"""Seconds that a look waits for a new listing."""

_AT_ONCE = 4  # rounds under way
_IN_USE = 2.0  # times to live after the last look during which a directory is kept up to date
_REMEMBERED = 50_000  # directories

log = structlog.get_logger("cachefs.vfs")


@dataclass(slots=True, eq=False)
class _View:
    """A directory that was looked at. Times are the scheduler's."""

    listed: float
    """When the last complete listing began."""
    used: float
    not_before: float = 0.0
    """After a failure: when to try again."""
    running: trio.Event | None = None


class Refresher:
    """Decides when a directory is listed again."""

    def __init__(self, meta: Meta, rounds: Rounds, *, ttl: float) -> None:
        """`ttl` in seconds."""
        self._meta = meta
        self.rounds = rounds
        self._ttl = max(ttl, SHORTEST)
        self._views: dict[int, _View] = {}
        self._limit = trio.CapacityLimiter(_AT_ONCE)
        self._nursery: trio.Nursery | None = None
        self.on_changed: Callable[[int, Sequence[bytes]], Awaitable[None]] = _nothing
        """Awaited with a directory and those of its names that stand for something else now."""
        self.on_round: Callable[[str], None] = lambda outcome: None
        """Called with the outcome (ok, failed) of each round."""

    def is_old(self, ino: int) -> bool:
        """Note a look at a directory; whether it should wait (`renew`) for a new listing."""
        now = trio.current_time()
        view = self._views.get(ino)
        if view is None:
            view = self._learn(ino, now)
        view.used = now
        return now - view.listed > self._ttl and now >= view.not_before

    def _learn(self, ino: int, now: float) -> _View:
        if len(self._views) >= _REMEMBERED:
            self._forget_unused(now)
        row = self._meta.inodes.get(ino)
        age = (time.time_ns() - row.listed_ns) / 1e9 if row is not None and row.listed_ns else 0.0
        view = self._views[ino] = _View(now - (age if age >= 0 else self._ttl), now)
        return view

    async def renew(self, ino: int) -> None:
        """Return once the directory's view is a new one, or that takes too long."""
        view = self._views.get(ino)
        if view is None or self._nursery is None:
            return
        done = self._start(ino, view)
        with trio.move_on_after(PATIENCE) as scope:
            await done.wait()
        if scope.cancelled_caught:
            view.not_before = trio.current_time() + self._ttl / 2

    async def run(self) -> None:
        """Keep what is in use up to date, until cancelled. Only for a store that is the right one:
        another's emptiness would be believed."""
        try:
            async with trio.open_nursery() as self._nursery:
                while True:
                    await trio.sleep(self._ttl / 8)
                    self._start_due()
        finally:
            self._nursery = None

    def _start_due(self) -> None:
        now = trio.current_time()
        for ino, view in list(self._views.items()):
            if now - view.used > _IN_USE * self._ttl:
                continue
            if now - view.listed >= self._ttl / 2 and now >= view.not_before:
                self._start(ino, view)

    def _start(self, ino: int, view: _View) -> trio.Event:
        if view.running is None:
            view.running = trio.Event()
            assert self._nursery is not None
            self._nursery.start_soon(self._refresh, ino, view)
        return view.running

    async def _refresh(self, ino: int, view: _View) -> None:
        done = view.running
        assert done is not None
        try:
            async with self._limit:
                view.listed = await self._round(ino, view)
        finally:
            view.running = None
            done.set()

    async def _round(self, ino: int, view: _View) -> float:
        """When the listing that holds now began."""
        began, outcome = trio.current_time(), "failed"
        try:
            changed = await self.rounds.run(ino)
            outcome = "ok"
            for folder, names in changed.items():
                await self.on_changed(folder, names)
        except (StoreError, OSError) as error:
            log.info("a listing could not be refreshed", directory=ino, reason=str(error))
            view.not_before = trio.current_time() + self._ttl / 2
            return view.listed
        finally:
            self.on_round(outcome)
        # A large directory is not listed all the time.
        view.not_before = trio.current_time() + (trio.current_time() - began)
        return began

    def _forget_unused(self, now: float) -> None:
        self._views = {
            ino: view
            for ino, view in self._views.items()
            if view.running is not None or now - view.used <= _IN_USE * self._ttl
        }


async def _nothing(directory: int, names: Sequence[bytes]) -> None:
    """Nobody else remembers names."""
