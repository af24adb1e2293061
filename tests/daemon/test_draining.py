"""The end: `unmount`, the drain at a signal, `upgrade`."""

from __future__ import annotations

import time

import trio

from cachefs.daemon.draining import Remaining, drain, remaining
from cachefs.errors import Refused, StoreUnreachable
from tests.daemon.lab import Lab, fails, in_lab, until


@in_lab()
async def test_everything_is_uploaded_at_once(lab: Lab) -> None:
    await lab.write("d/a.bin", b"x" * 100)
    await lab.write("d/latest", b"a")
    began = time.monotonic()
    assert await drain(lab.services, None) == Remaining(0, 0)
    assert time.monotonic() - began < 3
    assert lab.bucket.keys() == ["d/a.bin", "d/latest"]


@in_lab()
async def test_unmount_answers_before_it_ends_the_daemon(lab: Lab) -> None:
    await lab.write("f.bin")
    assert await lab.ask("unmount") == {"files_left": 0, "bytes_left": 0}
    assert lab.ended == []
    await until(lambda: lab.ended)
    assert lab.ended == ["unmount"]


@in_lab()
async def test_no_time_to_drain(lab: Lab) -> None:
    await lab.write("a.bin", b"x" * 100)
    await lab.write("b.bin", b"x" * 20)
    assert await lab.ask("unmount", drain_timeout=0) == {"files_left": 2, "bytes_left": 120}
    assert lab.bucket.keys() == []


@in_lab("flush.drain_timeout=300ms")
async def test_the_configured_limit(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("a.bin", b"x" * 100)
    began = time.monotonic()
    assert await lab.ask("unmount") == {"files_left": 1, "bytes_left": 100}
    assert 0.2 < time.monotonic() - began < 1.5
    assert lab.progress[0] == {"files_left": 1, "bytes_left": 100}


@in_lab()
async def test_what_is_made_meanwhile_goes_out_too(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("a.bin")
    answer = lab.asking(lambda: drain(lab.services, None))
    await until(lambda: lab.bucket.waiting)
    await lab.write("b.bin")
    lab.bucket.let_go()
    assert await answer == Remaining(0, 0)
    assert lab.bucket.keys() == ["a.bin", "b.bin"]


@in_lab()
async def test_what_cannot_go_does_not_hold_up_the_end(lab: Lab) -> None:
    """Stalled, behind a stalled one, held, and still open for writing: counted, not waited for."""
    lab.bucket.refused["stalled.bin"] = Refused("403")
    await lab.write("stalled.bin", b"x" * 10)
    await lab.write("latest", b"x")
    await lab.write("fine.bin", b"x" * 1000)
    await lab.write("held.bin.tmp", b"x" * 100)
    fh = await lab.open("open.bin")
    await lab.put(fh, b"x" * 10_000)
    began = time.monotonic()
    assert await drain(lab.services, None) == Remaining(4, 10_111)
    assert time.monotonic() - began < 3
    assert lab.bucket.keys() == ["fine.bin"]
    lab.close(fh)


@in_lab()
async def test_a_store_that_comes_back_is_waited_for(lab: Lab) -> None:
    lab.bucket.refused["f.bin"] = StoreUnreachable("no route")
    await lab.write("f.bin")
    answer = lab.asking(lambda: drain(lab.services, None))
    await trio.sleep(0.3)
    assert not answer.done
    lab.bucket.refused.clear()
    assert await answer == Remaining(0, 0)


@in_lab()
async def test_names_remain_as_well_as_bytes(lab: Lab) -> None:
    await lab.write("a.bin")
    await lab.write("b.bin")
    await lab.write("c.bin")
    await drain(lab.services, None)
    await lab.rename("a.bin", "z.bin")
    await lab.remove("b.bin")
    assert remaining(lab.services) == Remaining(3, 0)  # copy, delete; delete
    await lab.folder("plain/below")
    assert remaining(lab.services) == Remaining(4, 0)  # only the empty one needs a marker
    assert await drain(lab.services, None) == Remaining(0, 0)
    assert lab.bucket.keys() == ["c.bin", "z.bin"]


@in_lab()
async def test_one_file_counts_once(lab: Lab) -> None:
    """An old version under way, and the file open again."""
    lab.bucket.hold()
    await lab.write("f.bin", b"x" * 10)
    answer = lab.asking(lambda: lab.wait("f.bin"))
    await until(lambda: lab.bucket.waiting)
    fh = await lab.open("f.bin")
    await lab.put(fh, b"y", 10)
    assert remaining(lab.services) == Remaining(1, 21)
    lab.close(fh)
    assert remaining(lab.services) == Remaining(1, 21)
    lab.bucket.let_go()
    await answer


@in_lab()
async def test_what_has_no_name_does_not_remain(lab: Lab) -> None:
    await lab.write("f.bin")
    handle = await lab.open("f.bin", 0)
    await lab.remove("f.bin")
    fh = await lab.open("g.bin")
    await lab.remove("g.bin")
    assert remaining(lab.services) == Remaining(0, 0)
    assert await drain(lab.services, None) == Remaining(0, 0)
    lab.close(handle)
    lab.close(fh)


@in_lab()
async def test_a_drain_that_is_given_up_leaves_the_mount_as_it_was(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("f.bin")
    with trio.move_on_after(0.1):
        await lab.ask("unmount")
    assert lab.parts.queue.settles
    assert lab.ended == []


@in_lab()
async def test_upgrade(lab: Lab) -> None:
    assert await lab.ask("upgrade") == {}
    assert lab.ended == []
    await until(lambda: lab.ended)
    assert lab.ended == ["upgrade"]


@in_lab()
async def test_a_malformed_limit(lab: Lab) -> None:
    await fails(lab.ask("unmount", drain_timeout="long"), 2)
    await fails(lab.ask("unmount", drain_timeout=True), 2)
    assert lab.ended == []
