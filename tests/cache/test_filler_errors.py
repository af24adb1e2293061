"""Reading objects into cache files: errors, cancellation, one version."""

from __future__ import annotations

import errno

import pytest
import trio
import trio.testing

from cachefs.cache.filler import Fill, Filler
from cachefs.errors import NotFound, Throttled
from tests.cache.objects import CHUNK, WINDOW, Store, run, starts

# ---- errors


def test_an_error_reaches_every_waiter_and_a_later_call_retries(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        gate = store.gate = trio.Event()
        store.fail = lambda start: Throttled("slow down", hint="wait", retry_after=3.0)
        caught: list[Throttled] = []

        async def reader() -> None:
            try:
                await filler.ensure(fill, 0, 10)
            except Throttled as err:
                caught.append(err)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert len(caught) == 5
        assert len({id(err) for err in caught}) == 5
        assert {(str(err), err.hint, err.retry_after) for err in caught} == {
            ("slow down", "wait", 3.0)
        }
        store.fail = lambda start: None
        await filler.ensure(fill, 0, 10)

    run(store, body)


def test_only_readers_of_that_range_see_the_error(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        store.fail = lambda start: OSError(errno.EIO, "bad chunk") if start == 7 * CHUNK else None
        with pytest.raises(OSError, match="bad chunk"):
            await filler.fetch_all(fill)
        await filler.ensure(fill, 8 * CHUNK, 12 * CHUNK)
        with pytest.raises(OSError, match="bad chunk"):
            await filler.ensure(fill, 7 * CHUNK + 5, 7 * CHUNK + 6)

    run(store, body)


def test_a_bug_in_the_fetch_does_not_end_the_filler(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        store.fail = lambda start: ZeroDivisionError("bug")
        with pytest.raises(ZeroDivisionError):
            await filler.ensure(fill, 0, 10)
        store.fail = lambda start: None
        await filler.ensure(fill, 0, 10)

    run(store, body)


def test_a_short_answer_is_an_error_not_zeros(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        whole, store.content = store.content, store.content[:500]
        with pytest.raises(OSError, match="500 of 1000 bytes") as caught:
            await filler.ensure(fill, 0, 600)
        assert caught.value.errno == errno.EIO
        assert not fill.present.covers(0, 1)
        store.content = whole
        await filler.ensure(fill, 0, 600)

    run(store, body)


def test_a_changed_object_is_stale_for_good(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        await filler.ensure(fill, 5 * CHUNK, 6 * CHUNK)
        store.etag = "v2"
        with pytest.raises(OSError, match="Stale") as caught:
            await filler.ensure(fill, 8 * CHUNK, 9 * CHUNK)
        assert caught.value.errno == errno.ESTALE
        assert fill.stale
        fetched = len(store.fetched)
        store.etag = "v1"
        for call in (filler.fetch_all(fill), filler.ensure(fill, 0, 1)):
            with pytest.raises(OSError, match="Stale"):
                await call
        await filler.ensure(fill, 5 * CHUNK, 6 * CHUNK)
        assert len(store.fetched) == fetched, "no request for a version that is gone"

    run(store, body)


def test_a_deleted_object_is_stale_too(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        store.fail = lambda start: NotFound("gone")
        with pytest.raises(OSError, match="Stale") as caught:
            await filler.ensure(fill, 0, 1)
        assert caught.value.errno == errno.ESTALE

    run(store, body)


# ---- cancellation


def test_a_reader_that_gives_up_takes_nothing_from_the_others(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        gate = store.gate = trio.Event()
        scope = trio.CancelScope()

        async def impatient() -> None:
            with scope:
                await filler.ensure(fill, 5 * CHUNK, 5 * CHUNK + 1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(impatient)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(filler.ensure, fill, 5 * CHUNK + 1, 5 * CHUNK + 2)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert starts(store) == [5]

    run(store, body)


def test_abandoning_ends_what_is_on_its_way(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        store.gate = trio.Event()
        async with trio.open_nursery() as nursery:

            async def reader() -> None:
                with pytest.raises(OSError, match="abandoned") as caught:
                    await filler.fetch_all(fill)
                assert caught.value.errno == errno.EIO

            nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked()
            await filler.abandon(fill)
            assert (fill.in_flight, filler.active, store.running) == (0, 0, 0)
        store.gate = None
        await filler.fetch_all(fill)

    run(store, body)


def test_leaving_the_filler_ends_everything(store: Store, fill: Fill) -> None:
    async def body(filler: Filler) -> None:
        store.gate = trio.Event()
        with trio.move_on_after(0.05):
            await filler.fetch_all(fill)
        assert store.running == WINDOW

    run(store, body)
    assert store.running == 0
    assert fill.in_flight == 0
