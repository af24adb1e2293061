"""A store with daemons over it, one after the other, and faults at chosen requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.flush.memory import Fault, MemoryJobs, MemoryStore
from tests.flush.world import World, now_ns

LIVED: Counter[str] = Counter()
"""What the random lives of this run were, in all."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LIVED:
        counts = ", ".join(f"{count:,} {name}" for name, count in LIVED.items())
        terminalreporter.write_line(f"random lives of a tree: {counts}")


LARGE = bytes(random.Random(1).choices(b"abcdefgh", k=200))
"""Content that takes several parts."""


class _LateJobs(MemoryJobs):
    """Holds back answers."""

    def __init__(self, place: Place, latency: float) -> None:
        super().__init__(place.store, random.Random(2), latency=latency, faults=place.choose)
        self._place = place

    async def call(self, method: str, /, **arguments: Any) -> Any:
        if method in self._place.early:
            self._place.held.append(method)
            await self._place.early[method].wait()
        result = await super().call(method, **arguments)
        if method in self._place.late:
            await self._place.late[method].wait()
        return result


class Place:
    """A store, and daemons over it one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = MemoryStore(now_ns)
        self.requests: list[tuple[str, str]] = []
        self.faults: list[tuple[str, Fault]] = []
        """(method, what goes wrong with its next request)."""
        self.late: dict[str, trio.Event] = {}
        """Methods whose requests take effect, but are answered only once the event is set."""
        self.early: dict[str, trio.Event] = {}
        """Methods whose requests are on their way until the event is set."""
        self.held: list[str] = []
        """Methods of the requests that were held back so."""

    def choose(self, method: str, arguments: dict[str, Any]) -> Fault | None:
        self.requests.append((method, str(arguments.get("key") or arguments.get("dst") or "")))
        for index, (name, fault) in enumerate(self.faults):
            if name == method:
                del self.faults[index]
                return fault
        return None

    @asynccontextmanager
    async def mounted(self, latency: float = 0.05, boot: str = "boot 1") -> AsyncIterator[World]:
        jobs = _LateJobs(self, latency)
        async with World.running(self.directory, self.store, jobs, boot) as world:
            try:
                yield world
            finally:  # No request that shows something is ever abandoned: it would wait for ever.
                for event in (*self.early.values(), *self.late.values()):
                    event.set()

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.requests)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
