"""Files larger than the cache are read through it: what was read leaves it again."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cachefs.cache.filler import CHUNK
from tests.support.client import Client
from tests.support.mounts import Failed, MountFactory

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


def sums_of(path: str) -> list[str]:
    """SHA-256 of a file as two readers see it who begin at the same time."""
    started = [
        subprocess.Popen(["sha256sum", path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    return [each.communicate()[0].split()[0] for each in started]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dies", [False, True])
def test_what_is_on_its_way_counts(
    mounted: MountFactory, bucket: Any, client: Client, dies: bool
) -> None:
    """Of a cache that holds few requests, those under way take no more than it has, those that a
    daemon leaves behind included."""
    body, small = b"".join(bytes([n % 251]) * MIB for n in range(170)), 64 * MIB
    bucket.put("huge.bin", body)
    options = {"cache.size": "64MiB", "cache.meta_reserve": "4MiB"}
    mount = mounted(bucket, options=options, allow=("ended unexpectedly",) if dies else ())
    reading = client.start(sums_of, mount.path / "huge.bin")
    most, counted, ends = 0, 0, 2 if dies else 0
    while reading.process.poll() is None:
        with contextlib.suppress(Failed, OSError, ValueError):
            counted = max(counted, mount.status()["cache"]["used_bytes"])
        most = max(most, allocated(mount.cache_dirs[0]))
        if ends and most > 32 * MIB:
            ends -= 1
            mount.took_over(mount.kill_daemon())
        time.sleep(0.02)
    print(f"at most {most / MIB:.1f} MiB, counted {counted / MIB:.1f}")
    assert reading.result(60) == [hashlib.sha256(body).hexdigest()] * 2
    assert most <= small
    # Counting all files after a takeover errs on the careful side when more arrives meanwhile.
    assert counted <= small + dies * CHUNK


def allocated(cache: Path) -> int:
    total = 0
    for path in (cache / "files").glob("*/*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
