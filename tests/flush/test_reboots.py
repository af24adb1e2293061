"""What the next daemon trusts of a cache after the machine went down."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import sleep
from unittest.mock import patch

import pytest
import trio

from cachefs.cache.system import has_fine_times
from cachefs.flush.recovery import Recovery
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import DAMAGED, NEVER_ON_DISK
from tests.flush.conftest import Place
from tests.flush.memory import Killed
from tests.flush.world import Device, World, run


async def until_death(
    place: Place, act: Callable[[World], Awaitable[None]], latency: float = 3600.0
) -> None:
    """A daemon that ends without saying so; with its latency nothing gets to the store."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with place.mounted(latency) as world:
            await act(world)
            world.kill()
    assert caught.value.subgroup(Killed) is not None


async def end_at_once(place: Place, boot: str) -> None:
    """A daemon that ends as soon as it has noted what run of the machine this is."""
    with (
        patch.object(Recovery, "_drop_snapshots", side_effect=Killed),
        pytest.raises(BaseExceptionGroup) as caught,
    ):
        async with place.mounted(boot=boot):
            raise AssertionError("it is up")
    assert caught.value.subgroup(Killed) is not None


async def write_unsynced(world: World) -> None:
    await world.write("a.bin", b"content")


async def write_synced(world: World) -> None:
    await world.write("a.bin", b"content")
    row = generation(world, "a.bin")
    world.meta.generations.set_synced(row.gen, row.sealed_ns)


async def write_durably(world: World) -> None:
    await world.write("a.bin", b"content")
    await world.settle()


def generation(world: World, path: str) -> GenerationRow:
    row = world.meta.inodes.get(world.ino(path))
    gen = world.meta.generations.get(row.gen or 0) if row is not None else None
    assert gen is not None
    return gen


def test_what_was_not_synced_is_held_after_a_reboot(place: Place) -> None:
    async def main() -> None:
        await until_death(place, write_unsynced)
        async with place.mounted(boot="boot 2") as world:
            await trio.sleep(60)
            world.recovery.settle_held()
            await trio.sleep(60)
            assert world.shown == {}
            assert world.state_of("a.bin") == "held"
            assert "machine went down" in (generation(world, "a.bin").error or "")
        async with place.mounted(boot="boot 2") as world:
            await trio.sleep(60)
            assert world.shown == {}
            await world.edit("a.bin", 0, b"C")
            await world.settle()
            assert world.shown == {"a.bin": b"Content"}

    run(main)


async def write_and_leave_open(world: World) -> None:
    await world.create("a.bin", b"content")


def lose_files(place: Place) -> None:
    """As a power cut does that came before the directory was on the disk, and after the row was."""
    for file in (place.directory / "files").iterdir():
        file.unlink()


@pytest.mark.parametrize("act", [write_unsynced, write_and_leave_open])
def test_of_what_was_never_synced_a_reboot_may_leave_the_name_alone(
    place: Place, act: Callable[[World], Awaitable[None]]
) -> None:
    """It is told to be lost, by its name, at each start, and is no damage; the name is free to be
    written to."""

    async def main() -> None:
        await until_death(place, act)
        lose_files(place)
        for _ in range(2):
            async with place.mounted(boot="boot 2") as world:
                await trio.sleep(60)
                world.recovery.settle_held()
                assert world.state_of("a.bin") == "held"
                assert generation(world, "a.bin").error == NEVER_ON_DISK
                found = world.recover()
                assert (found.missing, found.lost, world.shown) == (0, 1, {})
                with pytest.raises(OSError, match="damaged"):
                    await world.read("a.bin")
        async with place.mounted(boot="boot 2") as world:
            await world.write("a.bin", b"again")
            await world.settle()
            assert world.shown == {"a.bin": b"again"}
            assert world.recover().lost == 0

    run(main)


def test_what_a_daemon_learns_of_a_reboot_the_next_one_knows(place: Place) -> None:
    async def main() -> None:
        await until_death(place, write_and_leave_open)
        lose_files(place)
        await end_at_once(place, "boot 2")
        async with place.mounted(boot="boot 2") as world:
            found = world.recover()
            assert (found.missing, found.lost) == (0, 1)

    run(main)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_open_is_held_though_the_first_daemon_ends_at_once(
    place: Place, again: bool
) -> None:
    """Of one that looks as if it had been closed. `again`: it was held before already."""

    async def main() -> None:
        await until_death(place, write_and_leave_open)
        if again:
            async with place.mounted() as world:
                assert world.state_of("a.bin") == "held"
        await end_at_once(place, "boot 2")
        with patch.object(Device, "was_closed", return_value=True):
            async with place.mounted(boot="boot 2") as world:
                world.recovery.settle_held()
                await trio.sleep(60)
                assert (world.state_of("a.bin"), world.shown) == ("held", {})

    run(main)


async def synced_and_left_open(world: World) -> None:
    fh = await world.create("a.bin", b"content")
    await world.files.fsync(fh)
    await world.files.write(fh, 7, b", and more")


async def synced_by_the_daemon_and_reopened(world: World) -> None:
    await write_synced(world)
    world.rewriter._preserve_limit = 0
    await world.edit("a.bin", 0, b"C")


