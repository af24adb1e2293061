"""Kind to training: what is decided, and that the pacing does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from cachefs.errors import Throttled
from cachefs.flush.pacing import Pacing
from cachefs.flush.pressure import PRESSURE_FILES, Haste, Kindness, Pressure, Restraint
from cachefs.model.bandwidth import BandwidthPlan, Window
from cachefs.model.pacer import PacerRules

MIB = 1 << 20
RULES = PacerRules(initial_rate=100.0)


class Told:
    """Remembers the last decision."""

    def __init__(self) -> None:
        self.slots = 0
        self.bandwidth: float | None = None

    def restrain(self, slots: int, bandwidth: float | None) -> None:
        self.slots, self.bandwidth = slots, bandwidth


class Kernel:
    """Pressure files whose numbers a test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stalled = {"io": 5.0, "cpu": 9.0}
        self.write()

    def stall(self, resource: str, seconds: float) -> None:
        self.stalled[resource] += seconds
        self.write()

    def write(self) -> None:
        for resource, seconds in self.stalled.items():
            text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={seconds * 1e6:.0f}\n"
            (self.folder / resource).write_text(text + text.replace("some", "full"))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def run(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


def test_pressure_is_the_share_of_the_time_since_the_last_look(kernel: Kernel) -> None:
    pressure = Pressure("io", kernel.folder)
    assert pressure.measure(10.0) == 0.0
    kernel.stall("io", 0.5)
    assert pressure.measure(12.0) == pytest.approx(0.25)
    kernel.stall("io", 9.0)
    assert pressure.measure(13.0) == 1.0
    (kernel.folder / "io").write_text("")
    assert pressure.measure(14.0) == 1.0, "what cannot be read changes nothing"
    kernel.write()
    assert pressure.measure(19.0) == 0.0


def test_uploads_are_held_back_while_there_is_pressure(kernel: Kernel) -> None:
    told, haste = Told(), Haste()
    kindness = Kindness(16, {"io": 0.2, "cpu": 0.5})
    restraint = Restraint(kindness, told, haste=lambda: haste, folder=kernel.folder)
    restraint.decide(0.0)
    assert told.slots == 16
    kernel.stall("io", 0.3)
    restraint.decide(1.0)
    assert told.slots == restraint.slots == 8
    kernel.stall("io", 0.1)
    kernel.stall("cpu", 0.6)
    restraint.decide(2.0)
    assert told.slots == 4
    assert restraint.pressures == {"io": pytest.approx(0.1), "cpu": pytest.approx(0.6)}
    restraint.decide(3.0)
    assert told.slots == 5
    kernel.stall("cpu", 1.0)
    haste = Haste(leaving=True)
    restraint.decide(4.0)
    assert told.slots == 16, "a drain waits for nobody"


def test_a_kernel_that_does_not_tell_turns_it_off(tmp_path: Path) -> None:
    told = Told()
    with capture_logs() as lines:
        restraint = Restraint(Kindness(16, {"io": 0.2}), told, folder=tmp_path)
    assert [line["event"] for line in lines] == [
        "flush.pressure has no effect: the kernel does not tell"
    ]
    assert "No such file" in lines[0]["reason"]
    restraint.decide(0.0)
    assert told.slots == 16
    assert restraint.pressures == {}


@pytest.mark.skipif(not PRESSURE_FILES.is_dir(), reason="this kernel has no /proc/pressure")
@pytest.mark.parametrize("resource", ["io", "cpu"])
def test_the_real_files_can_be_read(resource: str) -> None:
    pressure = Pressure(resource)
    pressure.measure(0.0)
    assert 0.0 <= pressure.measure(1000.0) <= 1.0


def test_the_plan_of_the_day_decides_about_bandwidth() -> None:
    told, minute, haste = Told(), 7 * 60, Haste()
    plan = BandwidthPlan((Window(8 * 60, 18 * 60, 50),), None)
    restraint = Restraint(
        Kindness(4, bandwidth=plan), told, minute=lambda: minute, haste=lambda: haste
    )
    restraint.decide(0.0)
    assert told.bandwidth is None
    minute, haste = 8 * 60, Haste(leaving=True)
    restraint.decide(1.0)
    assert told.bandwidth == restraint.bandwidth == 50, "others use the network; drains wait, too"


def test_a_checkpoint_is_spread_over_the_time_to_the_next() -> None:
    async def test() -> None:
        told, backlog, haste = Told(), 0, Haste()
        kindness = Kindness(4, bandwidth=BandwidthPlan((), 30 * MIB), spread=0.5)
        restraint = Restraint(kindness, told, backlog=lambda: backlog, haste=lambda: haste)
        for _ in range(3):
            for _ in range(4):
                restraint.sealed(64 * MIB)
                restraint.sealed(100)  # a log, a marker: no sign of a checkpoint
                await trio.sleep(1)
            restraint.decide(trio.current_time())
            await trio.sleep(96)
            restraint.sealed(100)
        backlog = 500 * MIB
        restraint.sealed(64 * MIB)
        assert told.bandwidth == pytest.approx(10 * MIB, rel=0.01), "from the first file on"
        backlog = 1000 * MIB
        restraint.decide(trio.current_time())
        assert told.bandwidth == pytest.approx(20 * MIB, rel=0.01)
        backlog = 9000 * MIB
        restraint.decide(trio.current_time())
        assert told.bandwidth == 30 * MIB, "the limit holds as well"
        haste = Haste(awaited=True)
        restraint.decide(trio.current_time())
        assert told.bandwidth == 30 * MIB
        backlog, haste = 100 * MIB, Haste()
        restraint.decide(trio.current_time() + 60)
        assert told.bandwidth == 30 * MIB, "the time is up"

    run(test)


def test_it_decides_every_second_only_if_something_may_change(kernel: Kernel) -> None:
    async def test() -> None:
        told = Told()
        with trio.fail_after(0.5):
            await Restraint(Kindness(4, bandwidth=BandwidthPlan((), 9)), told).run()
        assert (told.slots, told.bandwidth) == (4, 9)
        busy = Restraint(Kindness(16, {"io": 0.2}), told, folder=kernel.folder)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy.run)
            for _ in range(2):
                await trio.sleep(0.5)
                kernel.stall("io", 2.0)
                await trio.sleep(0.6)
            assert told.slots == 4
            nursery.cancel_scope.cancel()

    run(test)


