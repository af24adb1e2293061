"""What the warm tier moves, removes, reads and keeps: round by round, without a kernel."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.meta.warm import WarmState
from cachefs.vfs.attributes import ROOT
from tests.daemon.lab import CHUNK, until
from tests.daemon.tier import Warm, in_tier, save

# ---- copies that somebody touches --------------------------------------------------------------


@in_tier(flusher=False)
async def test_only_copies_as_written_are_removed(warm: Warm) -> None:
    for name in ("a", "b", "c"):
        await warm.write(name)
    await warm.link("l", "a")
    await warm.link("m", "a")
    await warm.settle()
    (warm.directory / "b").write_text("mine")
    (warm.directory / "c").unlink()
    (warm.directory / "m").unlink()
    (warm.directory / "m").symlink_to("b")
    for name in ("a", "b", "c", "l", "m"):
        await warm.lab.remove(name)
    await warm.settle()
    assert warm.shown() == {"b": "mine", "m": "b"}
    assert warm.lab.services.meta.warm.all() == [], "and forgotten"
    assert not await warm.round()


async def rewrite(warm: Warm, text: bytes) -> None:
    """In the cache file that it has, for it is too large to be kept as it was."""
    fh = await warm.lab.open("f.bin", os.O_RDWR)
    await warm.lab.put(fh, text)
    warm.lab.close(fh)


@in_tier("cache.preserve_limit=1")
async def test_what_was_rewritten_in_place_is_copied_again(warm: Warm) -> None:
    """Before the store had it: what is read of it then is what was written last."""
    await warm.write("f.bin", "first")
    await warm.settle()
    assert warm.shown() == {"f.bin": "first"}
    ino = warm.lab.services.meta.dentries.get(ROOT, b"f.bin").ino  # type: ignore[union-attr]
    await rewrite(warm, b"again")
    now = warm.lab.services.meta.generations.current(ino)
    assert now is not None
    assert not warm.tier.has(now.gen), "that copy is of other bytes"
    await warm.lab.wait()
    warm.lab.parts.eviction.is_needed = lambda row: False
    assert (await warm.lab.ask("evict", paths=["f.bin"]))["files"] == 1
    assert await warm.read("f.bin") == b"again"
    await warm.settle()
    assert warm.shown() == {"f.bin": "again"}


@in_tier("cache.preserve_limit=1", flusher=False)
async def test_what_is_rewritten_while_it_is_copied(warm: Warm) -> None:
    """Of the bytes before there is a copy for a while; it counts for nothing."""
    await warm.write("f.bin", "first")
    show, written = warm.tier.directory.show, threading.Event()

    def late(*words: Any) -> int:
        trio.from_thread.run(rewrite, warm, b"again")
        written.set()
        return show(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm.tier.directory, "show", late)
        await warm.round()
    assert written.is_set()
    await warm.settle()
    assert warm.shown() == {"f.bin": "again"}


@pytest.mark.parametrize("then", ["moves", "goes"])
@in_tier(flusher=False)
async def test_what_a_killed_daemon_showed_is_known(warm: Warm, then: str) -> None:
    """It had no time to say so, and the name is another one when the next daemon looks."""
    await warm.write("step-1/a.bin", "one")
    show = warm.tier.directory.show

    def killed(*words: Any) -> int:
        show(*words)
        raise OSError(errno.EIO, "as if killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm.tier.directory, "show", killed)
        with pytest.raises(OSError, match="killed"):
            await warm.round()
    assert warm.shown() == {"step-1/a.bin": "one"}
    if then == "moves":
        await warm.lab.rename("step-1", "step-2")
    else:
        await warm.lab.remove("step-1/a.bin")
    await warm.settle()
    assert warm.shown() == ({"step-2/a.bin": "one"} if then == "moves" else {})


@in_tier(flusher=False)
async def test_what_is_not_found_while_the_filesystem_is_away_is_not_forgotten(warm: Warm) -> None:
    for name in ("a", "b"):
        await warm.write(name)
    await warm.settle()
    away = warm.directory.with_name("away")
    warm.directory.rename(away)
    warm.directory.mkdir()  # the bare mount point
    await warm.lab.remove("a")
    await warm.lab.rename("b", "c")
    with pytest.raises(FileNotFoundError):
        await warm.round()
    warm.directory.rmdir()
    away.rename(warm.directory)
    await warm.settle()
    assert warm.shown() == {"c": "x"}


@in_tier(flusher=False)
async def test_a_touched_copy_is_not_moved(warm: Warm) -> None:
    """The new place gets what the name has; what somebody wrote stays where it is."""
    await warm.write("a", "one")
    await warm.write("step-1/a.bin", "two")
    await warm.write("step-1/_SUCCESS")
    await warm.settle()
    (warm.directory / "a").write_text("mine")
    (warm.directory / "step-1/a.bin").write_text("also")
    await warm.lab.rename("a", "b")
    await warm.lab.rename("step-1", "step-2")
    await warm.settle()
    await warm.settle()
    assert warm.shown() == {
        "a": "mine", "b": "one", "step-1/a.bin": "also", "step-2/a.bin": "two",
        "step-2/_SUCCESS": "x",
    }  # fmt: skip
    assert not await warm.round()


@in_tier()
async def test_a_touched_copy_without_its_content_ends_no_other_copies(warm: Warm) -> None:
    await warm.write("a", "one")
    await warm.settle()
    await warm.lab.wait()
    assert (await warm.lab.ask("evict", paths=["a"]))["files"] == 1
    (warm.directory / "a").write_text("mine")
    await warm.lab.rename("a", "b")
    await warm.write("c", "three")
    await warm.settle()
    assert warm.shown() == {"a": "mine", "c": "three"}
    assert warm.row_of("b").state == WarmState.LACKING
    assert not await warm.round(), "no rounds for what cannot be done"
    assert await warm.read("b") == b"one"
    await warm.settle()
    assert warm.shown() == {"a": "mine", "b": "one", "c": "three"}


@in_tier()
async def test_a_moved_marker_that_must_wait_is_not_lost(warm: Warm) -> None:
    """Its checkpoint moves, and one file of that cannot follow yet."""
    await warm.write("step-1/a.bin")
    await warm.write("step-1/_SUCCESS", "done")
    await warm.settle()
    await warm.lab.wait()
    assert (await warm.lab.ask("evict", paths=["step-1"]))["files"] == 2
    (warm.directory / "step-1/a.bin").write_text("mine")
    await warm.lab.rename("step-1", "step-2")
    await warm.settle()
    assert "step-2/_SUCCESS" not in warm.shown()
    await warm.read("step-2/a.bin")
    await warm.settle()
    assert warm.shown()["step-2/_SUCCESS"] == "done"


@in_tier()
async def test_what_is_needed_in_the_cache(warm: Warm) -> None:
    """What is to be copied: not what has a temporary name, nor a log that is still written."""
    generations = warm.lab.services.meta.generations
    await warm.tier.look()
    await warm.write("a.bin")
    await warm.write("b.tmp")
    for name, needed in ((b"a.bin", True), (b"b.tmp", False)):
        inode = warm.lab.services.meta.inodes.lookup(ROOT, name)
        assert inode is not None
        row = generations.current(inode.ino)
        assert row is not None
        assert warm.tier.is_needed(row) is needed
    fh = await warm.lab.open("train.log")
    await warm.lab.put(fh, b"line")
    (opened,) = warm.lab.parts.table.open_for_writing()
    assert warm.lab.parts.snapshots.take(opened)
    assert not any(warm.tier.is_needed(row) for row in generations.of_inode(opened.ino))
    warm.lab.close(fh)


# ---- reading -----------------------------------------------------------------------------------


@in_tier()
async def test_a_damaged_copy_is_not_read_again_and_made_anew(warm: Warm) -> None:
    """Its size and time are as they were."""
    body = "0123456789abcdef" * (2 * CHUNK // 16)
    await warm.write("f.bin", body)
    await warm.settle()
    await warm.lab.wait()
    copy = warm.directory / "f.bin"
    at = copy.stat()
    copy.write_text("?" * len(body))
    os.utime(copy, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert (await warm.lab.ask("evict", paths=["f.bin"]))["files"] == 1
    fetched: list[str] = []
    call = warm.lab.bucket.call

    async def counted(method: str, /, **arguments: Any) -> Any:
        fetched.append(method)
        return await call(method, **arguments)

    warm.lab.bucket.call = counted  # type: ignore[method-assign]
    assert await warm.read("f.bin") == body.encode()
    assert "get_bytes" in fetched, "the second time from the store"
    await warm.settle()
    assert copy.read_text() == body
    assert (await warm.lab.ask("evict", paths=["f.bin"]))["files"] == 1
    fetched.clear()
    assert await warm.read("f.bin") == body.encode()
    assert "get_bytes" not in fetched


# ---- retention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["text", "symlink", "member", "coming"])
@in_tier("tiers.warm_newest=1")
async def test_what_a_pointer_names_is_kept(warm: Warm, sign: str) -> None:
    for step in (1, 2, 3):
        await save(warm, step)
        await warm.settle()
    if sign == "symlink":
        await warm.link("current", "step-1")
    elif sign == "member":  # It shares a file with an older one.
        await warm.link("step-3/base.bin", "../step-1/a.bin")
    else:
        await warm.write("latest", "step-1")
    await warm.lab.wait()
    if sign != "coming":
        await warm.settle()
    told = await warm.tiering.verdicts(warm.tiering.rules)
    assert {v.checkpoint.root: (v.goes, "named by" in v.reason) for v in told} == {
        "step-1": (False, True), "step-2": (True, False), "step-3": (False, False),
    }  # fmt: skip
    await warm.tiering.retain()
    assert {path.split("/")[0] for path in warm.shown() if "/" in path} == {"step-1", "step-3"}


@in_tier("tiers.warm_newest=1")
async def test_a_checkpoint_of_which_something_lacks_is_not_the_newest_safe_one(
    warm: Warm,
) -> None:
    await save(warm, 1)
    await warm.settle()
    await save(warm, 2)
    await warm.settle()
    await warm.lab.wait()
    warm.tier.distrust(warm.row_of("step-2/a.bin"))
    told = await warm.tiering.verdicts(warm.tiering.rules)
    assert not any(verdict.goes for verdict in told)


@in_tier("tiers.warm_newest=1")
async def test_a_checkpoint_that_its_shards_tell_of_is_removed_whole(warm: Warm) -> None:
    for name in ("one", "two"):
        await warm.write(f"{name}/model-00001-of-00001.safetensors")
        await warm.write(f"{name}/config.json")
        await warm.write(f"{name}/tokenizer/vocab.txt")
        await warm.write(f"{name}/model.safetensors.index.json", "{}")
        await warm.settle()
    await warm.lab.wait()
    await warm.tiering.retain()
    assert {path.split("/")[0] for path in warm.shown()} == {"two"}
    assert len(warm.shown()) == 4


@in_tier("tiers.warm_bytes=10", "tiers.warm_every=4")
async def test_as_many_as_fit_and_some_for_ever(warm: Warm) -> None:
    """Each has three bytes."""
    for step in (1, 2, 3, 4, 5, 6):
        await save(warm, step)
        await warm.settle()
    await warm.lab.wait()
    await warm.tiering.retain()
    assert {path.split("/")[0] for path in warm.shown()} == {f"step-{n}" for n in (3, 4, 5, 6)}
    assert len(warm.lab.bucket.keys()) == 12


@in_tier("tiers.warm_age=300ms")
async def test_those_that_are_too_old_go_by_themselves(warm: Warm) -> None:
    """The newest stays, however old it is."""
    for step in (1, 2):
        await save(warm, step)
        await warm.settle()
    await warm.lab.wait()
    warm.lab.nursery.start_soon(warm.tiering.run)
    await until(lambda: {path.split("/")[0] for path in warm.shown()} == {"step-2"}, timeout=10)


# ---- before the bucket -------------------------------------------------------------------------


@in_tier("tiers.warm_policy=before", "flush.settle=0s")
async def test_the_bucket_waits_for_the_copy(warm: Warm) -> None:
    """Of what the tier is to have; what it cannot take now goes on."""
    assert warm.lab.parts.queue.holds_back(1), "before anybody knows whether it can be used"
    await warm.tier.look()
    await warm.only_in_store("step-1/lost.bin")
    await warm.write("f.bin")
    await warm.write("step-1/_SUCCESS")
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert warm.lab.bucket.keys() == ["step-1/lost.bin"]
    await warm.settle()
    assert set(warm.shown()) == {"f.bin"}
    await until(lambda: len(warm.lab.bucket.keys()) == 3)


@in_tier("tiers.warm_policy=before", "flush.settle=0s")
async def test_nobody_waits_for_a_filesystem_that_hangs(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the bucket nor who waits for a copy, nor eviction; it goes on when it answers."""
    answers = threading.Event()
    stage = warm.tier.directory.stage

    def hanging(*args: Any) -> None:
        answers.wait(20)
        stage(*args)

    monkeypatch.setattr(warm.tier.directory, "stage", hanging)
    monkeypatch.setattr("cachefs.tiers.warm._STUCK", 0.1)
    await warm.write("f.bin")
    (gen,) = [row.gen for row in warm.lab.parts.queue.effects.values()]
    warm.lab.nursery.start_soon(warm.tiering.run)
    try:
        await warm.lab.wait("f.bin", survives="instance")
        assert warm.lab.bucket.keys() == ["f.bin"]
        assert "has not answered" in warm.tiering.status()["error"]
        assert gen is not None
        assert not warm.tier.will_have(gen)
        assert (await warm.lab.ask("evict", paths=["f.bin"]))["files"] == 1
    finally:
        answers.set()
    await until(lambda: warm.tiering.status()["error"] is None)


@in_tier("tiers.warm_policy=before", "flush.settle=0s")
async def test_the_bucket_does_not_wait_for_a_tier_that_does_not_work(warm: Warm) -> None:
    await warm.tier.look()
    await warm.write("f.bin")
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert warm.lab.bucket.keys() == []
    shutil.rmtree(warm.directory)
    warm.lab.nursery.start_soon(warm.tier.run, warm.lab.parts.queue.next_change)
    await until(lambda: warm.lab.bucket.keys() == ["f.bin"])
    assert warm.tiering.status()["error"] is not None
