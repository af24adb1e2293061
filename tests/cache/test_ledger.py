"""The space ledger: what fits, who waits, what passthrough writers set aside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger, resolve_limits
from cachefs.cache.reserve import MetadataReserve
from tests.cache.conftest import SMALL

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def ledger(device: CacheDevice) -> SpaceLedger:
    """A ledger of 100 bytes, so that numbers are easy to read; the filesystem has far more."""
    return SpaceLedger(device, 100)


def write(device: CacheDevice, gen: int, size: int) -> None:
    fd = device.open(gen, os.O_RDWR) if device.exists(gen) else device.create(gen)
    os.pwrite(fd, b"x" * size, 0)
    os.close(fd)


# ---- arithmetic


def test_headroom_is_what_nobody_has(ledger: SpaceLedger) -> None:
    assert ledger.headroom() == 100
    ledger.charge(30)
    assert ledger.reserve(1, 20)
    assert ledger.try_admit(10)
    assert ledger.headroom() == 40
    ledger.credit(30)
    assert (ledger.used, ledger.headroom()) == (0, 70)


def test_the_filesystem_limits_the_cache_too(small_device: CacheDevice) -> None:
    ledger = SpaceLedger(small_device, 1 << 40)
    assert ledger.headroom() <= SMALL
    ballast = small_device.directory.parent / "ballast"
    ballast.write_bytes(b"x" * (6 * MIB))
    trio.run(ledger.poll)
    assert ledger.headroom() <= 2 * MIB, "other users of the disk count"
    ballast.unlink()
    trio.run(ledger.poll)
    assert ledger.headroom() > 7 * MIB


def test_free_space_follows_charges_between_readings(small_device: CacheDevice) -> None:
    ledger = SpaceLedger(small_device, 1 << 40)
    before = ledger.headroom()
    ledger.charge(MIB)
    assert ledger.headroom() == before - MIB
    ledger.credit(MIB)
    assert ledger.headroom() == before


def test_used_never_falls_below_nothing(ledger: SpaceLedger) -> None:
    ledger.charge(10)
    ledger.credit(50)
    assert ledger.used == 0


def test_passing_the_high_watermark_calls_the_reaper(ledger: SpaceLedger) -> None:
    ledger.charge(89)
    assert not ledger.pressure.is_set()
    ledger.charge(2)
    assert ledger.above_high
    assert ledger.pressure.is_set()


# ---- admission


def test_admission_stops_exactly_at_the_limit(ledger: SpaceLedger) -> None:
    assert ledger.try_admit(60)
    assert ledger.try_admit(40)
    assert not ledger.try_admit(1)
    ledger.settle(60, 60)
    assert not ledger.try_admit(1)
    ledger.settle(40, 0)
    assert (ledger.used, ledger.promised) == (60, 0)
    assert ledger.try_admit(40)


def test_waiting_ends_when_room_is_made(ledger: SpaceLedger) -> None:
    async def main() -> None:
        ledger.charge(95)
        admitted = trio.Event()

        async def writer() -> None:
            assert await ledger.wait_for_room(20)
            admitted.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer)
            await trio.testing.wait_all_tasks_blocked()
            ledger.credit(10)
            await trio.testing.wait_all_tasks_blocked()
            assert not admitted.is_set()
            ledger.credit(5)
            await trio.testing.wait_all_tasks_blocked()
            assert admitted.is_set()
        assert ledger.promised == 20

    trio.run(main)


def test_waiting_is_fair(ledger: SpaceLedger) -> None:
    """A large request is served before small ones that came later; try_admit passes none."""

    async def main() -> None:
        ledger.charge(100)
        order: list[int] = []

        async def writer(nbytes: int) -> None:
            await ledger.wait_for_room(nbytes)
            order.append(nbytes)

        async with trio.open_nursery() as nursery:
            for nbytes in (50, 1, 2):
                nursery.start_soon(writer, nbytes)
                await trio.testing.wait_all_tasks_blocked()
            ledger.credit(40)
            await trio.testing.wait_all_tasks_blocked()
            assert not order
            assert not ledger.try_admit(1)
            ledger.credit(60)
        assert order == [50, 1, 2]

    trio.run(main)


def test_a_cancelled_waiter_lets_the_next_one_in(ledger: SpaceLedger) -> None:
    async def main() -> None:
        ledger.charge(90)
        scope = trio.CancelScope()
        done = trio.Event()

        async def large() -> None:
            with scope:
                await ledger.wait_for_room(50)

        async def small() -> None:
            await ledger.wait_for_room(5)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(large)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(small)
            await trio.testing.wait_all_tasks_blocked()
            assert not done.is_set()
            scope.cancel()
        assert ledger.promised == 5
        assert ledger.try_admit(5), "nobody is left in the queue"

    trio.run(main)


def test_a_cancel_event_ends_the_wait(ledger: SpaceLedger) -> None:
    async def main() -> None:
        ledger.charge(100)
        cancel = trio.Event()
        async with trio.open_nursery() as nursery:

            async def writer() -> None:
                assert not await ledger.wait_for_room(50, cancel)

            nursery.start_soon(writer)
            await trio.testing.wait_all_tasks_blocked()
            cancel.set()
        assert ledger.promised == 0

    trio.run(main)


def test_a_request_beyond_the_whole_cache_is_refused_at_once(ledger: SpaceLedger) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="space") as caught:
            await ledger.wait_for_room(101)
        assert caught.value.errno == errno.ENOSPC

    trio.run(main)


def test_room_made_by_others_on_the_disk_is_noticed(small_device: CacheDevice) -> None:
    async def main() -> None:
        ballast = small_device.directory.parent / "ballast"
        ballast.write_bytes(b"x" * (7 * MIB))
        ledger = SpaceLedger(small_device, SMALL)
        async with trio.open_nursery() as nursery:

            async def writer() -> None:
                with trio.fail_after(10):
                    assert await ledger.wait_for_room(4 * MIB)

            nursery.start_soon(writer)
            await trio.sleep(0.1)
            assert ledger.promised == 0
            ballast.unlink()
        assert ledger.promised == 4 * MIB

    trio.run(main)


def test_writers_stay_below_the_limit_under_load(ledger: SpaceLedger) -> None:
    async def main() -> None:
        peak = 0

        async def writer(nbytes: int) -> None:
            nonlocal peak
            for _ in range(50):
                if not ledger.try_admit(nbytes):
                    await ledger.wait_for_room(nbytes)
                await trio.lowlevel.checkpoint()
                ledger.settle(nbytes, nbytes)
                peak = max(peak, ledger.used + ledger.promised)
                await trio.lowlevel.checkpoint()
                ledger.credit(nbytes)

        async with trio.open_nursery() as nursery:
            for nbytes in (1, 7, 30, 60, 99):
                nursery.start_soon(writer, nbytes)
        assert peak <= 100
        assert (ledger.used, ledger.promised) == (0, 0)

    trio.run(main)


# ---- opening


def test_opening_waits_only_when_nothing_can_be_evicted(ledger: SpaceLedger) -> None:
    async def main() -> None:
        ledger.charge(95)
        assert ledger.may_open(), "the reaper may still make room"
        ledger.exhausted = True
        assert not ledger.may_open()
        async with trio.open_nursery() as nursery:

            async def opener() -> None:
                assert await ledger.wait_to_open()

            nursery.start_soon(opener)
            await trio.testing.wait_all_tasks_blocked()
            ledger.credit(10)
        cancel = trio.Event()
        cancel.set()
        ledger.charge(10)
        assert not await ledger.wait_to_open(cancel)

    trio.run(main)


# ---- reservations


def test_a_reservation_turns_into_use_as_the_file_grows(ledger: SpaceLedger) -> None:
    assert ledger.reserve(1, 60)
    assert not ledger.reserve(2, 41)
    assert not ledger.note_growth(1, 25)
    assert (ledger.used, ledger.reserved, ledger.headroom()) == (25, 35, 40)
    ledger.release(1)
    ledger.release(1)
    assert (ledger.used, ledger.reserved, ledger.headroom()) == (25, 0, 75)


def test_an_overrun_is_told_once_and_counted(ledger: SpaceLedger) -> None:
    ledger.charge(75)
    ledger.reserve(1, 10)
    assert not ledger.note_growth(1, 10)
    assert ledger.note_growth(1, 16)
    assert not ledger.note_growth(1, 20)
    assert ledger.overruns_total == 1
    assert (ledger.used, ledger.reserved) == (95, 0)
    ledger.release(1)
    assert ledger.used == 95


def test_a_writer_gets_more_while_there_is_headroom(ledger: SpaceLedger) -> None:
    ledger.reserve(1, 10)
    assert not ledger.note_growth(1, 12)
    assert (ledger.used, ledger.reserved, ledger.overruns_total) == (12, 12, 0)
    assert not ledger.note_growth(1, 30)
    assert (ledger.used, ledger.reserved) == (30, 30)
    assert ledger.note_growth(1, 61)
    assert (ledger.used, ledger.reserved, ledger.overruns_total) == (61, 0, 1)


def test_a_truncated_passthrough_file_gives_room_back(ledger: SpaceLedger) -> None:
    ledger.reserve(1, 50)
    ledger.note_growth(1, 40)
    ledger.note_growth(1, 0)
    assert (ledger.used, ledger.reserved) == (0, 50)


def test_reserving_again_changes_the_size(ledger: SpaceLedger) -> None:
    ledger.reserve(1, 20)
    ledger.note_growth(1, 15)
    assert ledger.reserve(1, 40)
    assert ledger.reserved == 25
    assert not ledger.reserve(1, 101)
    assert ledger.reserved == 25
    assert ledger.reserve(1, 10)
    assert ledger.reserved == 0


def test_growth_of_others_is_not_counted_twice(ledger: SpaceLedger) -> None:
    ledger.charge(10)
    assert not ledger.note_growth(99, 50)
    assert ledger.used == 10


def test_polling_reads_the_cache_files(device: CacheDevice) -> None:
    ledger = SpaceLedger(device, 520 * KIB)
    write(device, 1, 256 * KIB)
    write(device, 2, 16 * KIB)
    ledger.reserve(1, 128 * KIB)
    ledger.reserve(2, 128 * KIB)
    ledger.reserve(3, 128 * KIB)
    assert trio.run(ledger.poll) == [1]
    assert trio.run(ledger.poll) == []
    assert ledger.used == device.allocated_total()
    assert ledger.reservations()[1].overrun
    assert ledger.reserved == 112 * KIB + 128 * KIB


# ---- rescans


def test_a_rescan_finds_what_is_there(device: CacheDevice) -> None:
    async def main() -> None:
        ledger = SpaceLedger(device, 10 * MIB)
        write(device, 1, 100 * KIB)
        error = await ledger.rescan()
        assert ledger.used == error == device.allocated_total() > 0
        assert await ledger.rescan() == 0
        ledger.charge(5 * KIB)
        assert await ledger.rescan() == -5 * KIB

    trio.run(main)


def test_growth_during_a_rescan_is_kept(
    device: CacheDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        ledger = SpaceLedger(device, 10 * MIB)
        await ledger.rescan()

        def scan() -> int:
            trio.from_thread.run_sync(ledger.charge, 4096)
            return 0

        assert ledger.undisturbed
        monkeypatch.setattr(device, "allocated_total", scan)
        await ledger.rescan()
        assert ledger.used == 4096
        assert not ledger.undisturbed

    trio.run(main)


def test_what_shrinks_during_a_rescan_hides_no_growth(
    device: CacheDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that goes before the scan comes to it, and one that appears behind the scan."""

    async def main() -> None:
        ledger = SpaceLedger(device, 10 * MIB)
        ledger.charge(4096)

        def scan() -> int:
            trio.from_thread.run_sync(ledger.credit, 4096)
            trio.from_thread.run_sync(ledger.charge, 4096)
            return 0

        monkeypatch.setattr(device, "allocated_total", scan)
        await ledger.rescan()
        assert ledger.used == 4096

    trio.run(main)


