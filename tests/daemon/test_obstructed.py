"""Names that cannot have their places in the warm tier: they alone wait."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import structlog
import trio
import trio.testing

from cachefs.cache.warmdir import Shown
from cachefs.daemon.census import snapshot
from cachefs.daemon.trouble import Troubles
from cachefs.model.retention import Rules
from tests.daemon.lab import until
from tests.daemon.tier import Warm, in_tier, save


def obstruct(warm: Warm, path: str, kind: str) -> None:
    """Put something where a copy of `path` has to go, so that it cannot."""
    place = warm.directory / path
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "directory":
        place.mkdir()
        (place / "mine").write_text("mine")
    elif kind == "file":  # where a directory has to be
        place.parent.rmdir()
        place.parent.write_text("mine")
    else:
        place.parent.rmdir()
        elsewhere = warm.directory / "elsewhere"
        elsewhere.mkdir()
        place.parent.symlink_to(elsewhere)


def clear(warm: Warm, path: str) -> None:
    place = warm.directory / path
    if place.parent.is_symlink() or place.parent.is_file():
        place.parent.unlink()
    else:
        shutil.rmtree(place)


def obstructed(warm: Warm) -> int:
    """As the metrics tell."""
    services = warm.lab.services
    return snapshot(services, Troubles(services.meta, services.queue)).warm_obstructed_files


@pytest.mark.parametrize("kind", ["directory", "file", "symlink"])
@in_tier(flusher=False)
async def test_it_alone_waits_until_the_way_is_free(warm: Warm, kind: str) -> None:
    obstruct(warm, "run/f.bin", kind)
    await warm.write("run/f.bin", "one")
    await warm.write("a", "two")
    with structlog.testing.capture_logs() as logs:
        await warm.settle()
        await warm.settle()
        await warm.write("b", "three")
        await warm.settle()
    found = warm.shown()
    assert found["a"] + found["b"] == "twothree"
    assert "run/f.bin" not in found
    assert "elsewhere/f.bin" not in found
    told = warm.tiering.status()
    assert (told["error"], told["files_obstructed"]) == (None, 1)
    assert obstructed(warm) == 1
    status = await warm.lab.ask("status", path="")
    (error,) = (await warm.lab.handlers["status"]({}, None))["errors"]  # type: ignore[arg-type]
    assert status["path"] == "/mnt/ckpt"
    assert error["path"] == "/mnt/ckpt/run/f.bin"
    assert "move it away" in error["error"]
    assert str(warm.directory / "run") in error["error"]
    assert [each["path"] for each in logs if "in the way" in each["event"]] == ["run/f.bin"]
    clear(warm, "run/f.bin")
    await warm.settle()
    assert warm.shown()["run/f.bin"] == "one"
    assert warm.tiering.status()["files_obstructed"] == 0
    assert obstructed(warm) == 0
    assert not await warm.round()


@in_tier()
async def test_nobody_is_told_that_it_survives(warm: Warm) -> None:
    """Who waits for that waits for the store; so does who waited already."""
    obstruct(warm, "f.bin", "directory")
    await warm.tier.look()
    await warm.write("f.bin")
    await warm.write("g.bin")
    (gen, _) = [row.gen for row in warm.lab.parts.queue.effects.values()]
    assert gen is not None
    answer = warm.lab.asking(lambda: warm.lab.wait("f.bin", survives="instance"))
    await trio.sleep(0.05)
    assert not answer.done
    warm.lab.bucket.hold("put")
    await warm.settle()
    assert warm.tier.trouble is None
    await trio.sleep(0.5)
    assert not answer.done
    assert not warm.tier.has(gen)
    assert not warm.tier.will_have(gen)
    await warm.lab.wait("g.bin", survives="instance")
    warm.lab.bucket.let_go()
    await answer
    assert warm.lab.bucket.keys() == ["f.bin"]
    assert (await warm.lab.ask("evict", paths=["f.bin"]))["files"] == 1, "the cache may need room"


@in_tier("tiers.warm_policy=before", "flush.settle=0s")
async def test_the_bucket_does_not_wait_for_it(warm: Warm) -> None:
    obstruct(warm, "f.bin", "directory")
    await warm.tier.look()
    await warm.write("f.bin")
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert warm.lab.bucket.keys() == []
    await warm.round()
    await until(lambda: warm.lab.bucket.keys() == ["f.bin"])


@in_tier("tiers.warm_newest=1", "tiers.hot_newest=1")
async def test_its_checkpoint_is_not_complete_there(warm: Warm) -> None:
    """Neither does retention count it, nor do signs tell of it, nor does it leave the cache."""
    await save(warm, 1)
    await warm.settle()
    obstruct(warm, "step-2/a.bin", "directory")
    await save(warm, 2)
    await warm.write("latest", "step-2")
    await warm.write("step-3/a.bin", "a3")
    await warm.settle()
    await warm.lab.wait()
    assert set(warm.shown()) == {
        "step-1/a.bin", "step-1/_SUCCESS", "step-2/a.bin/mine", "step-3/a.bin",
    }  # fmt: skip
    assert not any(each.goes for each in await warm.tiering.verdicts(warm.tiering.rules))
    await warm.write("step-3/_SUCCESS")
    await warm.settle()
    await warm.lab.wait()
    verdicts = await warm.lab.parts.hot.verdicts(Rules(newest=1))
    assert {each.checkpoint.root: each.goes for each in verdicts} == {
        "step-3": False, "step-2": False, "step-1": True,
    }  # fmt: skip
    assert (await warm.lab.ask("evict", paths=["step-2/a.bin"]))["files"] == 1
    told = {v.checkpoint.root: v for v in await warm.lab.parts.hot.verdicts(Rules(newest=1))}
    assert not told["step-2"].goes, "the other file of it"
    clear(warm, "step-2/a.bin")
    assert await warm.read("step-2/a.bin") == b"a2"
    await warm.settle()
    assert warm.shown()["latest"] == "step-2"


@in_tier(flusher=False)
async def test_a_late_file_of_a_checkpoint(warm: Warm) -> None:
    """Its marker is there already: it is no longer taken for complete."""
    await save(warm, 1)
    await warm.settle()
    obstruct(warm, "step-1/b.bin", "directory")
    await warm.write("step-1/b.bin")
    await warm.write("step-1/later.done")
    await warm.settle()
    assert "step-1/later.done" not in warm.shown()
    (told,) = await warm.tiering.verdicts(Rules(newest=1))
    assert not told.checkpoint.safe


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY, errno.EXDEV])
@in_tier(flusher=False)
async def test_what_only_shows_when_it_is_tried(warm: Warm, number: int) -> None:
    """A file that may not be replaced, a place where something is mounted: it is tried again."""
    show = warm.tier.directory.show
    tried: list[str] = []

    def refuse(name: str, path: str) -> int:
        if path == "f.bin":
            tried.append(path)
            raise OSError(number, os.strerror(number), path)
        return show(name, path)

    await warm.write("f.bin", "one")
    await warm.write("g.bin", "two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm.tier.directory, "show", refuse)
        await warm.settle()
        await warm.settle()
        assert warm.shown() == {"g.bin": "two"}
        assert len(tried) == 1, "not as fast as rounds follow one another"
        assert warm.tiering.status()["files_obstructed"] == 1
        left = [p for p in (warm.directory / ".cachefs/staging").rglob("*") if p.is_file()]
        assert left == []
    later = trio.current_time() + 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio, "current_time", lambda: later)
        await warm.settle()
    assert warm.shown() == {"f.bin": "one", "g.bin": "two"}


@in_tier(flusher=False)
async def test_a_moved_file_stays_where_it_was(warm: Warm) -> None:
    await warm.write("a", "one")
    await warm.write("step-1/a.bin", "two")
    await warm.write("step-1/_SUCCESS", "done")
    await warm.settle()
    obstruct(warm, "b", "directory")
    obstruct(warm, "step-2/_SUCCESS", "directory")
    await warm.lab.rename("a", "b")
    await warm.lab.rename("step-1", "step-2")
    (gen,) = [r.gen for r in warm.lab.services.meta.warm.all() if r.path == "a"]
    await warm.settle()
    assert warm.shown() == {
        "a": "one", "b/mine": "mine", "step-2/a.bin": "two", "step-2/_SUCCESS/mine": "mine",
    }  # fmt: skip
    assert not warm.tier.has(gen), "not under its name"
    clear(warm, "b")
    clear(warm, "step-2/_SUCCESS")
    await warm.settle()
    assert warm.shown() == {"b": "one", "step-2/a.bin": "two", "step-2/_SUCCESS": "done"}


# ---- what was the mount's own there ------------------------------------------------------------


@pytest.mark.parametrize("content", ["kept", "new"])
@in_tier(flusher=False)
async def test_a_file_becomes_a_directory_and_back(warm: Warm, content: str) -> None:
    await warm.write("foo", "one")
    await warm.settle()
    await warm.lab.rename("foo", "aside")
    if content == "kept":
        await warm.lab.folder("foo")
        await warm.lab.rename("aside", "foo/bar")
    else:
        await warm.lab.remove("aside")
        await warm.write("foo/bar", "two")
    await warm.settle()
    text = "one" if content == "kept" else "two"
    assert warm.shown() == {"foo/bar": text}
    await warm.lab.rename("foo/bar", "aside")
    await warm.lab.remove("foo")
    if content == "kept":
        await warm.lab.rename("aside", "foo")
    else:
        await warm.lab.remove("aside")
        await warm.write("foo", "three")
    await warm.settle()
    assert warm.shown() == {"foo": "one" if content == "kept" else "three"}
    assert warm.tiering.status()["files_obstructed"] == 0


@in_tier(flusher=False)
async def test_nothing_is_written_through_a_symlink(warm: Warm) -> None:
    """A symlink of the mount's own becomes a directory: its target keeps its bytes."""
    await warm.write("d/x", "theirs")
    await warm.link("l", "d")
    await warm.settle()
    await warm.lab.remove("l")
    await warm.write("l/x", "mine")
    await warm.settle()
    assert warm.shown() == {"d/x": "theirs", "l/x": "mine"}