# ---- what the pacing makes of it ---------------------------------------------------------------


async def _send(
    pacing: Pacing, sends: int, ended: list[float], takes: float = 1.0, key: str = "a/k"
) -> None:
    async with pacing.turn(key, sends):
        await trio.sleep(takes)
    ended.append(trio.current_time())


def test_fewer_slots_hold_uploads_back_and_nobody_else() -> None:
    async def test() -> None:
        pacing, uploads, reads = Pacing(RULES, concurrency=4), list[float](), list[float]()
        pacing.restrain(1, None)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(_send, pacing, MIB, uploads)
            for _ in range(3):
                nursery.start_soon(_send, pacing, 0, reads)
        assert [round(t - began) for t in uploads] == [1, 2, 3]
        assert max(reads) - began < 1.2

    run(test)


def test_a_read_does_not_wait_for_uploads_that_wait_for_bandwidth() -> None:
    async def test() -> None:
        pacing, uploads, reads = Pacing(RULES, concurrency=2), list[float](), list[float]()
        pacing.restrain(2, 100.0)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(_send, pacing, 1000, uploads, 0.01)
            await trio.sleep(1)
            began = trio.current_time()
            await _send(pacing, 0, reads, 0.01)
            assert trio.current_time() - began < 0.5
            nursery.cancel_scope.cancel()

    run(test)


def test_who_waits_goes_on_at_once_when_the_limit_is_lifted() -> None:
    async def test() -> None:
        pacing, ended = Pacing(RULES, concurrency=8), list[float]()
        pacing.restrain(8, 1.0)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(_send, pacing, 1000, ended, 0.01)
            await trio.sleep(5)
            assert len(ended) == 1
            pacing.restrain(8, None)
            await trio.sleep(0.2)
            assert len(ended) == 3
            pacing.restrain(8, 500.0)
            began = trio.current_time()
            for _ in range(3):
                await _send(pacing, 1000, ended, 0.0)
            assert trio.current_time() - began == pytest.approx(4.0, abs=0.5)

    run(test)


def test_a_throttled_group_keeps_no_slots_from_others() -> None:
    async def test() -> None:
        pacing, slow, quick = Pacing(RULES, concurrency=4), list[float](), list[float]()

        async def throttled() -> None:
            async with pacing.turn("slow/k", 10):
                pacing.told("slow/k", Throttled("later", retry_after=60.0))

        await throttled()
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(_send, pacing, 10, slow, 0.01, "slow/k")
                nursery.start_soon(_send, pacing, 10, quick, 0.01, "quick/k")
            await trio.sleep(5)
            assert len(quick) == 50
            nursery.cancel_scope.cancel()

    run(test)
