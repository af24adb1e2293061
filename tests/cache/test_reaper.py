"""Eviction: when it begins, in which order, where it ends, and what it leaves alone."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.reaper import Reaper
from cachefs.errors import CacheError


@dataclass
class Source:
    """Files by generation: (bytes, last use); `kept` may not go after all, `broken` fail."""

    ledger: SpaceLedger
    files: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    evicted: list[int] = field(default_factory=list)
    asked: int = 0

    def add(self, gen: int, nbytes: int, last_use: int) -> None:
        self.files[gen] = (nbytes, last_use)
        self.ledger.charge(nbytes)

    def candidates(self, device: int) -> Iterable[tuple[int, int]]:
        assert device == self.ledger.device.index
        self.asked += 1
        return ((gen, last_use) for gen, (_, last_use) in list(self.files.items()))

    async def trim(self, device: int, goal: int) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    async def evict(self, gen: int, goal: int | None = None) -> int:
        await trio.lowlevel.checkpoint()
        if gen in self.broken:
            raise OSError(errno.EIO, "broken")
        if gen in self.kept:
            return 0
        nbytes, _ = self.files.pop(gen)
        self.ledger.credit(nbytes)
        self.evicted.append(gen)
        return nbytes


@pytest.fixture
def ledger(device: CacheDevice) -> SpaceLedger:
    return SpaceLedger(device, 100)


@pytest.fixture
def source(ledger: SpaceLedger) -> Source:
    return Source(ledger)


@asynccontextmanager
async def running(reaper: Reaper) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reaper.run)
        yield
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(5):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def one_pass(source: Source) -> int:
    reaper = Reaper([source.ledger], source)
    return trio.run(reaper.make_room, source.ledger)


def test_below_the_high_watermark_nothing_goes(source: Source) -> None:
    for gen in range(9):
        source.add(gen, 10, gen)
    assert one_pass(source) == 0
    assert source.asked == 0


def test_oldest_uses_go_first_down_to_the_low_watermark(source: Source) -> None:
    for gen, last_use in enumerate([50, 10, 40, 20, 30, 60, 70, 80, 90, 95]):
        source.add(gen, 10, last_use)
    assert one_pass(source) == 20
    assert source.evicted == [1, 3]
    assert source.ledger.used == 80
    assert not source.ledger.exhausted


def test_what_may_not_go_after_all_is_passed_over(source: Source) -> None:
    for gen in range(10):
        source.add(gen, 10, gen)
    source.kept = {0, 2}
    source.broken = {1}
    with capture_logs() as logs:
        assert one_pass(source) == 20
    assert source.evicted == [3, 4]
    assert [each["gen"] for each in logs] == [1]


def test_promises_count_as_use(source: Source) -> None:
    for gen in range(8):
        source.add(gen, 10, gen)
    assert source.ledger.try_admit(15)
    assert one_pass(source) == 20


def test_nothing_left_means_exhausted(source: Source) -> None:
    source.ledger.charge(92)
    source.add(1, 3, 1)
    assert one_pass(source) == 3
    assert source.ledger.exhausted
    assert not source.ledger.may_open()
    source.ledger.credit(10)
    one_pass(source)
    assert source.ledger.may_open()


def test_a_running_reaper_answers_pressure_at_once(source: Source) -> None:
    async def main() -> None:
        async with running(Reaper([source.ledger], source, interval=1000)):
            await trio.sleep(0.2)
            for gen in range(10):
                source.add(gen, 10, gen)
            await until(lambda: source.evicted == [0, 1])
            await trio.sleep(0.2)
            assert source.evicted == [0, 1]

    trio.run(main)


def test_a_writer_waits_for_what_becomes_durable(source: Source) -> None:
    async def main() -> None:
        ledger = source.ledger
        reaper = Reaper([ledger], source, interval=1000)
        async with running(reaper):
            ledger.charge(100)
            await until(lambda: ledger.exhausted)
            admitted = trio.Event()

            async def writer() -> None:
                await ledger.wait_for_room(10)
                admitted.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer)
                await trio.sleep(0.1)
                assert not admitted.is_set()
                source.files[7] = (30, 1)  # it was dirty until now
                reaper.nudge()
            assert source.evicted == [7]

    trio.run(main)


def test_who_may_not_wait_for_the_store_gets_what_can_be_evicted(source: Source) -> None:
    async def main() -> None:
        ledger = source.ledger
        ledger.charge(70)
        source.add(7, 30, 1)
        async with running(Reaper([ledger], source, interval=1000)):
            assert await ledger.admit_after_eviction(25)
            assert source.evicted == [7]
            ledger.settle(25, 25)
            assert not await ledger.admit_after_eviction(25)

    trio.run(main)


def test_a_full_cache_does_not_keep_the_reaper_busy(source: Source) -> None:
    async def main() -> None:
        async with running(Reaper([source.ledger], source, interval=1000)):
            source.ledger.charge(95)
            await until(lambda: source.ledger.exhausted)
            asked = source.asked
            for _ in range(20):
                source.ledger.charge(0)
                await trio.sleep(0.01)
            assert source.asked == asked

    trio.run(main)


def test_callbacks_hear_of_evictions_and_overruns(source: Source, device: CacheDevice) -> None:
    evicted: list[tuple[int, int]] = []
    overruns: list[tuple[int, int]] = []
    reaper = Reaper(
        [source.ledger],
        source,
        on_evicted=lambda index, nbytes: evicted.append((index, nbytes)),
        on_overrun=lambda index, gen: overruns.append((index, gen)),
    )
    fd = device.create(42)
    source.ledger.reserve(42, 10)
    os.pwrite(fd, b"x" * 5000, 0)
    os.close(fd)
    source.add(1, 50, 1)
    with capture_logs() as logs:
        trio.run(reaper.make_room, source.ledger)
    assert evicted == [(0, 50)]
    assert overruns == [(0, 42)]
    assert len(logs) == 1


def test_errors_do_not_end_it(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        good = source.candidates

        def bad(device: int) -> Iterable[tuple[int, int]]:
            raise CacheError("database is busy")

        monkeypatch.setattr(source, "candidates", bad)
        with capture_logs() as logs:
            async with running(Reaper([source.ledger], source, interval=0.01)):
                for gen in range(10):
                    source.add(gen, 10, gen)
                await trio.sleep(0.5)
                monkeypatch.setattr(source, "candidates", good)
                await until(lambda: source.evicted == [0, 1])
        assert len(logs) == 1, "told once, not at every try"

    trio.run(main)


def test_scans_correct_the_ledger(source: Source, device: CacheDevice) -> None:
    async def main() -> None:
        async with running(Reaper([source.ledger], source, interval=0.01, rescan_interval=0.1)):
            source.ledger.charge(50)
            await until(lambda: source.ledger.used == 0)

    trio.run(main)


def test_the_metadata_reserve_comes_back(device: CacheDevice) -> None:
    async def main() -> None:
        ledger = SpaceLedger(device, 1 << 20, meta_reserve=65536)
        assert ledger.restore_reserve()
        ledger.release_reserve()
        async with running(Reaper([ledger], Source(ledger), interval=0.01)):
            await until(lambda: ledger.reserve_held)

    trio.run(main)


def test_each_device_is_tended_for_itself(source: Source, device: CacheDevice) -> None:
    async def main() -> None:
        stuck = SpaceLedger(device, 100)
        asked = trio.Event()

        async def hang() -> NoReturn:
            asked.set()
            await trio.sleep_forever()

        stuck.poll = hang  # type: ignore[method-assign]
        async with running(Reaper([stuck, source.ledger], source, interval=0.01)):
            await asked.wait()
            for gen in range(10):
                source.add(gen, 10, gen)
            await until(lambda: source.evicted == [0, 1])

    trio.run(main)
