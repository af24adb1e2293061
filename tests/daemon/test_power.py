"""What is on the disk before what: a power cut takes the database back in time, not the rest."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.model.survival import Level
from tests.daemon.lab import Lab, in_lab


def cache_files(lab: Lab) -> set[int]:
    return set(lab.services.devices[0].list_generations())


def on_a_disk(lab: Lab) -> None:
    """Whatever the tests' own directory is on."""
    for device in lab.services.devices:
        device._survives = Level.REBOOT
    lab.parts.leaving._lasting = lab.parts.sync_meta._lasting = True


@in_lab(flusher=False)
async def test_a_replaced_version_stays_until_the_rename_is_on_the_disk(lab: Lab) -> None:
    on_a_disk(lab)
    await lab.write("a", b"old")
    await lab.write("b", b"new")
    before = cache_files(lab)
    await lab.rename("b", "a")
    await lab.write("gone", b"")
    await lab.remove("gone")
    assert before <= cache_files(lab)

    def broken() -> None:
        raise OSError(errno.EIO, "broken")

    lab.services.meta.db.sync = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="broken"):
        await lab.parts.leaving.sweep(lab.parts.contents.devices[0])
    assert before <= cache_files(lab)
    lab.services.meta.db.sync = lambda: None  # type: ignore[method-assign]
    await lab.parts.leaving.sweep(lab.parts.contents.devices[0])
    assert len(before & cache_files(lab)) == 1
    assert len(cache_files(lab)) == 1


@in_lab("flush.settle=0s")
async def test_the_store_is_never_ahead_of_the_database(lab: Lab) -> None:
    """Before each request that changes it, every commit so far is on the disk."""
    on_a_disk(lab)
    db, call = lab.services.meta.db, lab.bucket.call
    unsynced, asked, real_sync = [False], [], db.sync

    def sync() -> None:
        unsynced[0] = False
        real_sync()

    async def carried_out(method: str, /, **arguments: Any) -> Any:
        if method in ("put", "copy", "delete"):
            asked.append((method, unsynced[0]))
        return await call(method, **arguments)

    db.sync = sync  # type: ignore[method-assign]
    db.on_committed = lambda seconds: unsynced.__setitem__(0, True)
    lab.bucket.call = carried_out  # type: ignore[method-assign]
    await lab.write("a", b"a")
    await lab.wait()
    await lab.rename("a", "b")
    await lab.wait()
    await lab.remove("b")
    await lab.wait()
    assert {method for method, _ in asked} == {"put", "copy", "delete"}
    assert not [each for each in asked if each[1]]


@in_lab(flusher=False)
async def test_concurrent_syncs_share_one(lab: Lab) -> None:
    """Group commit: one sync is under way, the next one serves all that came meanwhile."""
    on_a_disk(lab)
    calls = []
    lab.services.meta.db.sync = lambda: calls.append(1)  # type: ignore[method-assign]
    handles = [await lab.open(f"f{number}") for number in range(50)]
    for fh in handles:
        await lab.put(fh, b"x")
    async with trio.open_nursery() as nursery:
        for fh in handles:
            nursery.start_soon(lab.services.files.fsync, fh)
    assert 1 <= len(calls) < 25


def test_memory_is_not_synced(tmp_path: Path) -> None:
    """A database in memory gains nothing by it."""

    async def main() -> None:
        from cachefs.daemon.tasks import MetaSync

        class Broken:
            def __getattr__(self, name: str) -> Any:
                raise AssertionError("it was synced")

        await MetaSync(Broken(), lasting=False)()  # type: ignore[arg-type]

    trio.run(main)


@in_lab(flusher=False)
async def test_fsync_covers_file_directory_and_database(lab: Lab) -> None:
    """In this order, for else a row could outlive its bytes."""
    on_a_disk(lab)
    fh = await lab.open("f")
    await lab.put(fh, b"x")
    opened = lab.services.files.handle(fh).inode
    path = Path(opened.device.path(opened.gen.file))
    wanted = [path, path.parent, path.parent.parent]
    names = {os.stat(each).st_ino: each for each in wanted}
    synced: list[Path | str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(names[os.fstat(fd).st_ino])
        real(fd)

    lab.services.meta.db.sync = lambda: synced.append("database")  # type: ignore[method-assign]
    os.fsync = fsync  # type: ignore[assignment]
    try:
        await lab.services.files.fsync(fh)
    finally:
        os.fsync = real
    assert synced == [*wanted, "database"]
