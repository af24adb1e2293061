"""The clock of the machine is set while files wait: nothing waits for ever, nothing is lost."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import trio

from tests.flush.conftest import LARGE, Place
from tests.flush.world import World, now_ns, run

DAY = 24 * 3600 * 10**9


@pytest.mark.parametrize("jump", [-400 * DAY, -DAY, DAY, 400 * DAY])
def test_the_clock_jumps_while_files_wait(place: Place, jump: int) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await world.write("before.bin", LARGE)
            await world.write("latest", b"before.bin")
            with _jumped(world, jump):
                await world.write("after", b"x")
                with trio.fail_after(60):
                    await world.settle()
        assert set(world.shown) == {"before.bin", "latest", "after"}

    run(main)


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_the_clock_jumps_while_nobody_serves(place: Place, jump: int) -> None:
    async def main() -> None:
        async with place.mounted(latency=3600) as world:
            await world.write("f", b"content")
        async with place.mounted() as world:
            with _jumped(world, jump), trio.fail_after(60):
                await world.settle()
        assert world.shown == {"f": b"content"}

    run(main)


def _jumped(world: World, jump: int) -> Any:
    def later() -> int:
        return now_ns() + jump

    world.queue._clock = later
    return patch("time.time_ns", later)
