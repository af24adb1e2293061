"""Files larger than the cache are written through it: cold ranges wait in the bucket, unseen."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_trimming import allocated
from tests.support.client import Client
from tests.support.link import Link
from tests.support.mounts import Failed, Mount, MountFactory, poll
from tests.support.stores import Seaweed

MIB = 1 << 20
CACHE = 64
"""MiB."""
SMALL = {"cache.size": f"{CACHE}MiB", "cache.meta_reserve": "4MiB"}
PATIENCE = 100
"""Seconds until the hidden objects of a killed daemon are gone: its requests may be under way for a
minute, and the next look may come a while after that."""
LARGER = ("larger than the cache",)


def write_large(path: str, count: int, header: int, look_every: int) -> list[Any]:
    """Write `count` MiB, look at what is behind now and then, patch the first bytes once `header`
    MiB are there; the SHA-256 of what it is in the end, and the seconds that it took."""
    pool, began = random.Random(1).randbytes(2 << 20), time.monotonic()

    def body(number: int) -> bytes:
        return number.to_bytes(8, "big") + pool[number * 4099 % (1 << 20) :][: (1 << 20) - 8]

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
    seconds = time.monotonic() - began
    whole = hashlib.sha256(first)
    for number in range(1, count):
        whole.update(body(number))
    return [whole.hexdigest(), seconds]


def digest_of(path: str) -> str:
    whole = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(1 << 20):
            whole.update(piece)
    return whole.hexdigest()


@contextmanager
def watched(mount: Mount, every: float = 0.02) -> Iterator[list[int]]:
    """The most bytes that the cache has taken meanwhile: as it says, and as its files say."""
    most, ended = [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(every):
            with suppress(
                Failed, OSError, ValueError, KeyError
            ):  # while one daemon follows another
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


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lane", ["tracked"])
def test_a_file_larger_than_the_cache(mounted: MountFactory, bucket: Any, client: Client) -> None:
    """Written, patched and looked at meanwhile: every byte is right, and the cache stays small."""
    mount = mounted(bucket, options=SMALL, allow=LARGER)
    with watched(mount) as most:
        written, _ = client.run(write_large, mount.path / "huge.bin", 256, 200, 40, timeout=90)
        mount.wait(timeout=60)
    print(f"at most {most[0] / MIB:.1f} MiB, {most[1] / MIB:.1f} MiB of files")
    assert max(most) <= CACHE * MIB
    assert bucket.sha256("huge.bin") == written
    assert client.run(digest_of, mount.path / "huge.bin", timeout=60) == written
    assert mount.metric("cachefs_offloaded_bytes_total") >= (256 - CACHE) * MIB
    assert mount.status()["cache"]["offloaded_bytes"] >= (256 - CACHE) * MIB
    poll(lambda: not hidden(bucket), PATIENCE, what="hidden objects are deleted")


def write_with_holes(path: str) -> int:
    """Each second block of 4 KiB, on the disk now and then: so its filesystem lists each of them,
    and takes blocks for the lists. How many there were until there was no room."""
    fd, count = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), 0
    try:
        while os.pwrite(fd, count.to_bytes(4, "big") * 1024, count << 13) == 4096:
            count += 1
            if count % 1024 == 0:
                os.fsync(fd)
    except OSError as error:
        assert error.errno == 28
    os.fsync(fd)
    os.close(fd)
    return count


@pytest.mark.parametrize("lane", ["tracked"])
def test_what_lists_the_ranges_of_a_file_has_room_too(
    mounted: MountFactory, dir_store: Any, client: Client
) -> None:
    """It counts as the file's, comes after the bytes, and fits into the cache with them."""
    options = {"cache.size": "16MiB", "cache.meta_reserve": "4MiB"}
    mount = mounted(dir_store, cache="disk", options=options, allow=("space|room|full",))
    with watched(mount) as most:
        blocks = client.run(write_with_holes, mount.path / "sparse.bin")
        mount.wait()
    print(f"at most {most[0] >> 10} KiB, {most[1] >> 10} KiB of files, {blocks} blocks")
    assert max(most) <= 16 * MIB
    assert blocks > 0.98 * 16 * 256
    body = dir_store.get("sparse.bin")
    assert all(body[n << 13 : (n << 13) + 4] == n.to_bytes(4, "big") for n in range(blocks))


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
    with watched(mount, 0.2) as most:
        began = time.monotonic()
        arguments = mount.path / "huge.bin", size, 3 << 10, 0
        written, seconds = client.run(write_large, *arguments, timeout=900)
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
    poll(lambda: not hidden(bucket), PATIENCE, what="hidden objects are deleted")


