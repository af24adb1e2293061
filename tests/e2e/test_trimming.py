"""Files larger than the cache are read through it: what was read leaves it again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import MountFactory

pytestmark = pytest.mark.either_lane
MIB = 1 << 20
SIZE, OBJECT = 256, 400
"""MiB of the cache, of the object."""


def read_all(path: str, count: int) -> list[int]:
    """Numbers of the MiB that are not what they should be."""
    wrong = []
    with open(path, "rb", buffering=0) as file:
        for number in range(count):
            body = b""
            while len(body) < 1 << 20:
                body += file.read((1 << 20) - len(body))
            if body != bytes([number % 251]) * (1 << 20):
                wrong.append(number)
    return wrong


@pytest.mark.timeout(120)
def test_reading_what_is_larger_than_the_cache(
    mounted: MountFactory, bucket: Any, client: Client
) -> None:
    """Every byte is right, twice, and the cache's files stay within its size."""
    bucket.put("huge.bin", b"".join(bytes([n % 251]) * MIB for n in range(OBJECT)))
    mount = mounted(bucket, options={"cache.size": f"{SIZE}MiB", "cache.meta_reserve": "4MiB"})
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.02):
            most = max(most, allocated(mount.cache_dirs[0]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(2):
            assert client.run(read_all, mount.path / "huge.bin", OBJECT, timeout=60) == []
    finally:
        ended.set()
        watcher.join()
    print(f"at most {most / MIB:.0f} MiB of {SIZE}")
    assert mount.metric("cachefs_evicted_bytes_total") > (OBJECT - SIZE) * MIB
    assert most <= SIZE * MIB


def allocated(cache: Path) -> int:
    total = 0
    for path in (cache / "files").glob("*/*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
