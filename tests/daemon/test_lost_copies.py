"""A cache file that is gone, and what there may be instead of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from cachefs.flush.reboot import NOT_ON_DISK, Reboots
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import NEVER_ON_DISK
from cachefs.vfs.attributes import ROOT
from tests.daemon.lab import Lab, fails, in_lab, lab
from tests.support import ramdevice


def in_ram(test: Callable[[Lab], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def main() -> None:
            async with lab(tmp_path, ram=True) as made:
                await test(made)

        with ramdevice.pretended():
            trio.run(main)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def row_of(made: Lab, name: str) -> GenerationRow:
    inode = made.services.meta.inodes.lookup(ROOT, name.encode())
    assert inode is not None
    row = made.services.meta.generations.current(inode.ino)
    assert row is not None
    return row


async def read(made: Lab, name: str) -> bytes:
    fh = await made.open(name, os.O_RDONLY)
    data = bytes(await made.services.files.read(fh, 0, 1 << 20))
    made.close(fh)
    return data


def lose_ram(made: Lab) -> None:
    shutil.rmtree(made.services.devices[0].directory)
    made.services.devices[0].look()
    assert not made.services.devices[0].healthy


async def synced(made: Lab, name: str, before: bytes, after: bytes) -> None:
    """Closed with `before` and `after`; the fsync between the two made a copy on the disk."""
    fh = await made.open(name)
    await made.put(fh, before)
    await made.services.files.fsync(fh)
    if after:
        await made.put(fh, after, len(before))
    made.close(fh)


@in_ram
async def test_the_copy_of_an_fsync_is_gone_on_with(made: Lab) -> None:
    await synced(made, "read", b"1" * 9000, b"")
    await synced(made, "sent", b"2" * 9000, b"")
    lose_ram(made)
    assert await read(made, "read") == b"1" * 9000
    assert row_of(made, "read").device == 1
    await made.wait()
    assert made.bucket.get("read") == b"1" * 9000
    assert made.bucket.get("sent") == b"2" * 9000


@in_ram
async def test_a_copy_that_is_older_is_held(made: Lab) -> None:
    """Nobody may take it for what was closed; it is neither lost nor shown."""
    for name in ("read", "sent"):
        await synced(made, name, b"1" * 9000, b"2" * 100)
    lose_ram(made)
    assert await read(made, "read") == b"1" * 9000
    assert NOT_ON_DISK in await fails(made.wait("sent", timeout=5), 5)
    assert made.bucket.keys() == []
    for name in ("read", "sent"):
        row = row_of(made, name)
        assert (row.state, row.error, row.size) == ("held", NOT_ON_DISK, 9000)


@in_lab()
async def test_what_the_power_took_is_told_by_name_and_given_up_at_will(made: Lab) -> None:
    """Two files of which nobody had synced anything: one is given up, one is written anew."""
    made.bucket.hold()
    Reboots(made.services.meta).remember()
    for name in ("given-up", "anew"):
        await made.write(name, b"1" * 9000)
        os.unlink(made.services.devices[0].path(row_of(made, name).file))
    made.bucket.let_go()
    made.parts.recovery.reboots = Reboots(made.services.meta, lambda: "the machine's next run")
    with ramdevice.pretended():
        assert made.parts.recovery.run().lost == 2
    for name in ("given-up", "anew"):
        assert NEVER_ON_DISK in await fails(made.wait(name, timeout=5), 5)
        assert NEVER_ON_DISK in await fails(made.ask("resolve", path=name, decision="keep"), 1)
    await made.ask("resolve", path="given-up", decision="discard")
    await fails(made.ask("status", path="given-up"), 1)
    await made.write("anew", b"2" * 9000)
    await made.wait()
    assert (made.bucket.keys(), made.bucket.get("anew")) == (["anew"], b"2" * 9000)


@in_ram
async def test_a_writer_whose_ram_is_lost_goes_on_on_the_disk(made: Lab) -> None:
    fh = await made.open("f")
    await made.put(fh, b"1" * 9000)
    lose_ram(made)
    await made.services.spiller.flee()
    await made.put(fh, b"2" * 100, 9000)
    await made.services.files.fsync(fh)
    made.close(fh)
    assert row_of(made, "f").device == 1
    await made.wait()
    assert made.bucket.get("f") == b"1" * 9000 + b"2" * 100


@in_ram
async def test_a_file_that_is_closed_before_it_could_move_is_sealed_when_it_has(made: Lab) -> None:
    fh = await made.open("f")
    await made.put(fh, b"1" * 9000)
    reader = await made.open("f", os.O_RDONLY)
    made.close(reader)
    lose_ram(made)
    made.close(fh)
    assert row_of(made, "f").state == "open"
    await made.services.spiller.flee()
    made.services.files.retry_seals()
    assert row_of(made, "f").state == "sealed"
    await made.wait()
    assert made.bucket.get("f") == b"1" * 9000


@in_ram
async def test_nobody_is_told_of_ram_that_went_just_now(made: Lab) -> None:
    """Before it was noticed: new files, and those that are fetched, are placed elsewhere."""
    await made.write("old", b"1" * 9000)
    await made.wait()
    assert (await made.ask("evict", paths=["old"]))["files"] == 1
    shutil.rmtree(made.services.devices[0].directory)
    await made.write("new", b"2" * 9000)
    assert await read(made, "old") == b"1" * 9000
    assert await read(made, "new") == b"2" * 9000
    assert row_of(made, "new").device == 1


@in_ram
async def test_a_reader_may_not_write_to_what_is_lost(made: Lab) -> None:
    await synced(made, "f", b"1" * 9000, b"")
    reader = await made.open("f", os.O_RDONLY)
    lose_ram(made)
    with pytest.raises(OSError, match="has failed"):
        await made.open("f", os.O_WRONLY)
    assert bytes(await made.services.files.read(reader, 0, 10)) == b"1" * 10
    made.close(reader)
    fh = await made.open("f", os.O_WRONLY)
    await made.put(fh, b"2")
    made.close(fh)
    assert await read(made, "f") == b"2" + b"1" * 8999


@in_ram
async def test_what_was_closed_first_leaves_ram_first(made: Lab) -> None:
    order: list[int] = []
    made.services.spiller.on_spilled = order.append
    handles = [await made.open(name) for name in ("a", "b", "c", "d")]
    for number, fh in enumerate(handles):
        await made.put(fh, bytes(1000 + number))
    for number in (2, 0, 3, 1):
        made.close(handles[number])
    await made.services.spiller.round()
    assert order == [1002, 1000, 1003, 1001]


@in_lab()
async def test_a_file_that_was_cut_short_is_damaged(made: Lab) -> None:
    await made.write("f", b"1" * 9000)
    row = row_of(made, "f")
    os.truncate(made.services.devices[0].path(row.file), 100)
    with pytest.raises(OSError, match="damaged"):
        await read(made, "f")
