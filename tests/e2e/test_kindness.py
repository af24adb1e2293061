"""Uploads that leave room for training: a limit on bandwidth, pressure, and spreading."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import Mount, MountFactory

pytestmark = pytest.mark.either_lane

MIB = 1 << 20


def save(folder: Path, files: int, size: int = 2 * MIB) -> None:
    folder.mkdir()
    for number in range(files):
        (folder / f"shard-{number}.bin").write_bytes(os.urandom(size))


def seconds_of_wait(mount: Mount) -> float:
    began = time.monotonic()
    mount.wait()
    return time.monotonic() - began


def test_bandwidth_is_limited(mounted: MountFactory, bucket: Any) -> None:
    """24 MiB at 8 MiB/s, while the mount answers as ever."""
    mount = mounted(bucket, options={"flush.bandwidth_limit": "00:00-12:00=8MiB,otherwise=8MiB/s"})
    began = time.monotonic()
    save(mount.path / "step", 12)
    looked = time.monotonic()
    assert not (mount.path / "never-seen-before").exists()
    assert time.monotonic() - looked < 1.5
    mount.wait()
    assert time.monotonic() - began > 1.5
    assert mount.metric("cachefs_bandwidth_limit_bytes") == 8 * MIB
    assert len(bucket.keys()) == 12


@pytest.mark.skipif(not Path("/proc/pressure").is_dir(), reason="this kernel counts no pressure")
def test_pressure_holds_back_and_loses_nothing(mounted: MountFactory, bucket: Any) -> None:
    """With thresholds that any machine exceeds, uploads go on one at a time."""
    thresholds = {"flush.pressure_cpu": "0.000001", "flush.pressure_io": "0.000001"}
    mount = mounted(bucket, options={"flush.pressure": "both", **thresholds})
    time.sleep(4.5)
    save(mount.path / "step", 8)
    assert mount.metric('cachefs_pressure_ratio{resource="cpu"}') > 0
    assert mount.metric("cachefs_upload_slots") < 16
    mount.wait()
    assert len(bucket.keys()) == 8
    assert mount.unmount() == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_upload_is_spread_until_somebody_waits(mounted: MountFactory, bucket: Any) -> None:
    """The third checkpoint knows when the fourth will come."""
    mount = mounted(bucket, options={"flush.spread": "0.9"})
    for number in range(2):
        save(mount.path / f"step-{number}", 4)
        time.sleep(13)
        assert mount.status()["dirty_bytes"] == 0
    save(mount.path / "step-2", 16)
    time.sleep(3)
    left = mount.status()["dirty_bytes"]
    assert 8 * MIB <= left <= 30 * MIB
    assert 0 < mount.metric("cachefs_bandwidth_limit_bytes") < 20 * MIB
    assert seconds_of_wait(mount) < 4
