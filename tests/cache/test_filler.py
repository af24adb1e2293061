"""Reading objects into cache files: ranges, sharing, readahead, local changes."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache import filler as real
from cachefs.cache.filler import Fill, Filler, open_filler
from cachefs.model.extents import ExtentSet
from tests.cache.objects import CHUNK, WINDOW, Store, content, run, starts

# ---- ranges


def test_a_whole_object_is_fetched_once_in_bounded_parallel(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        await filler.fetch_all(fill)
        assert content(fill) == store.content
        assert fill.complete
        assert starts(store) == list(range(21))
        assert store.most == WINDOW
        assert (filler.active, fill.in_flight) == (0, 0)
        await filler.fetch_all(fill)
        assert len(store.fetched) == 21

    run(store, body)


def test_a_range_needs_only_its_chunks(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        await filler.ensure(fill, 5 * CHUNK + 999, 6 * CHUNK + 1)
        assert starts(store) == [5, 6]
        assert content(fill)[5 * CHUNK : 7 * CHUNK] == store.content[5 * CHUNK : 7 * CHUNK]
        assert not fill.complete

    run(store, body)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (5, 5), (20_123, 30_000), (50_000, 60_000)])
def test_nothing_to_read_needs_nothing(store: Store, fill: Fill, start: int, end: int) -> None:
    async def body(filler: Filler) -> None:
        await filler.ensure(fill, start, end)
        assert not store.fetched

    run(store, body)


def test_the_end_of_the_object_is_the_end(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        await filler.ensure(fill, 20 * CHUNK + 100, 99 * CHUNK)
        assert store.fetched == [(20 * CHUNK, 20 * CHUNK + 123)]

    run(store, body)


def test_an_empty_object_is_complete(store: Store, place: Path) -> None:
    fill = Fill(str(place / "none"), "key", "v1", 0, ExtentSet())
    assert fill.complete

    async def body(filler: Filler) -> None:
        await filler.fetch_all(fill)
        await filler.ensure(fill, 0, 10)

    run(store, body)


def test_what_is_present_is_not_fetched_again(store: Store, fill: Fill) -> None:
    fill.present.add(200, 400)
    fill.present.add(1 * CHUNK, 3 * CHUNK)

    async def body(filler: Filler) -> None:
        await filler.ensure(fill, 100, 4 * CHUNK)
        assert (0, 200) in store.fetched
        assert (400, CHUNK) in store.fetched
        assert content(fill)[200:400] == bytes(200)
        assert not {1, 2} & set(starts(store))

    run(store, body)


def test_a_reader_goes_on_when_its_range_is_there(store: Store, fill: Fill) -> None:
    """Not when all that was asked for has arrived."""

    async def body(filler: Filler) -> None:
        gate = store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(filler.ensure, fill, 8 * CHUNK, 9 * CHUNK)
            await trio.testing.wait_all_tasks_blocked()
            store.gate = None
            await filler.ensure(fill, 2 * CHUNK, 3 * CHUNK)
            assert not fill.present.covers(8 * CHUNK, 9 * CHUNK)
            gate.set()

    run(store, body)


# ---- sharing


def test_readers_of_one_fill_share_chunks(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        async with trio.open_nursery() as nursery:
            for offset in range(0, 3 * CHUNK, 100):
                nursery.start_soon(filler.ensure, fill, offset, offset + 150)
        assert len(starts(store)) == len(set(starts(store)))
        assert content(fill)[: 3 * CHUNK] == store.content[: 3 * CHUNK]

    run(store, body)


def test_others_readahead_does_not_hold_a_reader_up(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        gate = store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(filler.fetch_all, fill)
            await trio.testing.wait_all_tasks_blocked()
            assert fill.in_flight == WINDOW
            store.gate = None
            await filler.ensure(fill, 15 * CHUNK, 15 * CHUNK + 1)
            gate.set()

    run(store, body)


def test_fills_are_independent(store: Store, fill: Fill, place: Path) -> None:
    (place / "second").touch()
    second = Fill(str(place / "second"), "key", "v1", len(store.content), ExtentSet())

    async def body(filler: Filler) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(filler.fetch_all, fill)
            nursery.start_soon(filler.fetch_all, second)
        assert content(fill) == content(second) == store.content
        assert store.most == 2 * WINDOW

    run(store, body)


# ---- readahead


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.001)


def test_sequential_readers_get_a_growing_readahead(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        ahead = []
        for chunk in range(5):
            for offset in range(chunk * CHUNK, (chunk + 1) * CHUNK, 250):
                await filler.ensure(fill, offset, offset + 250)
                await settle()
            ahead.append(max(starts(store)) - chunk)
        assert ahead[0] == 2, "one chunk, and one more as the first is passed"
        assert ahead == sorted(ahead)
        assert ahead[-1] == WINDOW

    run(store, body)


def test_lone_reads_get_no_readahead(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        for chunk in (15, 3, 9, 18, 6):
            await filler.ensure(fill, chunk * CHUNK + 10, chunk * CHUNK + 20)
            await settle()
        assert sorted(starts(store)) == [3, 6, 9, 15, 18]

    run(store, body)


def test_several_sequential_readers_are_told_apart(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        for step in range(0, 3 * CHUNK, 500):
            for base in (0, 10 * CHUNK):
                await filler.ensure(fill, base + step, base + step + 500)
                await settle()
        assert {3, 4, 13, 14} <= set(starts(store))

    run(store, body)


def test_failing_readahead_hurts_nobody(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        store.fail = lambda start: OSError(errno.EIO, "no") if start else None
        await filler.ensure(fill, 0, CHUNK)
        await settle()
        assert len(store.fetched) > 1
        store.fail = lambda start: None
        await filler.fetch_all(fill)
        assert content(fill) == store.content

    run(store, body)


# ---- long requests


def test_requests_get_longer_once_enough_are_under_way(store: Store, fill: Fill) -> None:
    """What adjoins comes with one request, and nothing is asked for twice."""

    async def body(filler: Filler) -> None:
        await filler.fetch_all(fill)
        assert content(fill) == store.content
        sizes = [end - start for start, end in store.fetched]
        assert max(sizes) == 4 * CHUNK, "21 chunks, for 4 requests at least"
        assert sum(sizes) == fill.size

    run(store, body, max_in_flight=16, longest=8)


def test_what_is_waited_for_as_a_whole_comes_with_the_longest_requests(
    store: Store, fill: Fill
) -> None:
    async def body(filler: Filler) -> None:
        fill.whole = True
        await filler.fetch_all(fill)
        assert content(fill) == store.content
        assert max(end - start for start, end in store.fetched) == 5 * CHUNK

    run(store, body, max_in_flight=16, longest=8)


def test_who_waits_for_the_whole_has_the_next_requests_made_ahead(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        fill.whole = True
        await filler.ensure(fill, 0, 4 * CHUNK)
        store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(filler.ensure, fill, 4 * CHUNK, 8 * CHUNK)
            await settle()
            assert sum(end - start for start, end in store.fetched) == fill.size
            store.gate.set()

    run(store, body, max_in_flight=16, longest=4)


def test_the_last_chunk_comes_ahead_alone(store: Store, fill: Fill) -> None:
    """The request for it does not reach beyond the end, whatever lacks before it."""
    assert fill.size == 20 * CHUNK + 123

    async def body(filler: Filler) -> None:
        for start, end in ((0, 18), (19, 20)):
            await filler.claim(fill, start * CHUNK, end * CHUNK)
        for offset in range(0, 18 * CHUNK, 250):
            await filler.ensure(fill, offset, offset + 250)
        await filler.ensure(fill, 18 * CHUNK, fill.size)
        assert sum(end - start for start, end in store.fetched) == CHUNK + 123

    run(store, body, max_in_flight=16, longest=8)


def test_two_chunks_that_are_wanted_come_with_one_request(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        await filler.ensure(fill, 3 * CHUNK, 5 * CHUNK)
        assert store.fetched == [(3 * CHUNK, 5 * CHUNK)]

    run(store, body, max_in_flight=16, longest=4)


def test_who_reads_in_sequence_has_long_requests_made_ahead(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        first = store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(filler.ensure, fill, 0, 1)
            await settle()
            assert store.fetched == [(0, CHUNK), (CHUNK, 2 * CHUNK)], "who waits, waits for little"
            first.set()
        for offset in range(0, fill.size, 250):
            await filler.ensure(fill, offset, offset + 250)
        assert content(fill) == store.content
        assert sum(end - start for start, end in store.fetched) == fill.size
        assert len(store.fetched) < 21

    run(store, body, max_in_flight=16, longest=4)


class Cramped:
    """Room for two chunks; counts what is promised, and who had to wait."""

    def __init__(self) -> None:
        self.promised, self.waited, self.most = 0, 0, 0
        self.made = trio.Event()

    def left(self, fill: Fill) -> int:
        return max(0, 2 * CHUNK - self.promised)

    def promise(self, fill: Fill, nbytes: int) -> None:
        self.promised += nbytes
        self.most = max(self.most, self.promised)

    async def wait(self, fill: Fill, nbytes: int) -> None:
        self.waited += 1
        while nbytes > self.left(fill):
            await self.made.wait()
        self.promise(fill, nbytes)

    def settle(self, fill: Fill, nbytes: int) -> None:
        self.promised -= nbytes
        self.made.set()
        self.made = trio.Event()


def test_no_more_is_fetched_ahead_than_there_is_room_for(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        filler.room = room = Cramped()
        store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(filler.ensure, fill, index * CHUNK, (index + 1) * CHUNK)
                await settle()
            assert sum(end - start for start, end in store.fetched) == 2 * CHUNK
            assert room.waited == 4, "what is read, nothing else"
            store.gate.set()
        assert room.most == 2 * CHUNK
        assert room.promised == 0
        assert content(fill)[: 6 * CHUNK] == store.content[: 6 * CHUNK]

    run(store, body, max_in_flight=16, longest=4)


def test_a_long_request_leaves_out_what_is_present(store: Store, fill: Fill) -> None:
    fill.present.add(4 * CHUNK, 5 * CHUNK)

    async def body(filler: Filler) -> None:
        await filler.fetch_all(fill)
        assert all(end <= 4 * CHUNK or start >= 5 * CHUNK for start, end in store.fetched)
        assert content(fill)[4 * CHUNK : 5 * CHUNK] == bytes(CHUNK)

    run(store, body, max_in_flight=2, longest=8)


def test_readers_of_long_files_are_not_seen_at_each_chunk() -> None:
    sizes = {100: 1, 64 * real.CHUNK: 2, 1 << 42: 4}
    for size, stride in sizes.items():
        assert Fill("", "", None, size, ExtentSet()).stride == stride


# ---- checksums of what arrived


def test_the_pieces_that_arrived_make_up_the_object(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        await filler.ensure(fill, 5 * CHUNK, 6 * CHUNK)
        assert fill.pieces() is None
        await filler.fetch_all(fill)
        pieces = fill.pieces()
        assert pieces is not None
        ends = itertools.accumulate(size for _, size in pieces)
        assert [start for start, _ in pieces] == [0, *ends][:-1], "checksums are starts here"
        assert sum(size for _, size in pieces) == fill.size
        fill.spoiled()
        assert fill.pieces() is None
        assert not fill.complete

    run(store, body, max_in_flight=16, longest=4)


def test_pieces_are_unknown_where_one_is(store: Store, fill: Fill) -> None:
    """It came to another daemon, from another tier, or was written here."""

    async def body(filler: Filler) -> None:
        store.checksum = lambda start, end: start if start != 7 * CHUNK else None
        await filler.fetch_all(fill)
        assert fill.complete
        assert fill.pieces() is None
        store.checksum = lambda start, end: start
        fill.spoiled()
        await filler.claim(fill, 10, 20)
        await filler.fetch_all(fill)
        assert fill.pieces() is None

    run(store, body)


# ---- local changes


def test_a_claimed_range_is_never_written_by_a_fetch(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        gate = store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(filler.ensure, fill, 5 * CHUNK, 5 * CHUNK + 1)
            await trio.testing.wait_all_tasks_blocked()

            async def edit() -> None:
                await filler.claim(fill, 4 * CHUNK + 500, 5 * CHUNK + 500)
                fd = os.open(fill.path, os.O_WRONLY)
                os.pwrite(fd, b"L" * CHUNK, 4 * CHUNK + 500)
                os.close(fd)

            nursery.start_soon(edit)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        await filler.fetch_all(fill)
        edited = bytearray(store.content)
        edited[4 * CHUNK + 500 : 5 * CHUNK + 500] = b"L" * CHUNK
        assert content(fill) == bytes(edited)

    run(store, body)


def test_a_claim_of_an_untouched_range_is_immediate(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        store.gate = trio.Event()
        with trio.move_on_after(0.01):
            await filler.ensure(fill, 5 * CHUNK, 6 * CHUNK)
        await filler.claim(fill, 6 * CHUNK, 8 * CHUNK)
        assert fill.present.covers(6 * CHUNK, 8 * CHUNK)

    run(store, body)


def test_a_truncated_fill_does_not_grow_back(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        gate = store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(filler.fetch_all, fill)
            await trio.testing.wait_all_tasks_blocked()

            async def truncate() -> None:
                await filler.claim(fill, 2 * CHUNK + 7, fill.size)
                fill.size = 2 * CHUNK + 7
                os.truncate(fill.path, fill.size)

            nursery.start_soon(truncate)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert content(fill) == store.content[: 2 * CHUNK + 7]
        assert fill.complete

    run(store, body)


def test_fetched_bytes_are_reported(store: Store, fill: Fill) -> None:
    seen: list[tuple[int, bool]] = []

    async def main() -> None:
        def fetched(each: Fill, nbytes: int) -> None:
            seen.append((nbytes, each.complete))

        async with open_filler(store.fetch, chunk=CHUNK, on_fetched=fetched) as filler:
            await filler.fetch_all(fill)

    trio.run(main)
    assert sum(nbytes for nbytes, _ in seen) == len(store.content)
    assert [complete for _, complete in seen].count(True) == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_readers_and_failures_give_the_object(store: Store, fill: Fill, seed: int) -> None:
    async def body(filler: Filler) -> None:
        chance = random.Random(seed)
        store.fail = lambda start: OSError(errno.EIO, "no") if chance.random() < 0.3 else None

        async def reader() -> None:
            for _ in range(20):
                start = chance.randrange(len(store.content))
                end = min(start + chance.randrange(1, 3 * CHUNK), fill.size)
                with trio.move_on_after(chance.choice([0, 0.001, 1])):
                    try:
                        await filler.ensure(fill, start, end)
                    except OSError as err:
                        assert err.errno == errno.EIO
                        continue
                    assert content(fill)[start:end] == store.content[start:end]

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(reader)
        store.fail = lambda start: None
        await filler.fetch_all(fill)
        assert content(fill) == store.content

    run(store, body)
