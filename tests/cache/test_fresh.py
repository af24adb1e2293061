"""Cache files that are made before they are asked for."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path

import pytest
import trio

from cachefs.cache.apart import Apart
from cachefs.cache.device import CacheDevice
from cachefs.cache.fresh import FreshFiles, write_time


class Slow(CacheDevice):
    """A disk whose files can be made to wait, wherever the test has its directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(0, path)
        self.apart = Apart("slow", direct=False)
        self.made = 0
        self.trouble: OSError | None = None

    def create(self, gen: int) -> int:
        if self.trouble is not None:
            raise self.trouble
        self.made += 1
        return super().create(gen)


@pytest.fixture
def disk(tmp_path: Path) -> Slow:
    return Slow(tmp_path / "cache")


@asynccontextmanager
async def kept(*, reading: bool = False) -> AsyncIterator[FreshFiles]:
    files = FreshFiles(itertools.count(1).__next__, lambda: reading)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.run)
        yield files
        nursery.cancel_scope.cancel()


def in_trio(test: Callable[[Slow], Awaitable[None]]) -> Callable[[Slow], None]:
    @wraps(test)
    def run(disk: Slow) -> None:
        trio.run(test, disk)

    return run


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)


def files_of(device: CacheDevice) -> int:
    return len(list(device.list_generations()))


@in_trio
async def test_who_makes_many_waits_for_few(disk: Slow) -> None:
    async with kept() as fresh:
        waited = 0
        for _ in range(100):
            taken = fresh.take_nowait(disk)
            if taken is None:
                waited += 1
                taken = await fresh.take(disk)
            os.close(taken.fd)
            await until(lambda: 2 * len(fresh._ready.get(disk, ())) >= fresh._wanted[disk])
        assert waited < 10


@in_trio
async def test_what_nobody_takes_is_removed(disk: Slow) -> None:
    async with kept() as fresh:
        taken = await fresh.take(disk)
        await until(lambda: disk.made > 1)
        await until(lambda: files_of(disk) == 1)
        os.close((await fresh.take(disk)).fd)
        os.close(taken.fd)


@in_trio
async def test_one_that_was_removed_is_not_given_out(disk: Slow) -> None:
    async with kept() as fresh:
        assert fresh.take_nowait(disk) is None
        await until(lambda: fresh._ready.get(disk))
        for gen in disk.list_generations():
            os.unlink(disk.path(gen))
        taken = await fresh.take(disk)
        assert disk.exists(taken.file)
        os.close(taken.fd)


@in_trio
async def test_a_disk_that_refuses_tells_who_asks(disk: Slow) -> None:
    async with kept() as fresh:
        disk.trouble = OSError(28, "full")
        for _ in range(3):
            with pytest.raises(OSError, match="full"):
                await fresh.take(disk)
        disk.trouble = None
        os.close((await fresh.take(disk)).fd)


@in_trio
async def test_nothing_is_left_at_the_end(disk: Slow) -> None:
    async with kept() as fresh:
        assert fresh.take_nowait(disk) is None
        await until(lambda: fresh._ready.get(disk))
        await fresh.stop()
        await until(lambda: files_of(disk) == 0)


@in_trio
async def test_descriptors_for_reading_become_those_for_writing(disk: Slow) -> None:
    async with kept(reading=True) as fresh:
        taken = await fresh.take(disk)
        assert not disk.writer_open(taken.file)
        with pytest.raises(OSError, match="Bad file"):
            os.pwrite(taken.fd, b"x", 0)
        taken.make_writable()
        os.pwrite(taken.fd, b"x", 0)
        os.close(taken.fd)


def test_in_memory_none_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        device = CacheDevice(0, tmp_path / "cache")
        device.apart = Apart("memory", direct=True)
        async with kept() as fresh:
            os.close((await fresh.take(device)).fd)
            assert files_of(device) == 1
        device.close()

    trio.run(main)


def test_the_time_of_what_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    made = path.stat().st_mtime_ns
    assert write_time(path.stat(), made + 5) == made + 5
    assert write_time(path.stat(), made - 5) == made
    path.write_bytes(b"x")
    assert write_time(path.stat(), 1 << 62) == path.stat().st_mtime_ns
