"""Turns: paced by what the store answers, group by group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from trio.testing import MockClock

from cachefs.errors import NotFound, StoreError, Throttled, Transient
from cachefs.flush.pacing import Pacing
from cachefs.model.pacer import PacerRules

RULES = PacerRules(initial_rate=100.0, min_rate=1.0, max_rate=3500.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


async def request(
    pacing: Pacing, key: str, error: StoreError | None = None, takes: float = 0.01, sends: int = 0
) -> None:
    async with pacing.turn(key, sends):
        await trio.sleep(takes)
        pacing.told(key, error)


async def many(pacing: Pacing, count: int, key: str, error: StoreError | None = None) -> float:
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(request, pacing, key, error)
    return trio.current_time() - began


def test_no_more_at_a_time_than_allowed() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=3)
        busy = most = 0

        async def one() -> None:
            nonlocal busy, most
            async with pacing.turn("a/k", 0):
                busy += 1
                most = max(most, busy)
                await trio.sleep(0.05)
                busy -= 1

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(one)
        assert most == 3

    run(test)


def test_refusals_slow_down_and_successes_speed_up() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=64)
        await many(pacing, 20, "a/k", Throttled("slow down"))
        slowed = pacing.rate
        assert slowed < 100
        await many(pacing, 600, "a/k")
        assert pacing.rate > slowed

    run(test)


def test_a_store_that_answers_is_used_ever_faster() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=64)
        first = await many(pacing, 200, "a/k")
        assert await many(pacing, 200, "a/k") < first

    run(test)


def test_groups_do_not_slow_each_other() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=64)
        await many(pacing, 30, "p/run/one/k", Throttled("slow down"))
        slow = pacing.rate
        await request(pacing, "p/run/two/k")
        assert pacing.rate >= slow + 100

    run(test)


def test_retry_after_is_honoured() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=8)
        await request(pacing, "a/k", Throttled("later", retry_after=7.0))
        began = trio.current_time()
        await request(pacing, "a/k")
        assert trio.current_time() - began >= 7.0

    run(test)


def test_answers_that_are_no_verdict_on_the_pace_do_not_slow_down() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=8)
        await many(pacing, 20, "a/k", NotFound("no such key"))
        assert pacing.rate >= 100

    run(test)


def test_an_overloaded_store_gets_fewer_at_a_time() -> None:
    async def test() -> None:
        calm, hurt = Pacing(RULES, concurrency=64), Pacing(RULES, concurrency=64)
        await many(calm, 40, "a/k")
        await many(hurt, 40, "a/k", Transient("500"))
        assert await many(hurt, 100, "a/k") > await many(calm, 100, "a/k")

    run(test)


def test_a_cancelled_turn_gives_its_place_back() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=1)
        with trio.move_on_after(0.01):
            await request(pacing, "a/k", takes=60)
        with trio.fail_after(5):
            await request(pacing, "a/k")

    run(test)


def test_bandwidth_is_capped() -> None:
    async def test() -> None:
        pacing = Pacing(RULES, concurrency=64)
        pacing.restrain(64, 1000.0)
        began = trio.current_time()
        for _ in range(10):
            await request(pacing, "a/k", sends=1000)
        assert 8.0 <= trio.current_time() - began <= 11.0

    run(test)
