"""Random lives of a tree, with a flusher at work, faults in the store and sudden deaths.

A watcher sees every state of the store. Whatever happens, no reader is ever misled, and once the
store behaves the bucket shows the tree exactly: nothing is lost, nothing counts as durable that is
not there, and neither uploads nor cache files are left over.

60 lives by default, 2,000 with `-m soak`, which take about twenty minutes of one processor:

    python -m pytest -m soak tests/flush/test_random_lives.py

At its end pytest tells how many lives, deaths, requests and faults that were, and how many states
of the store the watcher looked at. `CACHEFS_TEST_SCHEDULES` is how many lives are lived,
`CACHEFS_TEST_SEED` one seed to live again; with `CACHEFS_TEST_NOTE` each act is printed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from tests.flush.actor import Actor
from tests.flush.conftest import LIVED
from tests.flush.memory import Killed, MemoryJobs, MemoryStore, RandomFaults
from tests.flush.world import START_NS, World, run, seeded

pytestmark = pytest.mark.slow

NOTE = bool(os.environ.get("CACHEFS_TEST_NOTE"))
SCHEDULES = os.environ.get("CACHEFS_TEST_SCHEDULES")
SEED = os.environ.get("CACHEFS_TEST_SEED")
_BATCH = 10
"""Lives in one test."""


class Hardship(NamedTuple):
    """What a life has to bear."""

    acts: int
    faults: float
    """Share of requests that fail."""
    deaths: int


KINDS = {
    "quiet": Hardship(40, 0.0, 0),
    "a bad store": Hardship(40, 0.25, 0),
    "sudden deaths": Hardship(25, 0.0, 3),
    "both": Hardship(25, 0.2, 3),
}


class Life:
    """One seed."""

    def __init__(self, seed: int, directory: Path, hardship: Hardship) -> None:
        self.chance = seeded(seed)
        self.directory = directory
        self.store = MemoryStore(lambda: START_NS + int(trio.current_time() * 1e9))
        self.faults = RandomFaults(random.Random(seed + 1), hardship.faults)
        self.actor = Actor(self.chance, self.store, note=NOTE)
        self.hardship = hardship
        self.jobs: list[MemoryJobs] = []
        """Of each daemon."""

    def count(self) -> Counter[str]:
        """What it was."""
        return Counter(
            {
                "lives": 1,
                "deaths": len(self.jobs) - 1,
                "requests": sum(len(jobs.log) for jobs in self.jobs),
                "faults": sum(jobs.failed for jobs in self.jobs),
                "states of the store": self.actor.watcher.looks,
            }
        )

    async def live(self) -> None:
        for _ in range(self.hardship.deaths):
            await self._until_death()
        async with self._running() as world:
            await self.actor.wake(world)
            await self._busy(self.hardship.acts)
            await self.actor.finish()
            self.faults.calm = True
            with trio.fail_after(100_000):
                while world.queue.effects:  # noqa: ASYNC110 - temporary names expire silently
                    await trio.sleep(10)
            await trio.sleep(300)
            self.actor.check()

    def _running(self) -> AbstractAsyncContextManager[World]:
        jobs = MemoryJobs(
            self.store,
            self.chance,
            latency=self.chance.choice([0.001, 0.05, 2.0]),
            faults=self.faults,
        )
        self.jobs.append(jobs)
        return World.running(self.directory, self.store, jobs)

    async def _until_death(self) -> None:
        try:
            async with self._running() as world:
                await self.actor.wake(world)
                await self._busy(self.chance.randint(1, self.hardship.acts))
                world.kill()
        except BaseExceptionGroup as group:
            _, rest = group.split((Killed, trio.Cancelled))
            if rest is not None:
                raise rest from None
        except Killed:
            pass

    async def _busy(self, acts: int) -> None:
        for _ in range(acts):
            await self.actor.act()
            if self.chance.random() < 0.5:
                await trio.sleep(self.chance.choice([0.001, 0.02, 0.3, 1.5, 4.0]))


def live(seed: int, directory: Path, kind: str) -> None:
    """One life; what fails names its seed."""
    home = directory / f"{kind} {seed}"
    home.mkdir()
    life = Life(seed, home, KINDS[kind])
    try:
        run(life.live)
    except BaseException as error:
        error.add_note(f"{kind}, CACHEFS_TEST_SEED={seed}: {life.actor.watcher.violations}")
        raise
    LIVED.update(life.count())


def schedules(count: int) -> list[tuple[str, range]]:
    """(kind of life, seeds) of each test, `count` lives or as many as are asked for in all."""
    if SEED is not None:
        return [(kind, range(int(SEED), int(SEED) + 1)) for kind in KINDS]
    each = -(-int(SCHEDULES or count) // len(KINDS))
    return [(kind, seeds) for kind in KINDS for seeds in _batches(each)]


def _batches(count: int) -> Iterator[range]:
    for first in range(0, count, _BATCH):
        yield range(first, min(first + _BATCH, count))


@pytest.mark.parametrize(("kind", "seeds"), schedules(60))
def test_lives(kind: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        live(seed, tmp_path, kind)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "seeds"), schedules(2000))
def test_many_lives(kind: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        live(seed, tmp_path, kind)
