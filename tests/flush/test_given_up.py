"""Effects that are given up while their request is on its way: it lands all the same."""

from __future__ import annotations

import trio

from tests.flush.conftest import LARGE, Place
from tests.flush.test_moves import until, write
from tests.flush.world import World, run


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