def play_with(path: str, twin: str, seed: int, rounds: int) -> list[str]:  # noqa: C901
    """Do the same to a file and to an ordinary one, both larger than the cache soon; what
    differed."""
    rng, libc = random.Random(seed), ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    files = [os.open(each, os.O_RDWR | os.O_CREAT, 0o644) for each in (path, twin)]
    top, wrong = 150 << 20, []

    def write(size: int, at: int, length: int) -> None:
        body = rng.randbytes(length)
        for fd in files:
            assert os.pwrite(fd, body, at) == length

    def read(size: int, at: int, length: int) -> None:
        if os.pread(files[0], length, at // 2) != os.pread(files[1], length, at // 2):
            wrong.append(f"bytes from {at // 2} on")

    def cut(size: int, at: int, length: int) -> None:
        less = rng.choice([0, 5, 9 << 20, 20 << 20])
        for fd in files:
            os.ftruncate(fd, max(0, size - less))

    def grow(size: int, at: int, length: int) -> None:
        for fd in files:
            os.ftruncate(fd, min(top, size + (6 << 20)) if size < top else size)

    def sync(size: int, at: int, length: int) -> None:
        os.fsync(files[0])

    def reopen(size: int, at: int, length: int) -> None:
        os.close(files[0])
        files[0] = os.open(path, os.O_RDWR)

    def punch(size: int, at: int, length: int) -> None:
        if libc.fallocate(files[0], 3, at // 2, length) == 0:
            libc.fallocate(files[1], 3, at // 2, length)

    for number in range(rounds):
        act = rng.choice([write] * 9 + [read] * 5 + [cut, grow, sync, reopen, punch])
        size = os.fstat(files[1]).st_size
        at = rng.choice([size, size, size, rng.randrange(size + 1), rng.randrange(size + 1)])
        act(size, min(at, top), rng.choice([700, 4096, 1 << 20, 3 << 20, 5 << 20]))
        if os.fstat(files[0]).st_size != os.fstat(files[1]).st_size:
            wrong.append(f"{number}: size after {act.__name__}")
    for fd in files:
        os.close(fd)
    return wrong


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lane", ["tracked"])
@pytest.mark.parametrize("seed", [1])
def test_whatever_is_done_to_it(
    mounted: MountFactory, dir_store: Any, client: Client, disk_dir: Path, seed: int
) -> None:
    """Writes anywhere, reads, cuts, holes, closing and opening again before it is uploaded; it was
    in the bucket before."""
    seed = int(os.environ.get("CACHEFS_TEST_SEED", seed))
    options = {**SMALL, "flush.settle": "10min", "flush.settle_max": "10min"}
    mount = mounted(dir_store, options=options, allow=LARGER)
    twin = disk_dir / "twin"
    for place in (twin, dir_store.path / "f.bin"):
        place.write_bytes(bytes(range(256)) * (3 << 12))
    with watched(mount) as most:
        assert client.run(play_with, mount.path / "f.bin", twin, seed, 200, timeout=60) == []
        assert client.run(digest_of, mount.path / "f.bin") == client.run(digest_of, twin)
        mount.wait()
    print(f"at most {most[0] / MIB:.1f} MiB; {mount.metric('cachefs_offloaded_bytes_total')}")
    assert hashlib.sha256(dir_store.get("f.bin")).hexdigest() == client.run(digest_of, twin)
    assert client.run(digest_of, mount.path / "f.bin") == client.run(digest_of, twin)
    assert max(most) <= CACHE * MIB
    assert mount.metric("cachefs_offloaded_bytes_total") > 0


def write_slowly(path: str, count: int, told: str) -> str:
    """Write `count` MiB, telling how far it is; the SHA-256."""
    whole, fd = hashlib.sha256(), os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    for number in range(count):
        body = random.Random(hash(path) + number).randbytes(1 << 20)
        whole.update(body)
        view = memoryview(body)
        while view:
            view = view[os.write(fd, view) :]
        Path(told).write_text(str(number))
    os.close(fd)
    return whole.hexdigest()


def reached(told: Path, number: int) -> None:
    """Wait until a writer is that far."""
    poll(lambda: told.exists() and int(told.read_text() or 0) >= number, 60, what=f"{number} MiB")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("lane", ["tracked"])
def test_two_at_once_that_move_while_daemons_die(
    mounted: MountFactory, dir_store: Any, client: Client, disk_dir: Path
) -> None:
    """Two writers, one file renamed and one linked meanwhile, SIGKILL twice: nothing is missed."""
    mount = mounted(dir_store, options=SMALL, allow=(*LARGER, "ended unexpectedly"))
    told = [disk_dir / "a", disk_dir / "b"]
    (mount.path / "d").mkdir()
    one, other = (
        client.start(write_slowly, mount.path / name, 120, each)
        for name, each in zip(("d/a.bin", "b.bin"), told, strict=True)
    )
    reached(told[0], 50)
    os.rename(mount.path / "d", mount.path / "e")
    mount.took_over(mount.kill_daemon())
    reached(told[0], 80)
    os.link(mount.path / "b.bin", mount.path / "c.bin")
    os.rename(mount.path / "e/a.bin", mount.path / "a.bin")
    mount.took_over(mount.kill_daemon())
    first, second = one.result(100), other.result(100)
    mount.wait(timeout=60)
    keys = dir_store.keys()
    shown = {key: hashlib.sha256(dir_store.get(key)).hexdigest() for key in keys}
    assert shown == {"a.bin": first, "b.bin": second, "c.bin": second}
    for name, expected in (("a.bin", first), ("b.bin", second)):
        assert client.run(digest_of, mount.path / name) == expected


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lane", ["tracked"])
def test_a_daemon_that_comes_back_finds_all_of_it(
    mounted: MountFactory, bucket: Any, client: Client, disk_dir: Path
) -> None:
    """Mount and writer end halfway: what was written is held, readable, and goes out on demand."""
    mount = mounted(bucket, options=SMALL, allow=(*LARGER, "held"))
    told = disk_dir / "told"
    writer = client.start(write_slowly, mount.path / "f.bin", 400, told)
    reached(told, 100)
    mount.crash()
    with pytest.raises((OSError, AssertionError)):
        writer.result(30)
    assert hidden(bucket)
    mount.start()
    size = (mount.path / "f.bin").stat().st_size
    assert size >= 100 * MIB
    assert mount.xattr("state", "f.bin") == "held"
    before = client.run(digest_of, mount.path / "f.bin", timeout=60)
    os.close(os.open(mount.path / "f.bin", os.O_WRONLY))
    mount.wait(timeout=60)
    assert bucket.sha256("f.bin") == before
    assert bucket.sizes()["f.bin"] == size
    poll(lambda: not hidden(bucket), PATIENCE, what="hidden objects are deleted")
