"""Which device a new file goes to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.placement import Placement
from cachefs.cache.system import DeviceKind

GIB = 1 << 30


class Stub(CacheDevice):
    """A device whose nature the test decides."""

    nature = DeviceKind.DISK
    slow = False
    broken = False

    @property
    def kind(self) -> DeviceKind:
        return self.nature

    @property
    def stalled(self) -> bool:
        return self.slow

    @property
    def healthy(self) -> bool:
        return not self.broken

    def free_bytes(self) -> int:
        return 1 << 50


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[list[SpaceLedger]]:
    """RAM of 1 GiB, two disks of 10 GiB, a network volume of 100 GiB; configured in reverse."""
    kinds = [DeviceKind.NETWORK, DeviceKind.DISK, DeviceKind.DISK, DeviceKind.RAM]
    sizes = [100 * GIB, 10 * GIB, 10 * GIB, GIB]
    made = []
    for index, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        device = Stub(index, tmp_path / str(index))
        device.nature = kind
        made.append(SpaceLedger(device, size))
    yield made
    for ledger in made:
        ledger.device.close()


def stub(ledger: SpaceLedger) -> Stub:
    assert isinstance(ledger.device, Stub)
    return ledger.device


def chosen(placement: Placement, size: int) -> int:
    ledger = placement.choose(size)
    assert ledger is not None
    return ledger.device.index


def test_the_fastest_with_room_comes_first(ledgers: list[SpaceLedger]) -> None:
    placement = Placement(ledgers)
    assert chosen(placement, 1) == 3
    assert chosen(placement, 2 * GIB) in (1, 2)
    assert chosen(placement, 50 * GIB) == 0


def test_above_the_high_watermark_the_next_kind_serves(ledgers: list[SpaceLedger]) -> None:
    ledgers[3].charge(GIB * 95 // 100)
    assert chosen(Placement(ledgers), 1) in (1, 2)


def test_equals_take_turns(ledgers: list[SpaceLedger]) -> None:
    placement = Placement(ledgers[:3])
    turns = [chosen(placement, 1) for _ in range(6)]
    assert sorted(turns[:2]) == [1, 2]
    assert turns == turns[:2] * 3


def test_turns_are_as_many_as_there_is_headroom(ledgers: list[SpaceLedger]) -> None:
    """Both are used, and full at the same time."""
    ledgers[1].reserve(1, 5 * GIB)
    placement = Placement(ledgers[:3])
    turns = [chosen(placement, 1) for _ in range(30)]
    assert turns == [2, 1, 2] * 10


def test_a_disk_that_spins_comes_after_those_that_do_not(ledgers: list[SpaceLedger]) -> None:
    for ledger in ledgers:
        ledger.device.spins = ledger is ledgers[1]
    placement = Placement(ledgers[:3])
    assert [chosen(placement, 1) for _ in range(3)] == [2, 2, 2]
    ledgers[2].charge(10 * GIB)
    assert chosen(placement, 1) == 1, "before the network"


def test_a_slow_device_comes_last_of_its_kind(ledgers: list[SpaceLedger]) -> None:
    stub(ledgers[1]).slow = True
    placement = Placement(ledgers[:3])
    assert [chosen(placement, 1) for _ in range(3)] == [2, 2, 2]
    stub(ledgers[2]).slow = True
    assert chosen(placement, 1) in (1, 2), "still faster than the network"


def test_a_broken_device_is_not_chosen(ledgers: list[SpaceLedger]) -> None:
    placement = Placement(ledgers)
    stub(ledgers[3]).broken = True
    assert chosen(placement, 1) in (1, 2)
    for ledger in ledgers:
        stub(ledger).broken = True
    assert placement.choose(1) is None


def test_when_nothing_has_room_the_roomiest_serves(ledgers: list[SpaceLedger]) -> None:
    assert chosen(Placement(ledgers), 1 << 45) == 0
    for ledger in ledgers:
        ledger.charge(ledger.limit)
    ledgers[2].credit(GIB // 2)
    assert chosen(Placement(ledgers), GIB) == 2


def test_a_device_that_was_measured_slow_gets_less(ledgers: list[SpaceLedger]) -> None:
    """In proportion, once it is less than half as fast; among disks of one kind only."""
    ledgers[0].device.write_speed = 9e12
    ledgers[1].device.write_speed, ledgers[2].device.write_speed = 100e6, 400e6
    placement = Placement(ledgers[:3])
    placed = [chosen(placement, 1) for _ in range(100)]
    assert placed.count(1) == pytest.approx(20, abs=1)
    assert placed.count(2) == pytest.approx(80, abs=1)
    ledgers[1].device.write_speed = 250e6
    placed = [chosen(placement, 1) for _ in range(100)]
    assert placed.count(1) == pytest.approx(50, abs=1)
    ledgers[1].device.write_speed = None
    placed = [chosen(placement, 1) for _ in range(100)]
    assert placed.count(1) == pytest.approx(50, abs=1), "nothing is known of it"
