"""`wait` and `flush`: what they cover, when they end, and how."""

from __future__ import annotations

import os
import time

import trio

from cachefs.errors import Refused
from cachefs.meta.rows import GenerationRow
from cachefs.vfs.attributes import ROOT
from tests.daemon.lab import Lab, fails, in_lab, until

# ---- what is reached ------------------------------------------------------------------------


@in_lab()
async def test_everything_closed_before_the_call(lab: Lab) -> None:
    """Whole trees, without the settle delay of nine seconds."""
    await lab.write("d/a.bin", b"a" * 1000)
    await lab.write("d/e/b.json", b"bb")
    await lab.write("c", b"ccc")
    began = time.monotonic()
    told = await lab.wait()
    assert time.monotonic() - began < 3
    assert lab.bucket.keys() == ["c", "d/a.bin", "d/e/b.json"]
    assert told["paths"] == ["/mnt/ckpt"]
    assert (told["files"], told["bytes"]) == (3, 1005)
    assert 0 < told["seconds"] < 3


@in_lab()
async def test_nothing_to_wait_for(lab: Lab) -> None:
    told = await lab.wait(timeout=0)
    assert (told["files"], told["bytes"]) == (0, 0)
    await lab.write("f")
    await lab.wait("f")
    assert (await lab.wait("f", timeout=0))["files"] == 0


@in_lab()
async def test_only_what_was_asked_for(lab: Lab) -> None:
    """What came later is left to its settle delay."""
    await lab.write("d/a.bin")
    await lab.write("d/b.bin")
    await lab.write("other.bin")
    await lab.wait("d")
    assert lab.bucket.keys() == ["d/a.bin", "d/b.bin"]
    assert (await lab.ask("status", path="other.bin"))["state"] == "dirty"


@in_lab()
async def test_a_name_that_only_begins_alike_is_another(lab: Lab) -> None:
    await lab.write("step_1/f.bin")
    await lab.write("step_10/f.bin")
    await lab.wait("step_1")
    assert lab.bucket.keys() == ["step_1/f.bin"]


@in_lab()
async def test_a_marker_hurries_what_it_waits_for(lab: Lab) -> None:
    await lab.write("run/shard.bin", b"x" * 5000)
    await lab.write("latest", b"run")
    await lab.wait("latest")
    assert lab.bucket.written == ["run/shard.bin", "latest"]


@in_lab()
async def test_several_paths(lab: Lab) -> None:
    for name in ("a.bin", "b.bin", "c.bin"):
        await lab.write(name)
    told = await lab.wait("a.bin", "b.bin")
    assert told["paths"] == ["/mnt/ckpt/a.bin", "/mnt/ckpt/b.bin"]
    assert told["files"] == 2
    assert lab.bucket.keys() == ["a.bin", "b.bin"]


@in_lab()
async def test_flush_is_a_wait(lab: Lab) -> None:
    await lab.write("f.bin", b"12345")
    told = await lab.ask("flush", paths=["f.bin"])
    assert (told["files"], told["bytes"]) == (1, 5)
    assert lab.bucket.get("f.bin") == b"12345"
    await fails(lab.ask("flush", paths=["missing"]), 1)


@in_lab()
async def test_an_empty_directory(lab: Lab) -> None:
    await lab.folder("empty")
    told = await lab.wait("empty")
    assert told["files"] == 0
    assert "empty/" in lab.bucket.written


@in_lab()
async def test_progress(lab: Lab) -> None:
    lab.bucket.hold()
    for number in range(4):
        await lab.write(f"f{number}.bin", b"x" * 100)
    answer = lab.asking(lab.wait)
    await trio.sleep(0.5)
    lab.bucket.let_go()
    await answer
    assert len(lab.progress) in (2, 3, 4)
    whole = {"files_total": 4, "files_left": 4, "bytes_total": 400, "bytes_left": 400}
    assert lab.progress[0] == lab.progress[1] == whole


@in_lab()
async def test_progress_of_one_large_file(lab: Lab) -> None:
    """Parts that the store has count, long before the whole is there."""
    lab.bucket.hold("upload_part", after=1)
    await lab.write("big.bin", bytes(40 << 20))
    answer = lab.asking(lab.wait)
    await until(lambda: lab.bucket.waiting)
    await trio.sleep(0.3)
    lab.bucket.let_go()
    await answer
    assert lab.progress[-1]["bytes_total"] == 40 << 20
    assert any(0 < told["bytes_left"] < 40 << 20 for told in lab.progress)


# ---- deletions and renames ------------------------------------------------------------------


