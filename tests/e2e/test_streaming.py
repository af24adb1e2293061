"""Files larger than the cache are written through it: cold ranges wait in the bucket, unseen."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_trimming import allocated
from tests.support.client import Client
from tests.support.link import Link
from tests.support.mounts import Mount, MountFactory, poll
from tests.support.stores import Seaweed

MIB = 1 << 20
CACHE = 64
"""MiB."""
SMALL = {"cache.size": f"{CACHE}MiB", "cache.meta_reserve": "4MiB"}
LARGER = ("larger than the cache",)


def write_large(path: str, count: int, header: int, look_every: int) -> str:
    """Write `count` MiB, look at what is behind now and then, patch the first bytes once `header`
    MiB are there; the SHA-256 of what it is in the end."""

    def body(number: int) -> bytes:
        return random.Random(number).randbytes(1 << 20)

    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    first = body(0)
    for number in range(count):
        view = memoryview(body(number))
        while view:
            view = view[os.write(fd, view) :]
        if number == header:
            first = b"patched" * 100 + first[700:]
            assert os.pwrite(fd, first[:700], 0) == 700
            assert os.pread(fd, 1 << 20, 0) == first
        if look_every and number % look_every == look_every - 1:
            for seen in (number // 3, number // 2, number):
                expected = first if seen == 0 else body(seen)
                assert os.pread(fd, 1 << 20, seen << 20) == expected, (number, seen)
    os.close(fd)
    whole = hashlib.sha256(first)
    for number in range(1, count):
        whole.update(body(number))
    return whole.hexdigest()


def digest_of(path: str) -> str:
    whole = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            whole.update(piece)
    return whole.hexdigest()


@contextmanager
def watched(mount: Mount) -> Iterator[list[int]]:
    """The most bytes that the cache has taken meanwhile: as it says, and as its files say."""
    most, ended = [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], mount.status()["cache"]["used_bytes"])
            most[1] = max(most[1], allocated(mount.cache_dirs[0]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def hidden(bucket: Any) -> list[str]:
    """Keys of ranges that are in the bucket unseen."""
    return [key for key in bucket.keys(reserved=True) if key.startswith(".cachefs/spans/")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["tracked"])
def test_a_file_larger_than_the_cache(mounted: MountFactory, bucket: Any, client: Client) -> None:
    """Written, patched and looked at meanwhile: every byte is right, and the cache stays small."""
    mount = mounted(bucket, options=SMALL, allow=LARGER)
    with watched(mount) as most:
        written = client.run(write_large, mount.path / "huge.bin", 256, 200, 40, timeout=90)
        mount.wait(timeout=60)
    print(f"at most {most[0] / MIB:.1f} MiB, {most[1] / MIB:.1f} MiB of files")
    assert max(most) <= CACHE * MIB
    assert bucket.sha256("huge.bin") == written
    assert client.run(digest_of, mount.path / "huge.bin", timeout=60) == written
    assert mount.metric("cachefs_offloaded_bytes_total") >= (256 - CACHE) * MIB
    assert mount.status()["cache"]["offloaded_bytes"] >= (256 - CACHE) * MIB
    poll(lambda: not hidden(bucket), what="hidden objects are deleted")


@pytest.fixture
def slow_bucket(disk_dir: Path, after_mounts: ExitStack) -> tuple[Any, Link]:
    """A bucket with room for much, behind a line of 50 MiB/s."""
    server = Seaweed(disk_dir)
    after_mounts.callback(server.stop)
    server.start()
    link = after_mounts.enter_context(Link(server.endpoint))
    link.rate = 50 * MIB
    return server.fresh_bucket(), link


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lane", ["tracked"])
def test_ten_gibibytes_through_two(
    mounted: MountFactory, slow_bucket: tuple[Any, Link], client: Client
) -> None:
    """Written at the rate of the line, and never more than the cache's size is used."""
    bucket, link = slow_bucket
    size = 10 << 10
    mount = mounted(bucket, endpoint=link.endpoint, cache="disk", allow=LARGER)
    with watched(mount) as most:
        began = time.monotonic()
        written = client.run(write_large, mount.path / "huge.bin", size, 3 << 10, 0, timeout=900)
        seconds = time.monotonic() - began
        mount.wait(timeout=600)
        durable = time.monotonic() - began
    print(
        f"written in {seconds:.0f} s ({size / seconds:.1f} MiB/s), durable after {durable:.0f} s; "
        f"at most {most[0] / MIB:.1f} MiB in the cache, {most[1] / MIB:.1f} MiB of files; "
        f"{link.sent / MIB:.0f} MiB sent, {mount.status()['cache']['offloaded_bytes'] / MIB:.0f} "
        f"MiB of them while it was written"
    )
    assert max(most) <= 2048 * MIB
    assert bucket.sha256("huge.bin") == written
    assert client.run(digest_of, mount.path / "huge.bin", timeout=600) == written
    assert not bucket.uploads()
    poll(lambda: not hidden(bucket), what="hidden objects are deleted")
