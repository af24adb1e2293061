"""Speeds of cache devices: measured where it is of use, once, and kept."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cachefs.cache import identity
from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.speed import BYTES
from cachefs.cache.system import DeviceKind
from cachefs.daemon.speeds import Speeds
from cachefs.meta import Meta


class Disk(CacheDevice):
    """A disk, wherever it is."""

    nature = DeviceKind.DISK

    @property
    def kind(self) -> DeviceKind:
        return self.nature


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[list[SpaceLedger]]:
    made = [SpaceLedger(Disk(n, tmp_path / str(n)), 1 << 30) for n in range(3)]
    for each in made:
        identity.give(each.device.directory)
    yield made
    for each in made:
        each.device.close()


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[Meta]:
    made = Meta(tmp_path / "db")
    yield made
    made.close()


def measured(meta: Meta, ledgers: list[SpaceLedger]) -> list[str]:
    """Measure what is not known; names of the directories that were."""
    asked: list[str] = []

    def measure(directory: Path) -> float:
        asked.append(directory.name)
        if directory.name == "2":
            raise OSError(errno.EIO, "broken")
        return 1e8 * (1 + int(directory.name))

    speeds = Speeds(meta, ledgers, measure=measure, after=0.0)
    speeds.recall()
    trio.run(speeds.run)
    return asked


def test_once_and_kept(meta: Meta, ledgers: list[SpaceLedger]) -> None:
    assert measured(meta, ledgers) == ["0", "1", "2"]
    assert [each.device.write_speed for each in ledgers] == [1e8, 2e8, None]
    assert [each.promised for each in ledgers] == [0, 0, 0]
    for each in ledgers:
        each.device.write_speed = None
    assert measured(meta, ledgers) == ["2"], "of the others it is known"
    assert [each.device.write_speed for each in ledgers] == [1e8, 2e8, None]


def test_not_without_a_second_one_of_its_kind(meta: Meta, ledgers: list[SpaceLedger]) -> None:
    assert isinstance(ledgers[0].device, Disk)
    ledgers[0].device.nature = DeviceKind.NETWORK
    ledgers[1].device.spins = not ledgers[2].device.spins
    assert measured(meta, ledgers) == []


def test_not_where_there_is_no_room(meta: Meta, ledgers: list[SpaceLedger]) -> None:
    ledgers[0].charge(ledgers[0].headroom() - BYTES + 1)
    assert measured(meta, ledgers) == ["1", "2"]


def test_a_setting_that_is_none(meta: Meta, ledgers: list[SpaceLedger]) -> None:
    meta.set_setting("device_speeds", "[1]")
    assert measured(meta, ledgers) == ["0", "1", "2"]
