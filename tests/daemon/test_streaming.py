"""Files larger than the cache: what comes between two steps of something that takes a while."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.errors import Refused
from cachefs.vfs import offloading
from cachefs.vfs.offloading import _Piece
from tests.daemon.lab import Lab, in_lab, until

MIB = 1 << 20
LENGTH = 8 * MIB
BODY = b"".join(bytes([n + 1]) * MIB for n in range(26))


async def begun(lab: Lab, path: str) -> int:
    """A file that is being written."""
    fh = await lab.open(path, os.O_RDWR | os.O_CREAT)
    await lab.put(fh, BODY)
    return fh


async def offload(lab: Lab, fh: int, start: int) -> None:
    """What is there is cold, and there is no room."""
    opened = lab.services.files.handle(fh).inode
    stream = lab.parts.streams.begin(opened)
    piece = _Piece(0, opened, start, start + LENGTH)
    await lab.parts.offloader._offload(piece, stream, lab.services.ledgers[0])


async def whole(lab: Lab, fh: int) -> bytes:
    size = lab.services.files.handle(fh).inode.size
    return b"".join(
        [bytes(await lab.services.files.read(fh, at, MIB)) for at in range(0, size, MIB)]
    )


@in_lab()
async def test_cut_while_a_range_leaves(lab: Lab) -> None:
    """What stays of a range that is cut in two is there still."""
    fh = await begun(lab, "f.bin")
    await offload(lab, fh, 0)
    going, may_go = threading.Event(), threading.Event()
    sync = offloading._sync

    def slow(*words: Any) -> None:
        going.set()
        assert may_go.wait(10)
        sync(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "_sync", slow)
        leaving = lab.asking(lambda: offload(lab, fh, LENGTH))
        await until(going.is_set)
        ino = lab.services.files.handle(fh).inode.ino
        cutting = lab.asking(lambda: lab.services.files.truncate(ino, LENGTH + MIB, fh))
        await trio.testing.wait_all_tasks_blocked(0.05)
        may_go.set()
        await leaving
        await cutting
    assert await whole(lab, fh) == BODY[: LENGTH + MIB]


@in_lab("flush.settle=0s")
async def test_opened_again_while_it_is_put_together(lab: Lab) -> None:
    """A writer that comes while the object is completed goes on with what the object has."""
    fh = await begun(lab, "f.bin")
    await offload(lab, fh, 0)
    lab.bucket.hold("complete_upload")
    lab.close(fh)
    await until(lambda: lab.bucket.waiting)
    opening = lab.asking(lambda: lab.open("f.bin", os.O_RDWR))
    fh = await opening
    writing = lab.asking(lambda: lab.put(fh, b"new", 9 * MIB))
    await trio.testing.wait_all_tasks_blocked(0.05)
    lab.bucket.let_go()
    await writing
    await lab.parts.hidden.sweep()
    wanted = BODY[: 9 * MIB] + b"new" + BODY[9 * MIB + 3 :]
    assert await whole(lab, fh) == wanted
    lab.close(fh)
    await lab.wait()
    assert lab.bucket.get("f.bin") == wanted


@in_lab()
async def test_what_a_dead_daemon_left_is_counted_once(lab: Lab) -> None:
    """Bytes that were on their way back when it died are given back, though somebody has the file
    open: what is used is what the cache files take."""
    fh = await begun(lab, "f.bin")
    await offload(lab, fh, 0)
    opened = lab.services.files.handle(fh).inode
    os.pwrite(opened.fd, bytes(LENGTH // 2), 0)
    lab.services.contents.account(opened)
    lab.parts.streams.recover()
    lab.services.contents.account(opened)
    assert lab.services.ledgers[0].used == opened.device.allocated_total() == len(BODY) - LENGTH
    assert await whole(lab, fh) == BODY


@in_lab("cache.size=64MiB")
async def test_room_is_waited_for_before_the_store_has_answered(lab: Lab) -> None:
    """A daemon that has just begun knows nothing of the store yet: nobody is told that there is no
    room in the cache."""
    fh = await begun(lab, "f.bin")
    await lab.put(fh, BODY, len(BODY))
    writing = lab.asking(lambda: lab.put(fh, BODY[: 16 * MIB], 2 * len(BODY)))
    await trio.sleep(1.5)
    assert not writing.done
    lab.parts.offloader.can_copy = lambda: True
    lab.nursery.start_soon(lab.parts.offloader.run)
    await writing
    assert (await whole(lab, fh))[2 * len(BODY) :] == BODY[: 16 * MIB]


async def shown_under_one_of_two(lab: Lab) -> int:
    """The inode of a file that shows as `f.bin`, and is refused as `g.bin`."""
    fh = await begun(lab, "f.bin")
    await offload(lab, fh, 0)
    ino = lab.services.files.handle(fh).inode.ino
    await lab.services.namespace.link(ino, 1, b"g.bin")
    lab.bucket.refused["g.bin"] = Refused("not there")
    lab.close(fh)
    await until(lambda: "f.bin" in lab.bucket.keys())  # noqa: SIM118
    return ino


@in_lab("flush.settle=0s")
async def test_its_last_other_name_is_gone_before_it_was_shown(lab: Lab) -> None:
    """Of two names one shows all of it: the file is had from there, and may be written to again."""
    ino = await shown_under_one_of_two(lab)
    row = lab.services.meta.generations.current(ino)
    assert row is not None
    await until(lambda: any(e.state != "pending" for e in lab.services.queue.of_gen(row.gen)))
    lab.bucket.refused.clear()
    await lab.remove("g.bin")
    await lab.wait()
    await lab.parts.hidden.sweep()
    assert lab.bucket.keys() == ["f.bin"]
    fh = await lab.open("f.bin", os.O_RDWR)
    assert await whole(lab, fh) == BODY
    await lab.put(fh, b"new", 20 * MIB)
    lab.close(fh)
    fh = await lab.open("f.bin", os.O_RDONLY)
    assert await whole(lab, fh) == BODY[: 20 * MIB] + b"new" + BODY[20 * MIB + 3 :]
    lab.close(fh)
    await lab.wait()
    assert lab.bucket.get("f.bin") == BODY[: 20 * MIB] + b"new" + BODY[20 * MIB + 3 :]


@in_lab("flush.settle=0s")
async def test_the_name_that_showed_it_is_gone_before_the_other_did(lab: Lab) -> None:
    """What the cache file lacks by then is no damage: the other name shows all of it."""
    await shown_under_one_of_two(lab)
    await lab.remove("f.bin")
    lab.bucket.refused.clear()
    await lab.wait()
    await lab.parts.hidden.sweep()
    assert lab.bucket.keys() == ["g.bin"]
    assert lab.bucket.get("g.bin") == BODY


@in_lab("flush.settle=0s")
async def test_cut_while_a_range_is_sent(lab: Lab) -> None:
    """That one stays, and others go on leaving: the store is not to blame."""
    fh = await begun(lab, "f.bin")
    lab.parts.offloader.can_copy = lambda: True
    lab.bucket.hold("put")
    leaving = lab.asking(lambda: offload(lab, fh, 2 * LENGTH))
    await until(lambda: lab.bucket.waiting)
    ino = lab.services.files.handle(fh).inode.ino
    await lab.services.files.truncate(ino, 17 * MIB, fh)
    lab.bucket.let_go()
    await leaving
    assert lab.parts.offloader.makes_room(lab.services.ledgers[0])
    assert await whole(lab, fh) == BODY[: 17 * MIB]


@in_lab()
async def test_a_range_that_the_store_lost(lab: Lab) -> None:
    """Whoever needs bytes that are nowhere any more is told so: reading, writing, cutting."""
    fh = await begun(lab, "f.bin")
    await offload(lab, fh, 0)
    hidden = [span.key for span in lab.services.meta.spans.of_files()]
    assert await lab.bucket.call("delete", keys=hidden) == {}
    files, ino = lab.services.files, lab.services.files.handle(fh).inode.ino
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: files.read(fh, 0, MIB),
        lambda: files.write(fh, MIB, b"new"),
        lambda: files.truncate(ino, 2 * MIB, fh),
    ]
    for call in calls:
        with pytest.raises(OSError) as caught:
            await call()
        assert caught.value.errno == errno.EIO
    assert await files.read(fh, LENGTH, MIB) == BODY[LENGTH : LENGTH + MIB]