@in_tier(flusher=False)
async def test_a_touched_file_where_a_directory_comes(warm: Warm) -> None:
    await warm.write("foo", "one")
    await warm.settle()
    (warm.directory / "foo").write_text("somebody's")
    await warm.lab.remove("foo")
    await warm.write("foo/bar", "two")
    await warm.write("other", "three")
    await warm.settle()
    assert warm.shown() == {"foo": "somebody's", "other": "three"}
    assert warm.tiering.status()["files_obstructed"] == 1
    (warm.directory / "foo").unlink()
    await warm.settle()
    assert warm.shown() == {"foo/bar": "two", "other": "three"}


# ---- what cannot be removed --------------------------------------------------------------------


def refuse(warm: Warm, patch: pytest.MonkeyPatch, path: str) -> None:
    """As where a directory is somebody else's, or a file must not be changed."""
    remove = warm.tier.directory.remove

    def removing(shown: Shown) -> bool:
        if shown.path == path:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        return remove(shown)

    patch.setattr(warm.tier.directory, "remove", removing)


@pytest.mark.parametrize("name", ["a.bin", "_SUCCESS"])
@in_tier("tiers.warm_newest=1")
async def test_retention_goes_on_without_what_cannot_be_removed(warm: Warm, name: str) -> None:
    """No marker is left that tells of what is gone."""
    for step in (1, 2, 3):
        await save(warm, step)
        await warm.settle()
    await warm.lab.wait()
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as logs:
        refuse(warm, patch, f"step-1/{name}")
        await warm.tiering.retain()
        await warm.tiering.retain()
    assert [each["path"] for each in logs if "cannot be removed" in each["event"]] == [
        f"step-1/{name}"
    ]
    gen = warm.row_of("step-1/a.bin").gen
    assert warm.tier.has(gen) == ("step-1/a.bin" in warm.shown())
    left = {f"step-1/{name}"} if name == "a.bin" else {"step-1/a.bin", "step-1/_SUCCESS"}
    assert set(warm.shown()) == left | {"step-3/a.bin", "step-3/_SUCCESS"}
    assert warm.tiering.status()["files_obstructed"] == 1
    await warm.tiering.retain()
    assert set(warm.shown()) == {"step-3/a.bin", "step-3/_SUCCESS"}
    assert warm.tiering.status()["files_obstructed"] == 0