async def synced_by_the_daemon_and_copied(world: World) -> None:
    await write_synced(world)
    await world.edit("a.bin", 0, b"C")


async def durable_and_edited(world: World) -> None:
    await write_durably(world)
    await world.edit("a.bin", 0, b"C")


@pytest.mark.parametrize(
    ("act", "boot"),
    [
        (synced_and_left_open, "boot 2"),
        (synced_by_the_daemon_and_reopened, "boot 2"),
        (synced_by_the_daemon_and_copied, "boot 2"),
        (durable_and_edited, "boot 2"),
        (write_synced, "boot 2"),
        (write_unsynced, "boot 1"),
    ],
)
def test_a_file_that_must_be_there_and_is_not_is_damage(
    place: Place, act: Callable[[World], Awaitable[None]], boot: str
) -> None:
    async def main() -> None:
        await until_death(place, act, latency=0.05 if act is durable_and_edited else 3600.0)
        lose_files(place)
        async with place.mounted(boot=boot) as world:
            assert (generation(world, "a.bin").error or "").startswith(DAMAGED)
            found = world.recover()
            assert found.missing and not found.lost

    run(main)


def test_what_was_synced_goes_out_after_a_reboot(place: Place) -> None:
    async def main() -> None:
        await until_death(place, write_synced)
        async with place.mounted(boot="boot 2") as world:
            await world.settle()
            assert world.shown == {"a.bin": b"content"}

    run(main)


def test_a_daemon_that_dies_alone_takes_nothing_with_it(place: Place) -> None:
    async def main() -> None:
        await until_death(place, write_unsynced)
        async with place.mounted() as world:
            await world.settle()
            assert world.shown == {"a.bin": b"content"}

    run(main)


def test_a_reboot_after_an_orderly_end_changes_nothing(place: Place) -> None:
    async def main() -> None:
        async with place.mounted(latency=3600.0) as world:
            await write_unsynced(world)
            world.recovery.reboots.all_is_on_disk()
        async with place.mounted(boot="boot 2") as world:
            await world.settle()
            assert world.shown == {"a.bin": b"content"}

    run(main)


def test_an_unsynced_copy_of_what_the_store_has_is_read_again(place: Place) -> None:
    async def main() -> None:
        await until_death(place, write_durably, latency=0.05)
        for file in (place.directory / "files").iterdir():
            file.write_bytes(bytes(7))  # What a power cut may leave.
        async with place.mounted(boot="boot 2") as world:
            assert await world.read("a.bin") == b"content"

    run(main)


async def write_and_sync(world: World, after: bytes = b"") -> None:
    """As programs do that want no loss; `after`: what is written behind the sync."""
    fh = await world.create("a.bin", b"content")
    tick()
    await world.files.fsync(fh)
    tick()
    if after:
        await world.files.write(fh, 0, after)
    world.files.release(fh)


def tick() -> None:
    """Until times of files that are changed now differ from those before."""
    sleep(0.03)


def test_what_its_program_synced_goes_out_after_a_reboot(place: Place) -> None:
    async def main() -> None:
        await until_death(place, write_and_sync)
        async with place.mounted(boot="boot 2") as world:
            await world.settle()
            assert world.shown == {"a.bin": b"content"}

    run(main)


@pytest.mark.parametrize("change", ["write", "fail", "utimens", "truncate"])
def test_what_was_written_after_the_sync_is_held_after_a_reboot(place: Place, change: str) -> None:
    async def act(world: World) -> None:
        if change == "write":
            await write_and_sync(world, b"C")
            return
        fh = await world.create("a.bin", b"content")
        tick()
        opened = world.files.handle(fh).inode
        before = os.fstat(opened.fd).st_mtime_ns
        if change == "fail":
            with patch("os.fsync", side_effect=OSError), pytest.raises(OSError):
                await world.files.fsync(fh)
        else:
            await world.files.fsync(fh)
            tick()
            if change == "truncate":
                await world.files.truncate(opened.ino, 3, fh)
            else:
                await world.files.write(fh, 0, b"C")
                await world.files.set_mtime(opened.ino, before, before)
        world.files.release(fh)

    async def main() -> None:
        await until_death(place, act)
        async with place.mounted(boot="boot 2") as world:
            await trio.sleep(60)
            assert world.shown == {}
            assert world.state_of("a.bin") == "held"

    run(main)


def test_a_version_that_is_written_on_is_no_longer_on_the_disk(place: Place) -> None:
    """Beyond the preserve limit the sealed version itself is written to."""

    async def act(world: World) -> None:
        await write_and_sync(world)
        world.rewriter._preserve_limit = 0
        await world.edit("a.bin", 0, b"C")

    async def main() -> None:
        await until_death(place, act)
        async with place.mounted(boot="boot 2") as world:
            await trio.sleep(60)
            assert world.shown == {}
            assert world.state_of("a.bin") == "held"

    run(main)


def test_times_that_are_said_to_be_fine_are(tmp_path: Path) -> None:
    """So that no write after a sync goes unnoticed."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    times = []
    for _ in range(200):
        os.pwrite(fd, b"x", 0)
        times.append(os.fstat(fd).st_mtime_ns)
    os.close(fd)
    assert len(set(times)) == 200 or not has_fine_times(str(tmp_path))
