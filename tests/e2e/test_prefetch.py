"""A checkpoint that is being restored is fetched ahead of its readers."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.support.mounts import MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
SHARDS = 6


def _files(bucket: Any, form: str) -> dict[str, bytes]:
    bodies = {form % n: os.urandom(2 * MIB + n) for n in range(1, SHARDS + 1)}
    for name, body in bodies.items():
        bucket.put(name, body)
    return bodies


def test_the_second_shard_brings_the_others(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Once two are open, the rest comes by itself: it is read with the store away."""
    bodies = _files(bucket, "run/checkpoint-9/model-%05d.safetensors")
    others = _files(bucket, "data/part-%d.rec")
    mount = mounted(bucket, endpoint=link.endpoint, allow=(".",))
    for name in [*list(bodies)[:1], *list(others)[:2]]:
        assert (mount.path / name).read_bytes() == {**bodies, **others}[name]
    time.sleep(1)
    assert mount.status()["cache"]["used_bytes"] < 7 * MIB, "one shard, or no checkpoint: nothing"
    with (mount.path / list(bodies)[1]).open("rb") as file:
        assert file.read(100) == list(bodies.values())[1][:100]
    poll(lambda: mount.status()["cache"]["used_bytes"] >= (SHARDS + 2) * 2 * MIB, 20)
    time.sleep(0.2)
    link.cut()
    for name, body in bodies.items():
        assert (mount.path / name).read_bytes() == body


def test_no_more_than_fits(mounted: MountFactory, bucket: Any) -> None:
    """A checkpoint that would push out what is in the cache is not fetched ahead."""
    bodies = _files(bucket, "checkpoint-9/model-%05d.safetensors")
    options = {"cache.size": "16MiB", "cache.meta_reserve": "1MiB"}
    mount = mounted(bucket, options=options)
    for name in list(bodies)[:2]:
        assert (mount.path / name).read_bytes() == bodies[name]
    time.sleep(1)
    assert mount.status()["cache"]["used_bytes"] < 6 * MIB
