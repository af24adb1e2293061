"""Files that take another's name while a marker waits for what was to be shown under it."""

from __future__ import annotations

import pytest
import trio

from cachefs.errors import Corrupt
from tests.flush.conftest import LARGE, Place
from tests.flush.memory import Fault
from tests.flush.test_moves import until, write
from tests.flush.world import World, run


class Marked:
    """What the bucket showed under `name` each time that it showed `latest`."""

    def __init__(self, place: Place, world: World, name: str = "config.json") -> None:
        self.seen: list[bytes | None] = []
        self._world = world
        self._name = name
        place.store.on_change.append(self._look)

    def _look(self) -> None:
        if "latest" in self._world.shown:
            self.seen.append(self._world.shown.get(self._name))


@pytest.mark.parametrize("evicted", [False, True])
def test_a_file_that_the_bucket_has_takes_the_name_of_one_that_a_marker_waits_for(
    place: Place, evicted: bool
) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, other__txt=b"other")
            if evicted:
                world.evict("other.txt")
            marked = Marked(place, world)
            await world.write("config.json", b"config")
            await world.write("latest", b"marker")
            await trio.sleep(0.5)  # It is due before its successor is.
            await world.rename("other.txt", "config.json")
            await world.settle()
            assert world.shown == {"config.json": b"other", "latest": b"marker"}
            assert marked.seen and None not in marked.seen

    run(main)


@pytest.mark.parametrize("successor", ["file", "shown file", "link"])
def test_a_file_that_moves_in_the_bucket_is_there_before_the_marker_that_waits_for_it(
    place: Place, successor: str
) -> None:
    """Though another one takes its name before the copy was made."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, old__txt=b"moved", shown__txt=b"shown")
            world.evict("old.txt")
            await world.rename("old.txt", "config.json")
            marked = Marked(place, world)
            await world.write("latest", b"marker")
            await trio.sleep(0.5)  # It is due before its successor is.
            if successor == "file":
                await world.write("new.txt", b"file")
            elif successor == "link":
                await world.symlink("new.txt", "target")
            await world.rename(
                "shown.txt" if successor == "shown file" else "new.txt", "config.json"
            )
            await world.write("old.txt", b"another")
            await world.settle()
            last = {"file": b"file", "shown file": b"shown", "link": b"target"}[successor]
            assert world.shown.pop("shown.txt", b"shown") == b"shown"
            assert world.shown["config.json"] == last
            assert world.shown["old.txt"] == b"another"
            assert marked.seen and None not in marked.seen
            assert world.meta.objects.get("old.txt") is not None

    run(main)


def test_a_copy_in_passing_finds_its_source_wherever_its_directory_goes(place: Place) -> None:
    """Two markers, of which the second replaces what the first waits for, in a directory that is
    renamed; the source's name has a new file meanwhile."""

    async def main() -> None:
        async with place.mounted() as world:
            await world.mkdir("save")
            await write(world, old__txt=b"first")
            world.evict("old.txt")
            await world.rename("old.txt", "save/latest")
            await world.write("save/model.index.json", b"index")
            await world.write("new.txt", b"second")
            await world.rename("new.txt", "save/latest")
            await world.write("old.txt", b"another")
            seen: list[bytes | None] = []

            def look() -> None:
                if "step/model.index.json" in world.shown:
                    seen.append(world.shown.get("step/latest"))

            place.store.on_change.append(look)
            await world.rename("save", "step")
            await world.settle()
            assert world.shown == {
                "old.txt": b"another",
                "step/latest": b"second",
                "step/model.index.json": b"index",
            }
            assert seen and None not in seen

    run(main)


def test_what_was_shown_under_a_name_of_before_is_there_before_the_marker(place: Place) -> None:
    """The first version of a pointer comes out while its directory is renamed."""

    async def main() -> None:
        async with place.mounted() as world:
            await world.mkdir("save")
            await world.write("save/latest", b"first")
            await world.write("save/model.index.json", b"index")
            await world.write("save/latest", b"second")
            seen: list[bytes | None] = []

            def look() -> None:
                if "step/model.index.json" in world.shown:
                    seen.append(world.shown.get("step/latest"))

            place.store.on_change.append(look)
            await renamed_during_put(place, world)
            await world.settle()
            assert world.shown == {"step/latest": b"second", "step/model.index.json": b"index"}
            assert seen and None not in seen

    run(main)