# ---- the database's reserve


def test_the_reserve_is_allocated_and_given_back(device: CacheDevice) -> None:
    ledger = SpaceLedger(device, 10 * MIB, meta_reserve=MIB)
    assert not ledger.reserve_held
    assert ledger.restore_reserve()
    file = device.meta_dir / "reserve"
    assert file.stat().st_blocks * 512 >= MIB
    ledger.release_reserve()
    assert file.stat().st_blocks == 0
    assert not ledger.reserve_held
    assert ledger.restore_reserve()


def test_the_reserve_makes_a_full_disk_writable(small_device: CacheDevice) -> None:
    reserve = MetadataReserve(small_device.meta_dir / "reserve", MIB)
    assert reserve.restore()
    fd = small_device.create(1)
    with pytest.raises(OSError, match="space"):
        while True:
            os.write(fd, b"x" * 65536)
    database = small_device.meta_dir / "database"
    with pytest.raises(OSError, match="space"):
        database.write_bytes(b"x" * 65536)
    reserve.release()
    database.write_bytes(b"x" * 65536)
    assert not reserve.restore(), "no room for all of it"
    assert not reserve.held
    database.write_bytes(b"x" * (MIB // 2))
    os.ftruncate(fd, 0)
    os.close(fd)
    assert reserve.restore()


def test_no_reserve_is_needed_where_no_database_is(device: CacheDevice) -> None:
    ledger = SpaceLedger(device, 100)
    assert ledger.reserve_held
    assert ledger.restore_reserve()
    ledger.release_reserve()
    assert not (device.meta_dir / "reserve").exists()


# ---- limits


@pytest.fixture
def pair(place: Path) -> Iterator[list[CacheDevice]]:
    devices = [CacheDevice(0, place / "a"), CacheDevice(1, place / "b")]
    yield devices
    for each in devices:
        each.close()


def free(monkeypatch: pytest.MonkeyPatch, device: CacheDevice, nbytes: int) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda: nbytes)


def test_the_default_is_most_of_what_is_free(
    pair: list[CacheDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, pair[0], 1000)
    free(monkeypatch, pair[1], 3000)
    assert resolve_limits(pair, None) == [900, 2700]


def test_a_size_is_divided_by_what_is_available(
    pair: list[CacheDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, pair[0], 1000)
    free(monkeypatch, pair[1], 3000)
    assert resolve_limits(pair, 2000) == [500, 1500]
    free(monkeypatch, pair[0], 600)
    free(monkeypatch, pair[1], 1800)
    assert resolve_limits(pair, 2000, used=[400, 1200]) == [500, 1500]


def test_a_device_can_have_a_limit_of_its_own(
    pair: list[CacheDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, pair[0], 1000)
    free(monkeypatch, pair[1], 1000)
    pair[0].size_limit = 100
    assert resolve_limits(pair, 1000) == [100, 500]


def test_full_devices_divide_a_size_evenly(
    pair: list[CacheDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, pair[0], 0)
    free(monkeypatch, pair[1], 0)
    assert resolve_limits(pair, 1000) == [500, 500]