@in_tier(flusher=False)
async def test_a_moved_copy_that_cannot_be_removed(warm: Warm) -> None:
    """It stays where it was, too, and that is told."""
    await warm.write("a", "one")
    await warm.settle()
    await warm.lab.rename("a", "b")
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as logs:
        refuse(warm, patch, "a")
        await warm.settle()
    assert [each["path"] for each in logs if each["event"].startswith("a copy stays")] == ["a"]
    assert warm.shown() == {"a": "one", "b": "one"}


@pytest.mark.parametrize("name", ["a.bin", "_SUCCESS"])
@in_tier(flusher=False)
async def test_what_is_gone_and_cannot_be_removed_stops_nothing(warm: Warm, name: str) -> None:
    await save(warm, 1)
    await warm.settle()
    await warm.lab.remove(f"step-1/{name}")
    await warm.lab.rename("step-1", "step-2")
    await save(warm, 3)
    with pytest.MonkeyPatch.context() as patch:
        refuse(warm, patch, f"step-1/{name}")
        await warm.settle()
        await warm.write("f")
        await warm.settle()
        found = set(warm.shown())
        assert found >= {"f", "step-3/a.bin", "step-3/_SUCCESS", f"step-1/{name}"}
        assert "step-1/_SUCCESS" not in found or "step-1/a.bin" in found, "no torn checkpoint"
        assert warm.tiering.status()["files_obstructed"] >= 1
    await warm.settle()
    other = {"step-2/a.bin"} if name == "_SUCCESS" else {"step-2/_SUCCESS"}
    assert set(warm.shown()) == other | {"f", "step-3/a.bin", "step-3/_SUCCESS"}
    assert warm.tiering.status()["files_obstructed"] == 0
