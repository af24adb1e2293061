"""What is read and not kept: shared, bounded, of one version."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from cachefs.cache import unkept
from cachefs.cache.filler import Fill
from cachefs.cache.unkept import AT_ONCE, KEPT, LONGEST, SHORTEST, Unkept
from cachefs.errors import NotFound, PreconditionFailed, StoreError
from cachefs.model.extents import ExtentSet

BODY = random.Random(7).randbytes(3 * LONGEST + 1234)
KIB128 = 128 << 10


@dataclass
class Source:
    """A store of one object, which takes its time."""

    asked: list[tuple[int, int]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    error: Exception | None = None
    body: bytes = BODY

    async def fetch(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        self.asked.append((start, end))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await trio.sleep(0.01)
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        assert (key, etag) == ("key", "etag")
        return self.body[start:end]


@pytest.fixture
def source() -> Source:
    return Source()


def make_fill(number: int = 0, size: int = len(BODY)) -> Fill:
    return Fill(f"/cache/{number}", "key", "etag", size, ExtentSet())


async def read_all(unkept: Unkept, fill: Fill) -> bytes:
    """As the kernel does."""
    pieces = []
    for start in range(0, fill.size, KIB128):
        end = min(start + KIB128, fill.size)
        here = unkept.at_hand(fill, start, end)
        pieces.append(here if here is not None else await unkept.read(fill, start, end))
    return b"".join(pieces)


def test_readers_share_blocks(source: Source) -> None:
    reader, fill = Unkept(source.fetch), make_fill()
    found = []

    async def one() -> None:
        found.append(await read_all(reader, fill))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(one)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert found == [BODY] * 5
    assert source.asked == [(n, min(n + LONGEST, len(BODY))) for n in range(0, len(BODY), LONGEST)]
    reader.forget(fill.path)
    assert reader.held == 0


def test_any_range_is_what_the_object_has(source: Source) -> None:
    reader, fill, rng = Unkept(source.fetch), make_fill(), random.Random(3)

    async def main() -> None:
        for _ in range(200):
            start = rng.randrange(len(BODY))
            end = min(len(BODY), start + rng.randrange(1, 2 * LONGEST))
            assert await reader.read(fill, start, end) == BODY[start:end]
            reader._length = rng.choice([SHORTEST, 1 << 20, LONGEST])

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_memory_is_bounded_and_many_readers_do_not_fetch_the_same_again_and_again(
    source: Source,
) -> None:
    """Blocks get shorter until those of all fit."""
    reader, fills = Unkept(source.fetch), [make_fill(n) for n in range(40)]
    held = 0

    async def one(fill: Fill) -> None:
        nonlocal held
        assert await read_all(reader, fill) == BODY
        held = max(held, reader.held)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for fill in fills:
                nursery.start_soon(one, fill)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    fetched = sum(end - start for start, end in source.asked)
    print(f"{fetched / len(BODY) / len(fills):.2f} times, {held >> 20} MiB held")
    assert fetched <= 3 * len(fills) * len(BODY)
    assert held <= KEPT
    assert source.most <= AT_ONCE


def test_blocks_get_longer_again(source: Source) -> None:
    reader, fill = Unkept(source.fetch), make_fill(size=2 * KEPT)
    source.body = os.urandom(1 << 20) * (fill.size >> 20)
    reader._length = SHORTEST

    async def main() -> None:
        for start in range(0, fill.size, KIB128):
            await reader.read(fill, start, start + KIB128)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert reader._length == LONGEST


@pytest.mark.parametrize(
    ("error", "stays"), [(PreconditionFailed("x"), True), (NotFound("x"), False)]
)
def test_another_version_is_never_read(source: Source, error: StoreError, stays: bool) -> None:
    reader, fill = Unkept(source.fetch), make_fill()
    source.error = error

    async def main() -> None:
        with pytest.raises(OSError) as caught:
            await reader.read(fill, 0, 10)
        assert caught.value.errno == errno.ESTALE

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert fill.stale is stays


def test_after_an_error_the_next_one_asks_again(source: Source) -> None:
    """Also who waited for the same block, or came after one that gave up."""
    reader, fill = Unkept(source.fetch), make_fill()
    source.error = StoreError("no")
    failed = 0

    async def one() -> None:
        nonlocal failed
        try:
            await reader.read(fill, 0, 10)
        except StoreError:
            failed += 1
            source.error = None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        assert failed == 1
        assert await reader.read(fill, 0, 10) == BODY[:10]
        with trio.move_on_after(0.001):
            await reader.read(fill, LONGEST, LONGEST + 10)
        assert await reader.read(fill, LONGEST, LONGEST + 10) == BODY[LONGEST : LONGEST + 10]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert reader.held == 2 * unkept.LONGEST
