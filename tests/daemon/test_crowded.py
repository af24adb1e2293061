"""Little room is left for commits that a disk has not taken: what can wait waits."""

from __future__ import annotations

import errno

import pytest
import trio

from cachefs.daemon import tasks
from cachefs.meta.database import Database
from cachefs.meta.deferral import Lag
from cachefs.meta.warm import WarmState
from cachefs.model.states import GenState
from tests.daemon.lab import Lab, in_lab, until
from tests.daemon.tier import Warm, in_tier, save

SHORT = 0.3
"""Seconds in which whoever does not wait would be done."""


class Crowd:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_there, self.error = False, 0
        patch.setattr(Database, "crowded", property(lambda database: self.is_there))
        patch.setattr(Database, "lag", property(lambda database: Lag(1, 1.0, self.error)))


@in_lab()
async def test_eviction(lab: Lab) -> None:
    await lab.write("a.bin")
    await lab.write("b.bin")
    await lab.wait()
    with pytest.MonkeyPatch.context() as patch:
        crowd = Crowd(patch)
        crowd.is_there = True
        evicting = lab.asking(lambda: lab.ask("evict", paths=["a.bin"]))
        await trio.sleep(SHORT)
        assert not evicting.done
        fh = await lab.open("a.bin")  # It may be in use by the time that there is room.
        crowd.is_there = False
        assert (await evicting)["bytes"] == 0
        lab.close(fh)
        crowd.is_there = True
        crowd.error = errno.ENOSPC
        assert (await lab.ask("evict", paths=["b.bin"]))["files"] == 1, "it is what makes room"


@in_tier("tiers.warm_newest=1")
async def test_the_warm_tier_and_its_retention(warm: Warm) -> None:
    await save(warm, 1)
    await warm.settle()
    await save(warm, 2)
    await warm.lab.wait()
    with pytest.MonkeyPatch.context() as patch:
        crowd = Crowd(patch)
        crowd.is_there = True
        going = warm.lab.asking(warm.settle)
        await trio.sleep(SHORT)
        assert not going.done
        assert len(warm.lab.services.meta.warm.all()) == 2
        crowd.is_there = False
        await going
        crowd.is_there = True
        retaining = warm.lab.asking(warm.tiering.retain)
        await trio.sleep(SHORT)
        assert not retaining.done
        assert "step-1/_SUCCESS" in warm.shown()
        crowd.is_there = False
        await retaining
        assert set(warm.shown()) == {"step-2/a.bin", "step-2/_SUCCESS"}


@in_tier(flusher=False)
async def test_the_warm_tier_in_the_midst_of_a_round(warm: Warm) -> None:
    """The disk stalls while bytes are copied."""
    await warm.write("a.bin")
    with pytest.MonkeyPatch.context() as patch:
        crowd = Crowd(patch)
        show = warm.tier.directory.show

        def late(name: str, path: str) -> int:
            crowd.is_there = True
            return show(name, path)

        patch.setattr(warm.tier.directory, "show", late)
        going = warm.lab.asking(warm.round)
        await until(lambda: crowd.is_there)
        await trio.sleep(SHORT)
        assert not going.done
        assert warm.row_of("a.bin").state == WarmState.LACKING
        crowd.is_there = False
        await going
        assert warm.row_of("a.bin").state == WarmState.HELD


@in_lab("checkpoint.supersede=unstarted", flusher=False)
async def test_superseding(lab: Lab) -> None:
    superseded = lab.services.meta.generations.in_states
    with pytest.MonkeyPatch.context() as patch:
        crowd = Crowd(patch)
        crowd.is_there = True
        lab.nursery.start_soon(tasks.supersede, lab.services)
        await trio.lowlevel.checkpoint()
        for step in (1, 2):
            await lab.write(f"step-{step}/a.bin")
            await lab.write(f"step-{step}/_SUCCESS")
        await trio.sleep(tasks._SUPERSEDE_INTERVAL + SHORT)
        assert not list(superseded(GenState.SUPERSEDED))
        crowd.is_there = False
        await until(lambda: len(list(superseded(GenState.SUPERSEDED))) == 2)