async def renamed_during_put(place: Place, world: World) -> None:
    """`save` becomes `step` after the first object came out, before its answer did."""
    place.late["put"] = trio.Event()
    await until(lambda: "save/latest" in world.shown)
    await world.rename("save", "step")
    place.late.pop("put").set()


def test_a_version_that_was_given_up_on_its_way_is_not_taken_for_the_files_own(
    place: Place,
) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, other__txt=b"other")
            world.evict("other.txt")
            place.late["put"] = trio.Event()
            await world.write("latest", b"given up")
            await until(lambda: "latest" in world.shown)
            await world.rename("other.txt", "latest")
            await world.rename("latest", "config.json")
            place.late.pop("put").set()
            await world.settle()
            assert world.shown == {"config.json": b"other"}

    run(main)


def test_what_an_unanswered_request_may_have_shown_is_deleted_with_the_name(place: Place) -> None:
    """Though the name had passed to another file while the request was prepared."""

    async def main() -> None:
        async with place.mounted() as world:
            place.faults = [("complete_upload", Fault(Corrupt("bits fell over"), after=True))]
            place.early["upload_part"] = trio.Event()
            await world.write("config.json", LARGE)
            await until(lambda: place.count("create_upload"))
            await trio.sleep(1)
            await world.write("config.json.tmp", b"next")
            await world.rename("config.json.tmp", "config.json")
            place.early.pop("upload_part").set()
            await until(lambda: world.shown)
            world.unlink("config.json")
            await world.settle()
            assert world.shown == {}

    run(main)


def test_content_that_comes_out_under_its_old_name_is_still_the_files_own(place: Place) -> None:
    """Though what had its new name before is still on its way there."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, big__pt=b"version 0")
            place.early["upload_part"] = trio.Event()
            place.late["put"] = trio.Event()
            await world.write("big.pt", LARGE)
            await world.write("other.bin", b"other")
            await until(lambda: "other.bin" in world.shown)
            await world.rename("other.bin", "big.pt")
            place.late.pop("put").set()
            await trio.sleep(1)
            place.early.pop("upload_part").set()
            await world.settle()
            assert world.shown == {"big.pt": b"other"}
            known = world.meta.objects.get("big.pt")
            assert known is not None and not known.stale
            assert world.is_durable("big.pt")

    run(main)


def test_what_is_replaced_in_a_moved_directory_stays_as_long_as_its_marker(place: Place) -> None:
    """At the old place, which the bucket shows until the directory has a name that counts."""

    async def main() -> None:
        async with place.mounted() as world:
            await world.mkdir("step")
            await world.write("step/config.json", b"config")
            await world.write("step/notes.txt", b"notes")
            await world.write("step/latest", b"marker")
            await world.settle()
            seen: list[bytes | None] = []

            def look() -> None:
                if "step/latest" in world.shown:
                    seen.append(world.shown.get("step/config.json"))

            place.store.on_change.append(look)
            await world.rename("step", "tmp-step")
            await world.rename("tmp-step/notes.txt", "tmp-step/config.json")
            await trio.sleep(30)
            await world.rename("tmp-step", "final")
            await world.settle()
            assert world.shown == {"final/config.json": b"notes", "final/latest": b"marker"}
            assert None not in seen

    run(main)


def test_a_link_keeps_its_place_before_a_marker_when_the_other_name_goes(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, notes__txt=b"notes")
            await world.write("next.txt", b"next")
            await world.link("notes.txt", "config.json")
            marked = Marked(place, world)
            await world.write("latest", b"marker")
            await world.rename("next.txt", "notes.txt")
            await world.settle()
            assert world.shown == {
                "config.json": b"notes",
                "latest": b"marker",
                "notes.txt": b"next",
            }
            assert marked.seen and None not in marked.seen

    run(main)


def test_a_deletion_under_way_is_recorded_though_its_key_changes_hands(place: Place) -> None:
    """What a file left behind whose name was taken goes with whoever has the name."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, old__txt=b"old", notes__txt=b"notes", next__txt=b"next")
            place.late["delete"] = trio.Event()
            await world.rename("old.txt", "config.json")
            await world.rename("notes.txt", "config.json")
            await until(lambda: "old.txt" not in world.shown)
            await world.rename("next.txt", "config.json")
            place.late.pop("delete").set()
            await world.settle()
            assert world.shown == {"config.json": b"next"}
            assert [row.key for row in world.meta.objects.below("")] == ["config.json"]

    run(main)
