"""A save that will not fit is told of before it begins."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
SMALL = {"cache.size": "64MiB", "cache.meta_reserve": "4MiB"}
SHARDS = 5


def save(mount: Mount, step: int) -> None:
    folder = mount.path / f"step-{step}"
    folder.mkdir()
    for number in range(SHARDS):
        (folder / f"{number}.safetensors").write_bytes(bytes([step]) * 5 * MIB)
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.timeout(120)
def test_before_the_save_that_would_not_fit(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Two checkpoints of 25 MiB tell size and interval; then the store is away, and two more fill
    the cache of 60 and more: nobody waits yet, and the fifth is known not to fit."""
    away = "next checkpoint|store|transient|retry|degraded|reach|late|again"
    mount = mounted(bucket, endpoint=link.endpoint, options=SMALL, allow=(away,))
    for step in (1, 2):
        save(mount, step)
        mount.wait(timeout=60)
        time.sleep(1)
    told = poll(lambda: mount.status()["cache"]["next_checkpoint"], 10)
    assert told["expected_bytes"] == SHARDS * 5 * MIB + 2
    assert told["fits"] is True
    assert mount.metric("cachefs_next_checkpoint_fits") == 1
    link.cut()
    for step in (3, 4):
        save(mount, step)
    poll(lambda: mount.status()["cache"]["next_checkpoint"]["fits"] is False, 30)
    told = mount.status()["cache"]
    assert told["next_checkpoint"]["room_bytes"] < SHARDS * 5 * MIB
    assert told["waiting_writers"] == 0, "it is told before anybody waits"
    assert mount.metric("cachefs_next_checkpoint_fits") == 0
    assert "the next checkpoint will not fit: its writer will wait" in mount.log
    assert "the next checkpoint (25" in mount.cli("status", mount.path).stdout
    link.mend()
    mount.wait(timeout=60)
    poll(lambda: mount.status()["cache"]["next_checkpoint"]["fits"] is True, 30)
    save(mount, 5)
    mount.wait(timeout=60)
