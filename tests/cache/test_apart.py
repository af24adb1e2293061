"""Calls that may wait for a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from cachefs.cache.apart import Apart


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart("disk", direct=False)
    yield made
    made.stop()


def test_a_call_that_hangs_holds_up_nobody(apart: Apart) -> None:
    """Neither other tasks nor what is to be made later."""
    go, seen = threading.Event(), list[str]()

    async def wait() -> None:
        await apart.run(go.wait)
        seen.append("waited")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            apart.later(go.wait)
            apart.later(lambda: seen.append("later"))
            await trio.testing.wait_all_tasks_blocked()
            assert seen == []
            go.set()
        with trio.fail_after(10):
            while len(seen) < 2:  # noqa: ASYNC110
                await trio.sleep(0.001)

    trio.run(main)
    assert sorted(seen) == ["later", "waited"]


def test_what_is_made_later_is_made_in_order_whatever_fails(apart: Apart) -> None:
    done, seen = threading.Event(), list[int]()

    def fail() -> None:
        raise OSError(5, "broken")

    for number in range(100):
        apart.later(lambda number=number: seen.append(number))  # type: ignore[misc]
        apart.later(fail)
    apart.later(done.set)
    assert done.wait(10)
    assert seen == list(range(100))


def test_in_memory_all_is_made_at_once() -> None:
    apart, here = Apart("memory", direct=True), threading.get_ident()
    seen: list[int] = []
    apart.later(lambda: seen.append(threading.get_ident()))
    assert seen == [here]

    async def main() -> None:
        assert await apart.run(threading.get_ident) == here

    trio.run(main)


def test_what_hangs_on_one_device_is_not_missed_by_another(apart: Apart) -> None:
    go, other = threading.Event(), Apart("another", direct=False)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(apart.run, go.wait)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(10):
                assert await other.run(lambda: 7) == 7
                assert await trio.to_thread.run_sync(lambda: 8) == 8
            go.set()

    trio.run(main)
