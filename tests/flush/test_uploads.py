"""Multipart uploads: links that share one, answers that are lost, and what is left over."""

from __future__ import annotations

import pytest
import trio

from cachefs.errors import Refused, StoreError, Throttled, Transient
from cachefs.flush.lost import GRACE
from cachefs.meta.summary import Summary
from tests.flush.conftest import LARGE, Place
from tests.flush.memory import Fault, Killed
from tests.flush.world import PREFIX, run


async def until_begun(place: Place) -> None:
    while not place.store.uploads:  # noqa: ASYNC110 - nothing tells
        await trio.sleep(0.001)


@pytest.mark.parametrize("other", ["other.bin", "config.json", "latest"])
def test_links_of_a_large_file_share_one_upload(place: Place, other: str) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await world.write("model.bin", LARGE)
            await world.link("model.bin", other)
            await world.settle()
            assert world.shown == {"model.bin": LARGE, other: LARGE}
            assert place.count("create_upload") == 1
            assert place.count("abort_upload") == 0
            assert place.count("copy") == 1

    run(main)


def test_a_link_is_durable_once_every_name_is_shown(place: Place) -> None:
    async def main() -> None:
        async with place.mounted(latency=1.0) as world:
            await world.write("a.bin", LARGE)
            await world.link("a.bin", "b.bin")
            while world.queue.effects:
                if world.state_of("a.bin") == "durable":
                    assert set(world.shown) == {"a.bin", "b.bin"}
                await trio.sleep(0.01)
            assert world.state_of("a.bin") == "durable"
            assert world.state_of("b.bin") == "durable"

    run(main)


