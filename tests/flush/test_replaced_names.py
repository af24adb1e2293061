"""Files that are renamed over one of several names of another: the key is never missing."""

from __future__ import annotations

import pytest
import trio

from tests.flush.conftest import LARGE, Place
from tests.flush.test_moves import until, write
from tests.flush.test_replaced import Marked
from tests.flush.world import World, run


async def linked(world: World, evicted: bool = False) -> None:
    """`notes.txt`, which a marker stands for, and a new name of it that is still to be shown."""
    await write(world, notes__txt=b"notes", next__txt=b"next")
    await write(world, latest=b"marker")
    if evicted:
        world.evict("notes.txt")
    await world.link("notes.txt", "other.txt")


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_one_of_two_names_shows_the_next_file_without_a_gap(
    place: Place, evicted: bool, shown: bool
) -> None:
    """`shown`: the file that takes the name has been in the bucket under another."""

    async def main() -> None:
        async with place.mounted() as world:
            await linked(world, evicted)
            marked = Marked(place, world, "notes.txt")
            if not shown:
                await world.write("next.txt", b"newer")
            await world.rename("next.txt", "notes.txt")
            await world.settle()
            last = b"next" if shown else b"newer"
            assert world.shown == {"latest": b"marker", "notes.txt": last, "other.txt": b"notes"}
            assert marked.seen and None not in marked.seen

    run(main)


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("then", ["nothing", "the other name goes", "the other name moves"])
def test_it_stays_while_the_next_file_is_being_written(
    place: Place, evicted: bool, then: str
) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await linked(world, evicted)
            marked = Marked(place, world, "notes.txt")
            fh = await world.create("new.txt", b"newer")
            await world.rename("new.txt", "notes.txt")
            if then == "the other name goes":
                world.unlink("other.txt")
            elif then == "the other name moves":
                await world.rename("other.txt", "more.txt")
            await trio.sleep(60)
            world.files.release(fh)
            await world.settle()
            assert world.shown.pop("other.txt", b"notes") == b"notes"
            assert world.shown["notes.txt"] == b"newer"
            assert ("more.txt" in world.shown) == (then == "the other name moves")
            assert marked.seen and None not in marked.seen

    run(main)


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("at", [0.0, 60.0])
def test_it_goes_with_the_file_that_took_the_name(place: Place, evicted: bool, at: float) -> None:
    """Which is deleted before it was complete, `at` seconds after it took the name."""

    async def main() -> None:
        async with place.mounted() as world:
            await linked(world, evicted)
            fh = await world.create("new.txt", b"newer")
            await world.rename("new.txt", "notes.txt")
            await trio.sleep(at)
            world.unlink("notes.txt")
            world.files.release(fh)
            await world.settle()
            assert world.shown == {"latest": b"marker", "next.txt": b"next", "other.txt": b"notes"}
            keys = [row.key for row in world.meta.objects.below("")]
            assert keys == sorted(world.shown)

    run(main)


def test_a_temporary_name_keeps_what_it_is_to_show(place: Place) -> None:
    """Though the next file is shown under the other name before the temporary one may be."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, notes__txt=b"notes", next__txt=b"next")
            await write(world, latest=b"marker")
            world.evict("notes.txt")
            await world.link("notes.txt", "other.tmp")
            marked = Marked(place, world, "notes.txt")
            await world.rename("next.txt", "notes.txt")
            await trio.sleep(60)
            assert world.shown["notes.txt"] == b"next"
            await world.rename("other.tmp", "other.txt")
            await world.settle()
            assert world.shown == {"latest": b"marker", "notes.txt": b"next", "other.txt": b"notes"}
            assert None not in marked.seen

    run(main)


def test_content_of_its_own_leaves_no_old_key_to_the_other_name(place: Place) -> None:
    """The other name is written anew before it was copied from the key that was handed on."""

    async def main() -> None:
        async with place.mounted() as world:
            await linked(world, evicted=True)
            place.early["copy"] = trio.Event()
            fh = await world.create("new.txt", LARGE)
            await world.rename("new.txt", "notes.txt")
            await until(lambda: place.held)
            await world.write("other.txt", b"rewritten")
            place.early.pop("copy").set()
            await world.settle()
            world.unlink("notes.txt")
            world.files.release(fh)
            await world.settle()
            assert "notes.txt" not in world.shown
            assert world.shown["other.txt"] == b"rewritten"

    run(main)
