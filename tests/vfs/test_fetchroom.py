"""What is fetched has room before it is asked for, and is counted once."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache.device import CacheDevice
from cachefs.cache.filler import Fill, NoRoom
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.placement import Placement
from cachefs.meta.rows import GenerationRow
from cachefs.model.extents import ExtentSet
from cachefs.model.states import GenState
from cachefs.vfs.fetchroom import FetchRoom
from cachefs.vfs.opened import Lane, OpenInode

KIB = 1 << 10
LIMIT = 1024 * KIB


class Scene:
    """A cache of a MiB, and one file of it."""

    def __init__(self, below: Path) -> None:
        self.device = CacheDevice(0, below / "cache")
        self.ledger = SpaceLedger(self.device, LIMIT)
        self.room = FetchRoom(Placement([self.ledger]))
        os.close(self.device.create(7))
        self.opened, self.fill = self.open()

    def open(self) -> tuple[OpenInode, Fill]:
        """As the next handle finds it."""
        path = self.device.path(7)
        now = time.time_ns()
        gen = GenerationRow(
            gen=1, ino=1, device=0, file=7, state=GenState.DURABLE, lane=Lane.TRACKED, size=LIMIT,
            dirty=None, base=None, present=None, crc64=None, created_ns=now, sealed_ns=None,
            used_ns=now,
        )  # fmt: skip
        fill = Fill(path, "key", "etag", LIMIT, ExtentSet())
        opened = OpenInode(1, gen, self.device, -1, Lane.TRACKED, LIMIT, now, fill=fill)
        fill.owner = opened
        return opened, fill

    def arrives(self, at: int, nbytes: int) -> None:
        """Bytes of the object, from another process."""
        with open(self.device.path(7), "r+b") as file:
            file.seek(at)
            file.write(b"x" * nbytes)

    @property
    def state(self) -> tuple[int, int]:
        """KiB that are (used, promised)."""
        return self.ledger.used // KIB, self.ledger.promised // KIB


@pytest.fixture
def scene(ram_dir: Path) -> Iterator[Scene]:
    """A scene in RAM."""
    made = Scene(ram_dir)
    yield made
    made.device.close()


def test_what_has_arrived_is_not_promised_any_more(scene: Scene) -> None:
    scene.room.promise(scene.fill, 256 * KIB)
    scene.room.promise(scene.fill, 256 * KIB)
    assert scene.state == (0, 512)
    scene.arrives(0, 300 * KIB)
    scene.room.count(scene.fill.path)
    assert scene.state == (300, 212)
    scene.room.settle(scene.fill, 256 * KIB)
    assert scene.state == (300, 212)
    scene.room.settle(scene.fill, 256 * KIB)
    assert scene.state == (300, 0), "the second came to nothing"
    assert scene.room.left(scene.fill) == LIMIT - 300 * KIB


def test_a_fetch_that_outlives_its_file_is_counted_by_the_next_handle(scene: Scene) -> None:
    scene.room.promise(scene.fill, 256 * KIB)
    scene.arrives(0, 128 * KIB)
    opened, fill = scene.open()
    opened.accounted = scene.device.allocated(7)
    scene.room.take_up(opened, fill.path)
    scene.room.promise(fill, 256 * KIB)
    scene.arrives(0, 512 * KIB)
    scene.room.settle(scene.fill, 256 * KIB)
    assert scene.state == (512, 0)
    scene.room.settle(fill, 256 * KIB)
    assert scene.state == (512, 0)
    assert opened.accounted == 512 * KIB


def test_a_fetch_to_a_file_that_is_gone_takes_nothing(scene: Scene) -> None:
    scene.room.promise(scene.fill, 256 * KIB)
    scene.device.remove(7)
    scene.room.settle(scene.fill, 256 * KIB)
    assert scene.state == (0, 0)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_reader_waits_for_room_but_not_for_ever(scene: Scene, is_made: bool) -> None:
    """And nothing is fetched ahead meanwhile. Without room nothing is promised."""
    scene.ledger.charge(LIMIT)
    refused: list[NoRoom] = []

    async def wait() -> None:
        try:
            await scene.room.wait(scene.fill, 256 * KIB)
        except NoRoom as error:
            refused.append(error)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert scene.ledger.excess() > 256 * KIB, "room is made"
            scene.ledger.credit(255 * KIB)
            await trio.testing.wait_all_tasks_blocked()
            assert scene.ledger.promised == 0
            assert scene.room.left(scene.fill) == 0
            if is_made:
                scene.ledger.credit(KIB)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert scene.ledger.promised == is_made * 256 * KIB
    assert [error.errno for error in refused] == ([] if is_made else [errno.ENOSPC])


def test_after_a_wait_in_vain_the_next_are_short_and_few(scene: Scene) -> None:
    """Each at most a second, and a second apart; what there is by then is taken at once."""
    scene.ledger.charge(LIMIT)

    async def waited() -> float:
        began = trio.current_time()
        with pytest.raises(NoRoom):
            await scene.room.wait(scene.fill, 256 * KIB)
        return trio.current_time() - began

    async def main() -> None:
        assert await waited() >= 5
        assert await waited() == 0
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waited)
            await trio.testing.wait_all_tasks_blocked()
            assert scene.ledger.wanted == 256 * KIB
            scene.ledger.credit(KIB)
            assert scene.ledger.try_admit(KIB), "a writer's few bytes are not held up"
            scene.ledger.settle(KIB, KIB)
        await trio.sleep(1)
        assert 0 < await waited() <= 1
        assert await waited() == 0
        scene.ledger.credit(256 * KIB)
        await scene.room.wait(scene.fill, 256 * KIB)
        scene.room.settle(scene.fill, 256 * KIB)
        scene.ledger.charge(256 * KIB)
        await trio.sleep(61)
        assert await waited() >= 5

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_short_wait_gives_the_reaper_one_pass(scene: Scene) -> None:
    """Which makes room, or not."""
    scene.ledger.charge(LIMIT)

    async def pass_over(room: int) -> None:
        await scene.ledger.pressure.wait()
        scene.ledger.pressure = trio.Event()
        looked, scene.ledger.looked = scene.ledger.looked, trio.Event()
        assert scene.ledger.wanted
        scene.ledger.credit(room)
        looked.set()

    async def main() -> None:
        with pytest.raises(NoRoom):
            await scene.room.wait(scene.fill, 256 * KIB)
        for room in (0, 256 * KIB):
            await trio.sleep(1)
            scene.ledger.pressure = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_over, room)
                began = trio.current_time()
                with contextlib.suppress(NoRoom):
                    await scene.room.wait(scene.fill, 256 * KIB)
                assert trio.current_time() == began
            assert scene.ledger.promised == room

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
