"""Whether a device answers quickly enough for direct calls."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.cache import heartbeat as heartbeat_module
from cachefs.cache.device import CacheDevice
from cachefs.cache.heartbeat import Heartbeat


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


class Disk:
    """Stands for the device: its writes can be held, and can fail."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.error: OSError | None = None
        self.gone: OSError | None = None
        self.writes = 0

    def write(self, fd: int, data: bytes, at: int) -> int:
        self.writes += 1
        self.go.wait(20)
        if self.error is not None:
            raise self.error
        return os.pwrite(fd, data, at)

    def check(self) -> None:
        if self.gone is not None:
            raise self.gone


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def beat(place: Path, disk: Disk) -> Iterator[Heartbeat]:
    made = Heartbeat(place / "heartbeat", disk.check, write=disk.write)
    yield made
    disk.go.set()
    made.stop()


def test_a_device_that_answers_is_quick(device: CacheDevice) -> None:
    until(lambda: device.direct_ok)
    assert device.healthy
    assert device.failure is None


def test_a_hanging_write_is_noticed_while_it_hangs(beat: Heartbeat, disk: Disk) -> None:
    until(lambda: beat.quick)
    disk.go.clear()
    until(lambda: not beat.quick, 0.5)
    assert beat.stalled
    time.sleep(0.3)
    assert not beat.quick, "as long as it hangs"
    disk.go.set()
    time.sleep(0.1)
    assert not beat.quick, "and for a while after"
    until(lambda: beat.quick)
    assert beat.slow_total >= 1


def test_a_failing_device_is_unhealthy(beat: Heartbeat, disk: Disk) -> None:
    disk.error = OSError(errno.EIO, "Input/output error")
    until(lambda: beat.failure is not None)
    assert beat.failure == "Input/output error"
    assert not beat.quick


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_is_healthy(beat: Heartbeat, disk: Disk, number: int) -> None:
    disk.error = OSError(number, "full")
    writes = disk.writes
    until(lambda: disk.writes > writes + 2)
    assert beat.failure is None
    until(lambda: beat.quick)


def exchange(one: Path, other: Path) -> None:
    """Swap two names at once: nobody finds one of them missing."""
    swap = 2  # RENAME_EXCHANGE
    assert ctypes.CDLL(None).renameat2(-100, bytes(one), -100, bytes(other), swap) == 0


def test_a_replaced_directory_is_noticed(place: Path) -> None:
    device = CacheDevice(0, place / "cache")
    until(lambda: device.direct_ok)
    (place / "other").mkdir()
    exchange(place / "cache", place / "other")

    def failed() -> bool:
        return not device.direct_ok and not device.healthy

    until(failed)
    assert "replaced" in (device.failure or "")
    device.close()


def test_nothing_is_written_while_nobody_asks(
    place: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_module, "IDLE", 0.2)
    beat = Heartbeat(place / "heartbeat", disk.check, write=disk.write)
    time.sleep(0.5)
    writes = disk.writes
    time.sleep(0.5)
    assert disk.writes == writes
    assert not beat.stalled
    time.sleep(0.2)
    assert not beat.quick, "no news: not to be trusted"
    until(lambda: beat.quick, 0.5)
    beat.stop()


def test_the_file_does_not_grow(device: CacheDevice) -> None:
    until(lambda: device.direct_ok)
    size = (device.directory / "heartbeat").stat().st_size
    time.sleep(0.35)
    assert (device.directory / "heartbeat").stat().st_size == size == 4096


def test_closing_does_not_wait_for_a_write_that_hangs(beat: Heartbeat, disk: Disk) -> None:
    disk.go.clear()
    until(lambda: beat.stalled)
    started = time.monotonic()
    beat.stop()
    assert time.monotonic() - started < 0.1


def test_a_hanging_write_does_not_keep_the_process(place: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from cachefs.cache.heartbeat import Heartbeat
Heartbeat(Path(sys.argv[1]), lambda: None, write=lambda *a: time.sleep(60) or 0)
time.sleep(0.2)
"""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", script, str(place / "beat")], check=True, timeout=20)
    assert time.monotonic() - started < 10


def test_the_descriptor_is_closed_in_the_end(place: Path) -> None:
    device = CacheDevice(0, place / "cache")
    device.close()

    def held() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass
        return [path for path in found if path.startswith(f"{place}/")]

    until(lambda: not held())