@in_lab()
async def test_deletions_below_are_waited_for(lab: Lab) -> None:
    await lab.write("d/a.bin")
    await lab.write("d/b.bin")
    await lab.wait()
    await lab.remove("d/a.bin")
    told = await lab.wait("d")
    assert lab.bucket.keys() == ["d/b.bin"]
    assert told["files"] == 1


@in_lab()
async def test_deletions_elsewhere_are_not(lab: Lab) -> None:
    await lab.write("d/a.bin")
    await lab.write("e/b.bin")
    await lab.wait()
    await lab.remove("e/b.bin")
    await lab.wait("d")
    assert lab.bucket.keys() == ["d/a.bin", "e/b.bin"]


@in_lab()
async def test_a_rename_of_what_is_published(lab: Lab) -> None:
    """The new keys are there and the old ones gone, though those lie elsewhere."""
    await lab.write("old/a.bin", b"aaa")
    await lab.write("old/b.bin", b"bbb")
    await lab.wait()
    await lab.rename("old", "new")
    await lab.wait("new")
    assert lab.bucket.keys() == ["new/a.bin", "new/b.bin"]


@in_lab()
async def test_a_removed_file_whose_upload_is_under_way(lab: Lab) -> None:
    """The bucket shows it for a moment; a wait for the tree outlasts that."""
    await lab.write("d/keep.bin")
    await lab.write("d/f.bin")
    lab.bucket.hold()
    first = lab.asking(lambda: lab.wait("d/f.bin"))
    await until(lambda: lab.bucket.waiting)
    await lab.remove("d/f.bin")
    second = lab.asking(lambda: lab.wait("d"))
    await trio.sleep(0.05)
    lab.bucket.let_go()
    await second
    assert lab.bucket.keys() == ["d/keep.bin"]
    assert "removed before it was safe" in await fails(first, 6) or first.done


@in_lab()
async def test_renamed_while_it_is_waited_for(lab: Lab) -> None:
    await lab.write("f.json", b"content")
    lab.bucket.hold()
    answer = lab.asking(lambda: lab.wait("f.json"))
    await trio.sleep(0.05)
    await lab.rename("f.json", "g.json")
    lab.bucket.let_go()
    await answer
    await lab.wait()
    assert lab.bucket.keys() == ["g.json"]


@in_lab()
async def test_replaced_by_a_rename_while_it_is_waited_for(lab: Lab) -> None:
    """The name is what was asked for: its new content stands for the old."""
    await lab.write("x.tmp", b"new")
    lab.bucket.hold()
    await lab.write("f.json", b"old")
    await lab.write("shard.bin")
    answer = lab.asking(lambda: lab.wait("f.json"))
    await trio.sleep(0.05)
    await lab.rename("x.tmp", "f.json")
    lab.bucket.let_go()
    await answer
    assert lab.bucket.get("f.json") in (b"old", b"new")
    await lab.wait()
    assert lab.bucket.get("f.json") == b"new"


# ---- rewrites -------------------------------------------------------------------------------


