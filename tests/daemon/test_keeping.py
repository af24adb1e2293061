"""What may leave the cache by rule, before there is need of room, and what may not."""

from __future__ import annotations

import os
import shutil

from cachefs.daemon.keeping import HotTier
from tests.daemon.lab import Lab, in_lab, until
from tests.daemon.tier import Warm, in_tier

SETTLES = "flush.settle=0s"


async def save(lab: Lab, step: int, size: int = 1000) -> None:
    await lab.write(f"step-{step}/a.bin", bytes(size))
    await lab.write(f"step-{step}/_SUCCESS")


async def told(hot: HotTier) -> dict[str, tuple[bool, str]]:
    """Checkpoint -> (does it go, why)."""
    verdicts = await hot.verdicts(hot.rules)
    return {each.checkpoint.root: (each.goes, each.reason) for each in verdicts}


async def going(hot: HotTier) -> set[str]:
    return {root for root, (goes, _) in (await told(hot)).items() if goes}


def cached(lab: Lab) -> set[str]:
    """Names of the checkpoints that have content in the cache."""
    meta = lab.services.meta
    rows = meta.generations.in_states("open", "sealed", "uploading", "durable")
    paths = [meta.dentries.path_of(n.id) for r in rows for n in meta.dentries.of_inode(r.ino)]
    return {os.fsdecode(path).split("/")[0] for path in paths if path is not None}


@in_lab("tiers.hot_newest=1", SETTLES)
async def test_only_what_the_store_has_whole_leaves(lab: Lab) -> None:
    hot = lab.parts.hot
    lab.bucket.hold("put")
    for step in (1, 2, 3):
        await save(lab, step)
    assert await going(hot) == set()
    assert "the next tier lacks part of it" in (await told(hot))["step-1"][1]
    lab.bucket.let_go()
    await lab.wait()
    assert await going(hot) == {"step-1", "step-2"}
    fh = await lab.open("step-1/a.bin")  # Somebody writes to it again.
    await lab.put(fh, b"more")
    assert await going(hot) == {"step-2"}
    await hot.retain()
    assert cached(lab) == {"step-1", "step-3"}
    lab.close(fh)
    await lab.wait()
    reread = await lab.open("step-2/a.bin", os.O_RDONLY)
    assert bytes(await lab.services.files.read(reread, 0, 2000)) == bytes(1000)
    lab.close(reread)


@in_lab("tiers.hot_newest=1", SETTLES)
async def test_what_is_in_use_pinned_or_fetched_stays(lab: Lab) -> None:
    hot = lab.parts.hot
    for step in (1, 2, 3, 4, 5):
        await save(lab, step)
        await lab.wait()
    assert (await lab.ask("evict", paths=["step-1"]))["files"] == 2
    await lab.ask("pin", paths=["step-2"])
    await lab.ask("warm", paths=["step-1/a.bin"])
    reader = await lab.open("step-3/a.bin", os.O_RDONLY)
    assert await told(hot) == {
        "step-5": (False, ""),
        "step-4": (True, "1 newer ones, 1 are kept"),
        "step-3": (False, "it is in use"),
        "step-2": (False, "it is pinned"),
        "step-1": (False, "it was fetched again"),
    }
    lab.close(reader)
    assert await going(hot) == {"step-3", "step-4"}
    await hot.retain()
    assert cached(lab) == {"step-1", "step-2", "step-5"}


@in_lab("tiers.hot_newest=1", SETTLES)
async def test_a_checkpoint_that_nobody_finished_stays(lab: Lab) -> None:
    """No marker; and one of which a file has a temporary name still."""
    await lab.write("step-1/a.bin")
    await save(lab, 2)
    await lab.write("step-2/b.bin.tmp")
    await save(lab, 3)
    await lab.wait("step-1", "step-3")
    assert await going(lab.parts.hot) == set()


@in_lab("tiers.hot_bytes=2500", "tiers.hot_every=2", SETTLES)
async def test_by_size(lab: Lab) -> None:
    for step in (1, 2, 3, 5, 7):
        await save(lab, step)
        await lab.wait()
    assert await going(lab.parts.hot) == {"step-1", "step-3"}


@in_lab("tiers.hot_age=300ms", SETTLES)
async def test_by_age(lab: Lab) -> None:
    """By itself; the newest stays however old it is."""
    lab.nursery.start_soon(lab.parts.hot.run)
    for step in (1, 2):
        await save(lab, step)
        await lab.wait()
    assert cached(lab) == {"step-1", "step-2"}
    await until(lambda: cached(lab) == {"step-2"}, timeout=10)


@in_tier("tiers.hot_newest=1", SETTLES)
async def test_the_warm_tier_comes_first(warm: Warm) -> None:
    """What it does not have stays in the cache, also while it is away."""
    hot = warm.lab.parts.hot
    for step in (1, 2):
        await save(warm.lab, step)
    await warm.lab.wait()
    await warm.tier.look()
    assert await going(hot) == set(), "nothing was copied yet"
    shutil.rmtree(warm.directory)
    warm.tier.problem = "it is away"
    assert await going(hot) == set()


@in_tier("tiers.hot_newest=1", SETTLES)
async def test_what_the_warm_tier_has_leaves(warm: Warm) -> None:
    hot = warm.lab.parts.hot
    for step in (1, 2):
        await save(warm.lab, step)
    await warm.settle()
    await warm.lab.wait()
    assert await going(hot) == {"step-1"}
    warm.tier.distrust(warm.row_of("step-1/a.bin"))
    assert await going(hot) == set(), "its copy is damaged, and made anew"
    await warm.settle()
    await hot.retain()
    assert cached(warm.lab) == {"step-2"}
    assert await warm.read("step-1/a.bin") == bytes(1000)