def test_a_refused_link_keeps_the_content_from_counting_as_durable(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.faults = [("copy", Fault(Refused("no")))]
            await world.write("a.bin", b"small")
            await world.link("a.bin", "b.bin")
            await trio.sleep(3)
            assert set(world.shown) == {"a.bin"}
            assert world.state_of("a.bin") != "durable"
            await world.settle()
            await trio.sleep(10)
            assert set(world.shown) == {"a.bin", "b.bin"}
            assert world.state_of("a.bin") == "durable"

    run(main)


def test_two_links_that_are_refused_do_not_end_the_flusher(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.faults = [("put", Fault(Refused("no")))] * 3
            await world.write("a.bin", b"small")
            await world.link("a.bin", "b.bin")
            await trio.sleep(60)
            assert world.shown == {"a.bin": b"small", "b.bin": b"small"}

    run(main)


def test_an_upload_whose_beginning_was_not_confirmed_is_aborted(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.faults = [("create_upload", Fault(Transient("no reply"), after=True))]
            await world.write("a.bin", LARGE)
            await world.settle()
            assert world.shown == {"a.bin": LARGE}
            assert len(place.store.uploads) == 1
            await trio.sleep(2 * GRACE + 1)
            assert not place.store.uploads
            assert not world.meta.uploads.all()

    run(main)


@pytest.mark.parametrize("error", [Throttled("slow down"), Refused("no")])
def test_a_clear_no_leaves_nothing_to_look_for(place: Place, error: StoreError) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.faults = [("create_upload", Fault(error))]
            await world.write("a.bin", LARGE)
            await trio.sleep(3 * GRACE)
            assert world.shown == {"a.bin": LARGE}
            assert place.count("list_uploads") == 0

    run(main)


def test_an_upload_begun_by_a_daemon_that_died_is_aborted_by_the_next(place: Place) -> None:
    async def main() -> None:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with place.mounted(latency=1.0) as world:
                await world.write("a.bin", LARGE)
                await until_begun(place)
                world.unlink("a.bin")
                world.kill()
        assert caught.value.subgroup(Killed) is not None
        assert place.store.uploads
        async with place.mounted() as world:
            await trio.sleep(2 * GRACE + 1)
            assert not place.store.uploads
            assert not world.meta.uploads.all()

    run(main)


def test_uploads_of_other_writers_live(place: Place) -> None:
    """To the same key even: one with parts, one begun long before, one of a longer key."""

    async def main() -> None:
        key = PREFIX + "a.bin"
        await trio.sleep(2000)
        long_ago = place.store.create_upload(key)
        await trio.sleep(2000)
        async with place.mounted() as world:
            theirs = place.store.create_upload(key)
            place.store.upload_part(key, theirs, 1, b"part")
            longer = place.store.create_upload(key + ".other")
            place.faults = [("create_upload", Fault(Transient("no reply"), after=True))]
            await world.write("a.bin", LARGE)
            await trio.sleep(3 * GRACE)
            assert world.shown == {"a.bin": LARGE}
            assert set(place.store.uploads) == {long_ago, theirs, longer}

    run(main)


def test_an_upload_of_a_file_that_is_removed_meanwhile_is_aborted(place: Place) -> None:
    async def main() -> None:
        async with place.mounted(latency=1.0) as world:
            await world.write("a.bin", LARGE)
            await until_begun(place)
            world.unlink("a.bin")
            await trio.sleep(3 * GRACE)
            assert not place.store.uploads
            assert not world.shown

    run(main)


def test_an_upload_that_expired_before_its_turn_is_begun_anew(place: Place) -> None:
    """As by a lifecycle rule of the bucket, while the marker before it was refused."""

    async def main() -> None:
        async with place.mounted() as world:
            place.faults = [("put", Fault(Refused("no")))] * 3
            await world.write("config.json", b"config")
            await world.write("latest", LARGE)
            await until_begun(place)
            await trio.sleep(3)
            assert not world.shown
            place.store.uploads.clear()
            await trio.sleep(600)
            assert world.shown == {"config.json": b"config", "latest": LARGE}
            assert not world.meta.uploads.all()

    run(main)


def test_a_completion_whose_answer_died_with_its_daemon_is_no_conflict(place: Place) -> None:
    async def main() -> None:
        with pytest.raises(BaseExceptionGroup):
            async with place.mounted(latency=1.0) as world:
                await world.write("latest", LARGE)
                await until_begun(place)
                await trio.sleep(1)
                world.kill()
        async with place.mounted() as world:
            place.faults = [("complete_upload", Fault(Transient("no reply"), after=True))]
            await world.link("latest", "a.bin")
            world.chmod("latest", 0o600)
            await world.settle()
            assert world.shown == {"latest": LARGE, "a.bin": LARGE}
            assert place.count("create_upload") == 1

    run(main)


def test_parts_that_arrived_before_a_death_are_not_sent_again(place: Place) -> None:
    async def main() -> None:
        with pytest.raises(BaseExceptionGroup):
            async with place.mounted(latency=1.0) as world:
                await world.write("a.bin", LARGE)
                summary = Summary(world.meta.db)
                while sum(summary.sent().values()) < 72:  # noqa: ASYNC110 - nothing tells
                    await trio.sleep(0.01)
                world.kill()
        sent = place.count("upload_part")
        async with place.mounted() as world:
            await world.settle()
            assert world.shown == {"a.bin": LARGE}
            assert place.count("create_upload") == 1
            assert place.count("upload_part") - sent < 9

    run(main)


@pytest.mark.parametrize("how", ["truncate", "rename", "same", "longer"])
def test_a_file_that_is_written_anew_sends_what_differs(place: Place, how: str) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await world.write("a.bin", LARGE)
            await world.settle()
            place.requests.clear()
            changed = LARGE if how == "same" else LARGE[:100] + b"?" + LARGE[101:]
            changed += b"tail" if how == "longer" else b""
            name = "a.bin.tmp" if how == "rename" else "a.bin"
            await world.write(name, changed)
            if how == "rename":
                await world.rename(name, "a.bin")
            await world.settle()
            assert world.shown == {"a.bin": changed}
            assert place.count("upload_part") == {"same": 0, "longer": 2}.get(how, 1)
            assert place.count("put") == 0

    run(main)


def test_an_object_of_another_writer_is_not_compared_with(place: Place) -> None:
    """What is known of its parts is of the version before."""

    async def main() -> None:
        async with place.mounted() as world:
            await world.write("a.bin", LARGE)
            await world.settle()
            place.store.put(PREFIX + "a.bin", bytes(len(LARGE)))
            changed = LARGE[:100] + b"?" + LARGE[101:]
            await world.write("a.bin", changed)
            await trio.sleep(100)
            conflicts = [data for key, data in world.shown.items() if "conflict" in key]
            assert world.shown["a.bin"] == bytes(len(LARGE))
            assert conflicts == [changed]

    run(main)


def test_parts_of_what_was_given_up_are_not_used_again(place: Place) -> None:
    """Beyond the preserve limit the file that was being uploaded is written to itself: parts that
    had arrived are of another version, though they are as long."""

    async def main() -> None:
        place.faults = [("complete_upload", Fault(Refused("no")))]
        async with place.mounted() as world:
            world.rewriter._preserve_limit = 0
            await world.write("a.bin", LARGE)
            while world.state_of("a.bin") != "stalled":  # noqa: ASYNC110 - nothing tells
                await trio.sleep(0.01)
            await world.edit("a.bin", 0, b"other")
            await world.settle()
            assert world.shown == {"a.bin": b"other" + LARGE[5:]}

    run(main)