@in_lab()
async def test_a_rewrite_stands_for_what_it_supersedes(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("f.json", b"one")
    other = lab.asking(lambda: lab.wait("f.json"))
    await until(lambda: lab.bucket.waiting)
    await lab.write("g.json", b"one")
    answer = lab.asking(lambda: lab.wait("g.json"))
    await trio.sleep(0.02)
    await lab.write("g.json", b"two")
    lab.bucket.let_go()
    await answer
    await other
    assert lab.bucket.get("g.json") in (b"one", b"two")


@in_lab()
async def test_endless_rewriting_does_not_keep_a_waiter(lab: Lab) -> None:
    stop = trio.Event()

    async def rewrite() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await lab.write("d/f.json", b"%d" % number)
            await trio.sleep(0.002)

    await lab.write("d/f.json", b"first")
    lab.nursery.start_soon(rewrite)
    for path in ("d/f.json", "d", ""):
        with trio.fail_after(5):
            await lab.wait(path)
    stop.set()


@in_lab()
async def test_endless_making_and_deleting_does_not_keep_a_waiter(lab: Lab) -> None:
    stop = trio.Event()

    async def churn() -> None:
        while not stop.is_set():
            await lab.write("d/lock")
            await trio.sleep(0.005)
            await lab.remove("d/lock")
            await trio.sleep(0.005)

    await lab.write("d/f.bin")
    lab.nursery.start_soon(churn)
    for _ in range(5):
        await trio.sleep(0.003)
        with trio.fail_after(5):
            await lab.wait("d")
    stop.set()


# ---- open files -----------------------------------------------------------------------------


@in_lab()
async def test_an_open_file_is_waited_for(lab: Lab) -> None:
    fh = await lab.open("d/f.bin")
    await lab.put(fh, b"first")
    answers = [lab.asking(lambda path=path: lab.wait(path)) for path in ("d/f.bin", "d")]  # type: ignore[misc]
    await trio.sleep(0.5)
    assert not any(each.done for each in answers)
    await lab.put(fh, b" second", 5)
    lab.close(fh)
    for each in answers:
        await each
    assert lab.bucket.get("d/f.bin") == b"first second"
    assert lab.progress[0]["files_left"] == 1


@in_lab()
async def test_opened_for_writing_but_not_written(lab: Lab) -> None:
    await lab.write("f.bin")
    await lab.wait()
    fh = await lab.open("f.bin", os.O_RDWR)
    answer = lab.asking(lambda: lab.wait("f.bin"))
    await trio.sleep(0.3)
    assert not answer.done
    lab.close(fh)
    await answer


@in_lab()
async def test_opened_for_reading(lab: Lab) -> None:
    await lab.write("f.bin")
    fh = await lab.open("f.bin", os.O_RDONLY)
    await lab.wait("f.bin")
    lab.close(fh)


@in_lab()
async def test_opened_again_and_again(lab: Lab) -> None:
    """What was open at the call is waited for, not whoever opens the file next."""
    fh = await lab.open("f.json")
    await lab.put(fh, b"one")
    answer = lab.asking(lambda: lab.wait("f.json"))
    await trio.sleep(0.05)
    lab.close(fh)
    again = await lab.open("f.json", os.O_WRONLY | os.O_TRUNC)
    await lab.put(again, b"two")
    await answer
    assert lab.bucket.get("f.json") == b"one"
    lab.close(again)


@in_lab()
async def test_an_open_file_that_is_deleted(lab: Lab) -> None:
    await lab.write("d/a.bin")
    fh = await lab.open("d/f.bin")
    await lab.put(fh, b"x")
    named = lab.asking(lambda: lab.wait("d/f.bin"))
    tree = lab.asking(lambda: lab.wait("d"))
    await trio.sleep(0.05)
    await lab.remove("d/f.bin")
    await tree
    assert "/mnt/ckpt/d/f.bin: removed before it was safe" in await fails(named, 6)
    lab.close(fh)
    assert lab.bucket.keys() == ["d/a.bin"]


@in_lab()
async def test_a_large_dirty_file_that_is_rewritten(lab: Lab) -> None:
    """Its upload is given up for the next version; that is no stall."""
    lab.services.files._rewriter._preserve_limit = 10
    await lab.write("f.bin", b"x" * 100)
    fh = await lab.open("f.bin", os.O_RDWR)
    await lab.put(fh, b"new")
    answer = lab.asking(lambda: lab.wait("f.bin"))
    await trio.sleep(0.3)
    assert not answer.done
    lab.close(fh)
    await answer
    assert lab.bucket.get("f.bin") == b"new" + b"x" * 97


# ---- what cannot be reached -----------------------------------------------------------------


@in_lab()
async def test_missing(lab: Lab) -> None:
    await lab.write("f")
    assert "/mnt/ckpt/missing" in await fails(lab.wait("missing"), 1)
    await fails(lab.wait("missing/below"), 1)
    assert "Not a directory" in await fails(lab.wait("f/below"), 1)


@in_lab()
async def test_malformed(lab: Lab) -> None:
    await fails(lab.handlers["wait"]({"paths": ["/elsewhere"]}, _mute), 2)
    await fails(lab.handlers["wait"]({"paths": ["/mnt/ckpt2/f"]}, _mute), 2)
    await fails(lab.handlers["wait"]({"paths": []}, _mute), 2)
    await fails(lab.handlers["wait"]({}, _mute), 2)
    await fails(lab.handlers["wait"]({"paths": [7]}, _mute), 2)
    await fails(lab.wait(survives="forever"), 2)
    await fails(lab.wait(timeout="soon"), 2)
    await fails(lab.wait(timeout=-1), 2)


@in_lab()
async def test_time_is_up(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("f.bin", b"12345")
    began = time.monotonic()
    message = await fails(lab.wait("f.bin", timeout=0.3), 4)
    assert 0.2 < time.monotonic() - began < 1
    assert "5 bytes are left in /mnt/ckpt/f.bin" in message
    await fails(lab.wait("f.bin", timeout=0), 4)
    lab.bucket.let_go()
    await lab.wait()


@in_lab()
async def test_stalled(lab: Lab) -> None:
    lab.bucket.refused["d/f.bin"] = Refused("403 AccessDenied")
    await lab.write("d/f.bin")
    message = await fails(lab.wait("d"), 5)
    assert message == "/mnt/ckpt/d/f.bin: stalled: 403 AccessDenied"
    assert await fails(lab.wait("d/f.bin"), 5) == message


@in_lab()
async def test_others_flow_past_a_stall(lab: Lab) -> None:
    lab.bucket.refused["d/f.bin"] = Refused("403")
    await lab.write("d/f.bin")
    await fails(lab.wait("d"), 5)
    await lab.write("e/g.bin")
    await lab.wait("e")
    assert lab.bucket.keys() == ["e/g.bin"]


@in_lab()
async def test_blocked_names_the_culprit(lab: Lab) -> None:
    lab.bucket.refused["shard.bin"] = Refused("507 full")
    await lab.write("shard.bin")
    await lab.write("latest", b"shard")
    message = await fails(lab.wait("latest"), 5)
    assert message == ("/mnt/ckpt/latest: blocked behind /mnt/ckpt/shard.bin (stalled: 507 full)")


@in_lab()
async def test_conflicted(lab: Lab) -> None:
    lab.bucket._store.put("f.bin", b"theirs", metadata={})
    await lab.write("f.bin", b"ours")
    assert "/mnt/ckpt/f.bin: conflicted" in await fails(lab.wait("f.bin"), 5)


@in_lab()
async def test_held_under_a_temporary_name(lab: Lab) -> None:
    await lab.write("model.bin.tmp")
    began = time.monotonic()
    message = await fails(lab.wait("model.bin.tmp"), 5)
    assert message.startswith("/mnt/ckpt/model.bin.tmp: held")
    assert 0.9 < time.monotonic() - began < 2


@in_lab()
async def test_renamed_soon_enough_it_is_not_held(lab: Lab) -> None:
    await lab.write("model.bin.tmp")
    answer = lab.asking(lab.wait)
    await trio.sleep(0.4)
    await lab.rename("model.bin.tmp", "model.bin")
    await answer
    assert lab.bucket.keys() == ["model.bin"]


@in_lab()
async def test_held_since_a_crash(lab: Lab) -> None:
    await lab.write("d/f.bin")
    await lab.wait()
    ino = lab.services.meta.dentries.get(await lab.folder("d"), b"f.bin").ino  # type: ignore[union-attr]
    gen = lab.services.meta.generations.of_inode(ino)[0]
    _hold(lab, gen)
    for path in ("d", "d/f.bin", ""):
        assert "/mnt/ckpt/d/f.bin: held: lost" in await fails(lab.wait(path), 5)
    await lab.wait(survives="process")


def _hold(lab: Lab, gen: GenerationRow) -> None:
    lab.services.meta.generations.set_state(gen.gen, "held", "lost")


@in_lab()
async def test_removed_while_it_is_waited_for(lab: Lab) -> None:
    """Of the name that was asked for there is nothing left; a tree does not miss one file."""
    lab.bucket.hold()
    for name in ("a.json", "b.json"):
        await lab.write(f"step_1/{name}")
    named = lab.asking(lambda: lab.wait("step_1/a.json"))
    tree = lab.asking(lambda: lab.wait("step_1"))
    gone = lab.asking(lambda: lab.wait("step_1"))
    await trio.sleep(0.02)
    await lab.remove("step_1/a.json")
    await fails(named, 6)
    assert not tree.done
    await lab.remove("step_1/b.json")
    lab.services.namespace.rmdir(ROOT, b"step_1")
    assert "/mnt/ckpt/step_1: removed before it was safe" in await fails(tree, 6)
    await fails(gone, 6)
    lab.bucket.let_go()


# ---- crowds ---------------------------------------------------------------------------------


@in_lab()
async def test_many_waiters_for_many_files(lab: Lab) -> None:
    for number in range(150):
        await lab.write(f"d/f{number}.bin", b"x")
    answers = [lab.asking(lab.wait) for _ in range(8)]
    for each in answers:
        assert (await each)["files"] == 150
    assert len(lab.bucket.keys()) == 150


@in_lab()
async def test_a_waiter_that_leaves(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("f.bin")
    with trio.move_on_after(0.1):
        await lab.wait()
    lab.bucket.let_go()
    await lab.wait()


async def _mute(values: object, /) -> None:
    """Progress that nobody reads."""
