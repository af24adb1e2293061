"""A warm tier that has no room: what is newer comes first, and what it may take the place of."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
import trio

from cachefs.model.retention import Rules
from tests.daemon.lab import until
from tests.daemon.tier import Warm, in_tier
from tests.support.mounts import poll

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small filesystem")
KEEPS = "tiers.warm_newest=3"
KIB = 1024


@contextmanager
def small(warm: Warm, kib: int) -> Iterator[None]:
    """Its directory is a filesystem of that size."""
    options = f"size={kib}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", warm.directory], check=True)
    try:
        yield
    finally:
        poll(lambda: subprocess.run(["umount", warm.directory]).returncode == 0, 20)


async def save(warm: Warm, step: int, *, marker: bool = True, kib: int = 40) -> None:
    for name in ("a.bin", "b.bin"):
        await warm.write(f"step-{step}/{name}", f"{step}" * (kib * KIB // len(f"{step}")))
    if marker:
        await warm.write(f"step-{step}/_SUCCESS", "ok")


async def work(warm: Warm) -> None:
    """Rounds and retention, as they follow one another."""
    for _ in range(12):
        changed = await warm.round()
        said = [v for v in await warm.tiering.verdicts(warm.tiering.rules) if v.goes]
        done = [v for v in await warm.tiering.retain() if v.goes]
        assert said == done, "the dry run says what is done"
        if not changed and not done:
            return


def whole(warm: Warm) -> set[str]:
    shown = warm.shown()
    roots = {path.split("/")[0] for path in shown if path.endswith("/_SUCCESS")}
    for root in roots:
        assert {f"{root}/a.bin", f"{root}/b.bin"} <= set(shown), "torn"
    return roots


@in_tier(KEEPS)
async def test_the_newest_checkpoints_are_kept(warm: Warm) -> None:
    """There is room for two and a half; three are to be kept."""
    with small(warm, 220), structlog.testing.capture_logs() as logs:
        for step in range(1, 6):
            await save(warm, step)
            await work(warm)
            await warm.lab.wait()
            await work(warm)
            assert warm.tier.trouble is None
        assert whole(warm) == {"step-4", "step-5"}
        removed = {e["checkpoint"]: e["reason"] for e in logs if "removed from" in e["event"]}
        assert removed == {
            "step-1": "there is no room for step-3",
            "step-2": "there is no room for step-4",
            "step-3": "there is no room for step-5",
        }
        assert len(warm.lab.bucket.keys()) == 15


@pytest.mark.parametrize("pointer", ["none", "text", "symlink"])
@in_tier("tiers.warm_newest=1")
async def test_room_for_one_is_for_the_newest(warm: Warm, pointer: str) -> None:
    """Also where a pointer says the one before, until it can say the new one."""
    with small(warm, 120):
        for step in (1, 2, 3):
            await save(warm, step, marker=False)
            await work(warm)
            if step > 1:
                assert whole(warm) == {f"step-{step - 1}"}, "one that is not whole is no reason"
            await warm.write(f"step-{step}/_SUCCESS", "ok")
            if pointer == "text":
                await warm.write("latest", f"step-{step}")
            elif pointer == "symlink":
                await warm.link("new", f"step-{step}")
                await warm.lab.rename("new", "latest")
            await warm.lab.wait()
            await work(warm)
            assert whole(warm) == {f"step-{step}"}
            assert warm.shown().get("latest") == (None if pointer == "none" else f"step-{step}")
            assert warm.tier.trouble is None


@in_tier(KEEPS)
async def test_what_the_store_lacks_gives_no_way(warm: Warm) -> None:
    """It is told, nobody waits for the tier, and it goes on once the store has it."""
    warm.lab.bucket.hold("put")
    with small(warm, 120), structlog.testing.capture_logs() as logs:
        await save(warm, 1)
        await work(warm)
        await save(warm, 2)
        await work(warm)
        await work(warm)
        assert whole(warm) == {"step-1"}
        assert "no room for step-2" in warm.tiering.status()["error"]
        assert len([e for e in logs if "nothing gives way" in e["event"]]) == 1
        gens = [row.gen for row in warm.lab.parts.queue.effects.values() if row.gen is not None]
        assert not any(warm.tier.will_have(gen) for gen in gens)
        await warm.write("small", "x")
        await work(warm)
        assert warm.shown()["small"] == "x", "other files go on"
        warm.lab.bucket.let_go()
        await warm.lab.wait()
        await work(warm)
        assert whole(warm) == {"step-2"}
        assert warm.tiering.status()["error"] is None


@in_tier()
async def test_without_rules_nothing_goes(warm: Warm) -> None:
    """But what is removed in the mount does, and makes room."""
    with small(warm, 120):
        await save(warm, 1)
        await work(warm)
        await warm.lab.wait()
        await save(warm, 2)
        await work(warm)
        await warm.lab.wait()
        await work(warm)
        assert whole(warm) == {"step-1"}
        assert "no room" in warm.tiering.status()["error"]
        for name in ("a.bin", "b.bin", "_SUCCESS"):
            await warm.lab.remove(f"step-1/{name}")
        await work(warm)
        assert whole(warm) == {"step-2"}
        assert warm.tiering.status()["error"] is None


@pytest.mark.parametrize("way", ["rewritten", "renamed"])
@in_tier()
async def test_what_is_removed_makes_room_though_a_pointer_names_it(warm: Warm, way: str) -> None:
    """The pointer is to be replaced, once there is room for what it will say."""
    with small(warm, 120):
        await save(warm, 1)
        await warm.write("latest", "step-1")
        await work(warm)
        await save(warm, 2)
        await warm.write("latest" if way == "rewritten" else "latest.tmp", "step-2")
        if way == "renamed":
            await warm.lab.rename("latest.tmp", "latest")
        await warm.lab.wait()
        await work(warm)
        assert (whole(warm), warm.shown()["latest"]) == ({"step-1"}, "step-1")
        for name in ("_SUCCESS", "a.bin", "b.bin"):
            await warm.lab.remove(f"step-1/{name}")
        await work(warm)
        await work(warm)
        assert (whole(warm), warm.shown()["latest"]) == ({"step-2"}, "step-2")


@in_tier(KEEPS, "tiers.warm_every=1")
async def test_what_is_kept_for_ever_is(warm: Warm) -> None:
    with small(warm, 120):
        await save(warm, 1)
        await work(warm)
        await save(warm, 2)
        await warm.lab.wait()
        await work(warm)
        assert whole(warm) == {"step-1"}


@in_tier(KEEPS)
async def test_one_that_is_larger_than_all_room_takes_nobodys(warm: Warm) -> None:
    with small(warm, 120):
        await save(warm, 1)
        await work(warm)
        await save(warm, 2, kib=100)
        await warm.lab.wait()
        await work(warm)
        assert whole(warm) == {"step-1"}
        await save(warm, 3)
        await warm.lab.wait()
        await work(warm)
        assert whole(warm) == {"step-3"}
        assert {path for path in warm.shown() if path.startswith("step-2")} == set()


@in_tier(KEEPS)
async def test_many_at_once(warm: Warm) -> None:
    """As after the tier was away: the newest comes first, what finds no room beside it is left."""
    for step in range(1, 6):
        await save(warm, step)
    await warm.lab.wait()
    with small(warm, 120):
        await work(warm)
        await work(warm)
        assert whole(warm) == {"step-5"}
        assert warm.tiering.status()["error"] is None
        assert {path.split("/")[0] for path in warm.shown()} == {"step-5"}
        assert not await warm.round()


@in_tier(KEEPS)
async def test_a_save_that_was_never_finished_gives_way(warm: Warm) -> None:
    with small(warm, 120):
        await save(warm, 1, marker=False)
        await work(warm)
        await save(warm, 2)
        await warm.lab.wait()
        await work(warm)
        assert whole(warm) == {"step-2"}
        assert {path.split("/")[0] for path in warm.shown()} == {"step-2"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@in_tier(KEEPS)
async def test_a_filesystem_that_says_so_late(
    warm: Warm, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota is not seen beforehand."""
    stage, limit = warm.tier.directory.stage, 200 * KIB

    def staging(name: str, source: str, size: int, attributes: Any) -> None:
        used = sum(len(text) for text in warm.shown().values())
        if used + size > limit:
            raise OSError(number, os.strerror(number))
        stage(name, source, size, attributes)

    monkeypatch.setattr(warm.tier.directory, "stage", staging)
    monkeypatch.setattr(warm.tier.directory, "free", lambda: None)
    for step in (1, 2, 3):
        await save(warm, step)
        await warm.lab.wait()
        await work(warm)
    assert whole(warm) == {"step-2", "step-3"}


@in_tier(KEEPS)
async def test_it_happens_by_itself(warm: Warm) -> None:
    with small(warm, 120):
        warm.lab.nursery.start_soon(warm.tiering.run)
        for step in (1, 2):
            await save(warm, step)
            await warm.lab.wait()
            marker = warm.directory / f"step-{step}/_SUCCESS"
            await until(marker.exists, 20)
        assert whole(warm) == {"step-2"}
        with trio.fail_after(20):  # It is on record a moment after it is there.
            while not (await warm.tiering.verdicts(Rules(newest=3)))[0].checkpoint.safe:  # noqa: ASYNC110
                await trio.sleep(0.02)
        warm.lab.nursery.cancel_scope.cancel()
