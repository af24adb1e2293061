"""Names that move, go and come back while the bucket shows them as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from cachefs.errors import NotFound, Transient
from cachefs.flush.committer import Moot
from tests.flush.conftest import LARGE, Place
from tests.flush.memory import Fault
from tests.flush.world import PREFIX, World, run


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(100):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await trio.sleep(0.01)


async def write(world: World, **files: bytes) -> None:
    """Files that the store has; a double underscore stands for a dot."""
    for name, data in files.items():
        await world.write(name.replace("__", "."), data)
    await world.settle()


async def evict_all(world: World, *paths: str) -> None:
    for path in paths:
        world.evict(path)


@pytest.mark.parametrize("new", ["model.bin", "events.out.2", "latest"])
def test_a_renamed_log_is_copied_before_its_old_key_goes(place: Place, new: str) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, events__out__1=b"log")
            world.evict("events.out.1")
            await world.rename("events.out.1", new)
            await world.settle()
            assert world.shown == {new: b"log"}

    run(main)


def test_a_name_used_anew_outlives_the_deletion_under_way(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, a__txt=b"old")
            await world.rename("a.txt", "b.txt")
            place.late["delete"] = trio.Event()
            await until(lambda: place.count("delete"))
            await world.write("a.txt", b"new")
            await world.rename("b.txt", "c.tmp")
            place.late.pop("delete").set()
            await trio.sleep(30)
            await world.rename("c.tmp", "c.txt")
            await world.settle()
            assert world.shown == {"a.txt": b"new", "c.txt": b"old"}

    run(main)


def test_a_copy_that_is_answered_late_leaves_the_new_file_alone(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, a__txt=b"old")
            place.late["copy"] = trio.Event()
            await world.rename("a.txt", "b.txt")
            await until(lambda: place.count("copy"))
            await world.write("a.txt", b"new")
            await world.rename("b.txt", "c.txt")
            await trio.sleep(30)
            place.late.pop("copy").set()
            await world.settle()
            assert world.shown == {"a.txt": b"new", "c.txt": b"old"}

    run(main)


@pytest.mark.parametrize("new", ["b.txt", "b.tmp"])
def test_bytes_that_only_the_bucket_has_outlive_a_new_file_under_their_key(
    place: Place, new: str
) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, a__txt=b"old")
            world.evict("a.txt")
            await world.rename("a.txt", new)
            await world.write("a.txt", b"new")
            await trio.sleep(60)
            await world.rename(new, "c.txt")
            await world.settle()
            assert world.shown == {"a.txt": b"new", "c.txt": b"old"}

    run(main)


@pytest.mark.parametrize("content", [b"small", LARGE])
@pytest.mark.parametrize("change", ["rename", "chmod"])
def test_who_reads_what_only_the_bucket_has_does_not_notice(
    place: Place, content: bytes, change: str
) -> None:
    async def main() -> None:
        async with place.mounted() as world, trio.open_nursery() as nursery:
            await world.write("a.bin", content)
            await world.settle()
            world.evict("a.bin")
            place.late["copy"] = trio.Event()
            if change == "rename":
                await world.rename("a.bin", "b.bin")
            else:
                world.chmod("a.bin", 0o600)
            await until(lambda: place.count("copy"))
            place.early["get_into"] = trio.Event()
            read: list[bytes] = []

            async def reader() -> None:
                read.append(await world.read("b.bin" if change == "rename" else "a.bin"))

            nursery.start_soon(reader)
            await trio.sleep(1)
            place.late.pop("copy").set()
            await world.settle()
            place.early.pop("get_into").set()
            await until(lambda: read)
            assert read == [content]

    run(main)


def test_names_that_go_round_in_a_circle(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, a__txt=b"a", b__txt=b"b", c__txt=b"c")
            await evict_all(world, "a.txt", "b.txt", "c.txt")
            for old, new in (("a", "t"), ("b", "a"), ("c", "b"), ("t", "c")):
                await world.rename(f"{old}.txt", f"{new}.txt")
            await world.settle()
            assert world.shown == {"a.txt": b"b", "b.txt": b"c", "c.txt": b"a"}

    run(main)


def test_names_that_move_up_in_a_row(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, a0__txt=b"0", a1__txt=b"1", a2__txt=b"2")
            await evict_all(world, "a0.txt", "a1.txt", "a2.txt")
            for number in (2, 1, 0):
                await world.rename(f"a{number}.txt", f"a{number + 1}.txt")
            await world.write("a0.txt", b"new")
            await world.settle()
            assert world.shown == {f"a{n}.txt": d for n, d in enumerate([b"new", b"0", b"1", b"2"])}

    run(main)


def test_a_version_that_a_marker_names_is_shown_before_it(place: Place) -> None:
    """Though the file was replaced meanwhile, by one whose name others wait for as well."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, config__json=b"version 1")
            seen: list[bytes | None] = []

            def look() -> None:
                if PREFIX + "latest" in place.store.objects:
                    seen.append(world.shown.get("config.json"))

            place.store.on_change.append(look)
            await world.write("config.json", b"version 2")
            await world.write("latest", b"marker")
            await world.write("config.json.new", b"version 3")
            await world.rename("config.json.new", "config.json")
            await world.settle()
            assert world.shown == {"config.json": b"version 3", "latest": b"marker"}
            assert seen and b"version 1" not in seen

    run(main)


