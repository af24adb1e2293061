"""Effects that are given up while their request is on its way: it lands all the same."""

from __future__ import annotations

import pytest
import trio

from cachefs.errors import Transient
from cachefs.flush.lost import GRACE
from tests.flush.conftest import LARGE, Place
from tests.flush.memory import Fault, Killed
from tests.flush.test_moves import until, write
from tests.flush.world import PREFIX, World, run


def is_clean(world: World, *shown: str) -> bool:
    """Whether bucket and database have these keys and no others."""
    known = [row.key for row in world.meta.objects.below("")]
    return sorted(world.shown) == known == sorted(shown)


def test_a_deletion_waits_for_the_request_that_it_is_to_undo(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.early["put"], place.late["delete"] = trio.Event(), trio.Event()
            await world.symlink("latest", "target")
            await until(lambda: place.held)
            world.unlink("latest")
            await trio.sleep(30)
            place.early.pop("put").set()
            await trio.sleep(1)
            place.late.pop("delete").set()
            await world.settle()
            assert is_clean(world)

    run(main)


def test_a_deletion_waits_for_the_end_of_an_upload(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.early["complete_upload"], place.late["delete"] = trio.Event(), trio.Event()
            await world.write("model.safetensors", LARGE)
            await until(lambda: place.held)
            world.unlink("model.safetensors")
            await trio.sleep(30)
            place.early.pop("complete_upload").set()
            await trio.sleep(1)
            place.late.pop("delete").set()
            await world.settle()
            assert is_clean(world)

    run(main)


def test_a_copy_that_is_given_up_leaves_nothing_behind(place: Place) -> None:
    """It has lost its name, and its file, before the copy was answered."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, notes__txt=b"notes", other__txt=b"other")
            place.late["copy"], place.late["delete"] = trio.Event(), trio.Event()
            await world.rename("notes.txt", "latest")
            await until(lambda: "latest" in world.shown)
            await world.rename("other.txt", "latest", 2)
            await world.write("next.txt", b"next")
            await world.rename("next.txt", "other.txt")
            world.unlink("latest")
            await world.rename("other.txt", "big.pt")
            await trio.sleep(30)
            place.late.pop("copy").set()
            await trio.sleep(1)
            place.late.pop("delete").set()
            await world.settle()
            assert world.shown == {"big.pt": b"next"}
            assert is_clean(world, "big.pt")

    run(main)


def test_a_name_that_comes_back_while_its_deletion_waits_is_not_deleted(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, other__txt=b"other")
            place.early["put"] = trio.Event()
            await world.write("config.json", b"config")
            await until(lambda: place.held)
            world.unlink("config.json")
            await trio.sleep(30)
            await world.rename("other.txt", "config.json")
            await trio.sleep(30)
            place.early.pop("put").set()
            await world.settle()
            assert world.shown == {"config.json": b"other"}
            assert is_clean(world, "config.json")

    run(main)


def test_the_next_file_of_a_name_waits_for_the_request_of_the_last(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.early["put"] = trio.Event()
            await world.write("config.json", b"first")
            await until(lambda: place.held)
            world.unlink("config.json")
            await world.write("config.json", b"second")
            await trio.sleep(30)
            assert place.held == ["put"]
            place.early.pop("put").set()
            await world.settle()
            assert world.shown == {"config.json": b"second"}

    run(main)


LOST = [("put", Fault(Transient("no reply"), late=True))]
"""A request whose answer is lost, and that the store carries out late."""


async def deleted_without_an_answer(place: Place, world: World) -> None:
    """`latest` is deleted while the request that was to show it has no answer."""
    place.faults = list(LOST)
    await world.symlink("latest", "target")
    await until(lambda: place.count("put"))
    world.unlink("latest")
    await world.settle()
    assert world.shown == {}


def test_what_comes_after_its_deletion_is_deleted(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await deleted_without_an_answer(place, world)
            place.store.catch_up()
            assert "latest" in world.shown
            await trio.sleep(3 * GRACE)
            assert is_clean(world)

    run(main)


@pytest.mark.parametrize("deleted", ["before", "after"])
def test_what_comes_after_a_death_and_its_deletion_is_deleted(place: Place, deleted: str) -> None:
    """The request outlives the daemon that made it. `deleted`: before its death, or after."""

    async def main() -> None:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with place.mounted() as world:
                if deleted == "before":
                    await deleted_without_an_answer(place, world)
                else:
                    place.faults = [*LOST, *[("put", Fault(Transient("never arrived")))] * 20]
                    await world.symlink("latest", "target")
                    await until(lambda: place.count("put") > 1)
                world.kill()
        assert caught.value.subgroup(Killed) is not None
        async with place.mounted() as world:
            if deleted == "after":
                world.unlink("latest")
            await world.settle()
            assert world.shown == {}
            place.store.catch_up()
            assert "latest" in world.shown
            await trio.sleep(3 * GRACE)
            assert is_clean(world)

    run(main)


def test_nothing_comes_in_most_cases(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await deleted_without_an_answer(place, world)
            await trio.sleep(3 * GRACE)
            assert is_clean(world)
            assert place.count("delete") == 1

    run(main)


def test_what_another_writer_put_under_a_deleted_key_stays(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await deleted_without_an_answer(place, world)
            place.store.put(PREFIX + "latest", b"theirs", metadata={"by": "another"})
            place.store.catch_up()
            await trio.sleep(3 * GRACE)
            assert world.shown == {"latest": b"theirs"}
            assert place.count("delete") == 1

    run(main)


@pytest.mark.parametrize("late", ["before it is shown", "after"])
def test_what_comes_late_does_the_next_file_of_the_name_no_harm(place: Place, late: str) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await deleted_without_an_answer(place, world)
            if late == "before it is shown":
                place.store.catch_up()
            await world.write("latest", b"next")
            await world.settle()
            place.store.catch_up()
            await trio.sleep(3 * GRACE)
            assert world.shown == {"latest": b"next"}
            assert is_clean(world, "latest")

    run(main)


def test_a_file_that_is_being_written_keeps_its_name_to_itself(place: Place) -> None:
    """What came late to its key is overwritten by it, or goes with it."""

    async def main() -> None:
        async with place.mounted() as world:
            await deleted_without_an_answer(place, world)
            place.store.catch_up()
            fh = await world.create("latest", b"next")
            await trio.sleep(3 * GRACE)
            world.files.release(fh)
            await world.settle()
            assert world.shown == {"latest": b"next"}
            world.unlink("latest")
            await world.settle()
            assert is_clean(world)

    run(main)


LOST_DELETION = ("delete", Fault(Transient("no reply"), late=True))


def test_a_deletion_that_comes_late_does_the_next_file_of_the_name_no_harm(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, config__json=b"config")
            place.faults = [LOST_DELETION]
            world.unlink("config.json")
            await until(lambda: place.count("delete"))
            await world.write("config.json", b"next")
            await trio.sleep(5)
            place.store.catch_up()
            await world.settle()
            assert world.shown == {"config.json": b"next"}
            assert is_clean(world, "config.json")

    run(main)


def test_a_deletion_that_outlives_its_daemon_does_no_harm(place: Place) -> None:
    async def main() -> None:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with place.mounted() as world:
                await write(world, config__json=b"config")
                place.faults = [LOST_DELETION] * 2
                world.unlink("config.json")
                await until(lambda: place.count("delete") == 2)
                world.kill()
        assert caught.value.subgroup(Killed) is not None
        place.faults = []
        async with place.mounted() as world:
            await world.write("config.json", b"next")
            await trio.sleep(5)
            place.store.catch_up()
            await world.settle()
            assert world.shown == {"config.json": b"next"}

    run(main)
