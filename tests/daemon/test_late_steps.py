"""Steps that end after whoever they were for has closed the file."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.cache.bring import bring
from cachefs.cache.filler import CHUNK as PIECE
from cachefs.vfs import spilling, syncing
from tests.daemon.lab import CHUNK, Lab, in_lab, until

BODY = b"".join(bytes([n + 1]) * CHUNK for n in range(6))


@in_lab()
async def test_late_fetch(lab: Lab) -> None:
    """What was fetched ahead of a reader, and comes when that is gone, is not written over what
    was written to the file since."""
    await lab.store_only("f.bin", BODY)
    late = trio.Event()
    held: list[int] = []

    async def slow(key: str, path: str, start: int, end: int, etag: str | None) -> bool:
        if start <= CHUNK < end and not held:
            held.append(start)
            await late.wait()
        return False

    lab.bucket.read_warm = slow
    fh = await lab.open("f.bin", os.O_RDONLY)
    await lab.services.files.read(fh, 0, 100)
    await until(lambda: held)
    lab.close(fh)
    fh = await lab.open("f.bin", os.O_RDWR)
    writing = lab.asking(lambda: lab.put(fh, b"new", CHUNK))
    await trio.testing.wait_all_tasks_blocked(0.1)
    late.set()
    await writing
    await trio.testing.wait_all_tasks_blocked(0.1)
    assert bytes(await lab.services.files.read(fh, CHUNK, 3)) == b"new"
    lab.close(fh)
    await lab.wait()
    assert lab.bucket.get("f.bin") == BODY[:CHUNK] + b"new" + BODY[CHUNK + 3 :]


@in_lab()
async def test_late_hole(lab: Lab) -> None:
    """A range of a file is to leave the cache that is closed meanwhile, opened and read again: it
    stays there."""
    body = b"".join(bytes([n + 1]) * PIECE for n in range(3))
    await lab.store_only("f.bin", body)
    fh = await lab.open("f.bin", os.O_RDONLY)
    for start in (0, PIECE):
        await lab.services.files.read(fh, start, PIECE)
    trimmer = lab.services.eviction._trimmer
    assert trimmer is not None
    sync, began, may_go = trimmer._sync_meta, trio.Event(), trio.Event()

    async def slow() -> None:
        began.set()
        await may_go.wait()
        await sync()

    trimmer._sync_meta = slow
    trimmer.is_waited_for = lambda device: True
    trimming = lab.asking(lambda: trimmer.trim_open(0, PIECE, lambda ino: False))
    await began.wait()
    lab.close(fh)
    fh = await lab.open("f.bin", os.O_RDONLY)
    assert await lab.services.files.read(fh, 0, PIECE) == body[:PIECE]
    may_go.set()
    assert await trimming == 0
    assert await lab.services.files.read(fh, 0, PIECE) == body[:PIECE]
    lab.close(fh)
    device = lab.services.devices[0]
    assert lab.services.ledgers[0].used == device.allocated_total()


@in_lab(flusher=False, more=1)
async def test_late_move(lab: Lab) -> None:
    """A file that is closed while it is copied to another device stays where it is, and no other
    file gets its descriptor."""
    fh = await lab.open("f.bin", os.O_RDWR | os.O_CREAT)
    await lab.put(fh, BODY)
    opened = lab.services.files.handle(fh).inode
    source, other = opened.device, lab.services.devices[1 - opened.device.index]
    lab.parts.spiller.roomier = lambda opened: other  # type: ignore[method-assign]
    going, may_go = threading.Event(), threading.Event()

    def slow(*words: Any) -> Any:
        going.set()
        assert may_go.wait(10)
        return bring(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spilling, "bring", slow)
        moving = lab.asking(lambda: lab.parts.spiller.move_on(opened))
        await until(going.is_set)
        lab.close(fh)
        number = opened.fd
        await until(lambda: not os.path.exists(f"/proc/self/fd/{number}"))
        mine = os.open("/dev/null", os.O_RDONLY)
        if mine != number:
            os.dup2(mine, number)
            os.close(mine)
        may_go.set()
        moved = await moving
    assert os.readlink(f"/proc/self/fd/{number}") == "/dev/null"
    os.close(number)
    assert not moved
    row = lab.services.meta.generations.current(opened.ino)
    assert row is not None
    assert (row.device, row.copy_file) == (source.index, None)
    fh = await lab.open("f.bin", os.O_RDONLY)
    assert bytes(await lab.services.files.read(fh, 0, len(BODY))) == BODY
    lab.close(fh)
    await lab.parts.leaving.sweep(other)
    assert not list(other.list_generations())


@in_lab(flusher=False, more=1)
async def test_late_sync(lab: Lab) -> None:
    """A file that moves to another device while it is synced is on the disk there."""
    fh = await lab.open("f.bin", os.O_RDWR | os.O_CREAT)
    await lab.put(fh, BODY)
    opened = lab.services.files.handle(fh).inode
    other = lab.services.devices[1 - opened.device.index]
    lab.parts.spiller.roomier = lambda opened: other  # type: ignore[method-assign]
    going, may_go, sync = threading.Event(), threading.Event(), syncing._sync_bytes

    def slow(*words: Any) -> Any:
        going.set()
        assert may_go.wait(10)
        return sync(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(syncing, "_sync_bytes", slow)
        asked = lab.asking(lambda: lab.services.files.fsync(fh))
        await until(going.is_set)
        assert await lab.parts.spiller.move_on(opened)
        may_go.set()
        await asked
    assert opened.device is other
    lab.close(fh)


@in_lab(flusher=False, more=1)
async def test_late_shortage(lab: Lab) -> None:
    """There are no descriptors left when a file has moved: it is written to where it is now."""
    fh = await lab.open("f.bin", os.O_RDWR | os.O_CREAT)
    await lab.put(fh, BODY)
    opened = lab.services.files.handle(fh).inode
    other = lab.services.devices[1 - opened.device.index]
    lab.parts.spiller.roomier = lambda opened: other  # type: ignore[method-assign]

    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        await lab.parts.spiller.move_on(opened)
    await lab.put(fh, b"new")
    lab.close(fh)
    row = lab.services.meta.generations.current(opened.ino)
    assert row is not None
    with open(lab.services.contents.device(row).path(row.file), "rb") as file:
        assert file.read() == b"new" + BODY[3:]


@in_lab("flush.open_file_interval=1h", flusher=False)
async def test_late_room(lab: Lab) -> None:
    """While a write waits for room its file is uploaded as far as it has grown: not while it
    changes."""
    fh = await lab.open("logs/a.log", os.O_RDWR | os.O_CREAT)
    await lab.put(fh, BODY)
    opened, files = lab.services.files.handle(fh).inode, lab.services.files
    assert opened.snapshot is None
    admit = files._room_for
    taken: list[bool] = []

    async def slow(*words: Any) -> Any:
        if not taken:
            taken.append(lab.parts.snapshots.take(opened))
        return await admit(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_room_for", slow)
        await lab.put(fh, b"new")
    assert taken == [True]
    assert opened.snapshot is None
    assert lab.services.ledgers[0].promised == 0
    lab.close(fh)


@in_lab("cache.preserve_limit=0", flusher=False)
async def test_late_note(lab: Lab) -> None:
    """A closed file is written to again while it is synced: what was written then is not on the
    disk."""
    body = bytes(2 << 20)
    await lab.write("f.bin", body)
    fh = await lab.open("f.bin", os.O_RDONLY)
    going, may_go, sync = threading.Event(), threading.Event(), syncing._sync_bytes

    def slow(*words: Any) -> Any:
        status = sync(*words)
        going.set()
        assert may_go.wait(10)
        return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(syncing, "_sync_bytes", slow)
        asked = lab.asking(lambda: lab.services.files.fsync(fh))
        await until(going.is_set)
        writer = await lab.open("f.bin", os.O_RDWR)
        await lab.put(writer, b"new")
        may_go.set()
        await asked
    row = lab.services.meta.generations.current(lab.services.files.handle(fh).inode.ino)
    assert row is not None
    assert not row.synced
    lab.close(writer)
    lab.close(fh)


@in_lab(flusher=False)
async def test_fetches_ahead_end(lab: Lab) -> None:
    """When the database fails what is fetched ahead, files are opened as if nothing were, until
    that is begun anew."""
    prefetcher, ended = lab.parts.prefetcher, trio.Event()
    fh = await lab.open("f.bin")
    ino = lab.services.files.handle(fh).inode.ino
    lab.close(fh)

    def refuse(*words: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async def run() -> None:
        with pytest.raises(BaseExceptionGroup):
            await prefetcher.run()
        ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetcher, "_wanted", refuse)
        lab.nursery.start_soon(run)
        await until(lambda: prefetcher._nursery is not None)
        prefetcher._order(1)
        await ended.wait()
    assert prefetcher._start(ino) is None
    assert not prefetcher._coming