def test_markers_keep_their_order_when_their_directory_moves(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, big__bin=b"index")
            await world.mkdir("step.tmp")
            await world.write("step.tmp/.metadata", b"first")
            await world.rename("big.bin", "step.tmp/latest")
            seen: list[set[str]] = []
            place.store.on_change.append(lambda: seen.append(set(world.shown)))
            await world.rename("step.tmp", "step")
            await world.settle()
            assert set(world.shown) == {"step/.metadata", "step/latest"}
            assert all("step/.metadata" in keys for keys in seen if "step/latest" in keys)

    run(main)


@pytest.mark.parametrize("touched", [False, True])
def test_markers_that_are_shown_keep_the_order_in_which_they_came(
    place: Place, touched: bool
) -> None:
    """Whatever happened to their attributes since."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, other__txt=b"marker")  # Its name is the older entry.
            await world.mkdir("step.new")
            await world.write("step.new/model.index.json", b"index")
            await world.settle()
            await world.rename("other.txt", "step.new/latest")
            await world.settle()
            if touched:
                world.chmod("step.new/model.index.json", 0o600)
                await world.settle()
            seen: list[set[str]] = []
            place.store.on_change.append(lambda: seen.append(set(world.shown)))
            await world.rename("step.new", "step")
            await world.settle()
            assert set(world.shown) == {"step/latest", "step/model.index.json"}
            assert all("step/model.index.json" in keys for keys in seen if "step/latest" in keys)

    run(main)


def test_a_directory_that_was_renamed_and_emptied_keeps_existing(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await world.mkdir("old")
            await world.settle()
            await world.write("old/file", b"file")
            await world.rename("old", "new")
            await trio.sleep(0.2)
            await world.settle()
            world.unlink("new/file")
            await world.settle()
            assert world.shown == {"new/": b""}

    run(main)


def test_a_marker_follows_its_directorys_mode_back(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await world.mkdir("sub")
            world.chmod("sub", 0o700)
            await world.write("sub/file", b"file")
            await world.settle()
            assert world.metadata("sub/")["mode"] == str(0o40700)
            world.chmod("sub", 0o755)
            await world.settle()
            assert world.metadata("sub/")["mode"] == str(0o40755)

    run(main)


def test_keys_that_were_left_before_an_exchange_are_deleted(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await write(world, a__txt=b"a", b__txt=b"b")
            await world.rename("a.txt", "c.tmp")
            await world.rename("c.tmp", "b.txt", 2)
            await world.rename("c.tmp", "c.txt")
            await world.settle()
            assert world.shown == {"b.txt": b"a", "c.txt": b"b"}

    run(main)


def test_an_answer_that_comes_late_is_no_conflict(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            place.faults = [("put", Fault(Transient("no reply"), after=True))] * 3
            await world.write("a.txt", b"old")
            await trio.sleep(1.2)
            await world.write("a.new", b"new")
            await world.rename("a.new", "a.txt")
            await world.settle()
            assert world.shown == {"a.txt": b"new"}
            assert not world.queue.in_trouble()

    run(main)


def test_a_removed_link_stays_away_though_its_file_changed(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world:
            await world.write("a.bin", LARGE)
            await world.link("a.bin", "b.bin")
            place.late["complete_upload"] = trio.Event()
            await until(lambda: world.shown)
            world.unlink("a.bin")
            world.chmod("b.bin", 0o600)
            place.late.pop("complete_upload").set()
            await trio.sleep(5)
            await world.settle()
            assert world.shown == {"b.bin": LARGE}

    run(main)


def test_what_is_copied_goes_before_the_copy(place: Place) -> None:
    """The effect is looked at anew, with what is known by then, if a deletion of ours did it."""

    async def main() -> None:
        async with place.mounted() as world:
            await write(world, model=b"weights", other=b"x")
            objects, copying = world.meta.objects, world.publisher.copying
            model, other = objects.get("model"), objects.get("other")
            assert model is not None and other is not None
            with pytest.raises(NotFound), copying(model):
                raise NotFound("model")
            objects.remove("model")
            with pytest.raises(Moot), copying(model):
                raise NotFound("model")
            place.late["delete"] = trio.Event()
            world.unlink("other")
            await until(lambda: place.count("delete"))
            with pytest.raises(Moot), copying(other):
                raise NotFound("other")
            place.late.pop("delete").set()
            await world.settle()

    run(main)
