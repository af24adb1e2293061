"""A checkpoint that is being restored is fetched ahead of its readers."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from cachefs.vfs.prefetch import WHOLE
from tests.support.mounts import Mount, MountFactory, poll

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


def _open_two(mount: Mount, names: list[str]) -> None:
    """So that it is clear that somebody restores."""
    for name in names[:2]:
        (mount.path / name).read_bytes()


@pytest.mark.parametrize("lane", ["passthrough"])
@pytest.mark.parametrize("form", ["run/checkpoint-9/%d.safetensors", "data/part-%d.bin"])
def test_shards_are_read_in_the_passthrough_lane(
    mounted: MountFactory, bucket: Any, form: str
) -> None:
    """From the third on, opening one takes until all of it is here."""
    bodies = _files(bucket, form)
    mount = mounted(bucket)
    os.listdir((mount.path / form).parent)
    _open_two(mount, list(bodies))
    for name in list(bodies)[2:]:
        with (mount.path / name).open("rb") as file:
            assert mount.xattr("lane", name) == "passthrough"
            assert file.read() == bodies[name]


def test_opening_does_not_wait_long(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """A store that does not answer keeps nobody in `open`, and nobody twice."""
    bodies = _files(bucket, "data/part-%d.bin")
    mount = mounted(bucket, endpoint=link.endpoint, allow=(".",))
    names = list(bodies)
    _open_two(mount, names)
    for name in names:
        os.stat(mount.path / name)
    link.silent = True
    for name in names[2:]:
        fd = os.open(mount.path / name, os.O_RDONLY)
        assert mount.xattr("lane", name) == "tracked"
        os.close(fd)
    link.silent = False


@pytest.mark.parametrize("lane", ["passthrough"])
def test_a_large_file_is_not_kept_twice(mounted: MountFactory, bucket: Any) -> None:
    """What is read while it is fetched goes to its reader past the kernel's cache of the mount; it
    can be mapped all the same."""
    body = os.urandom(WHOLE + MIB + 1)
    bucket.put("data/large.bin", body)
    mount = mounted(bucket, options={"cache.whole_wait": "0s"})
    path = mount.path / "data/large.bin"
    with path.open("rb", buffering=0) as file:
        before = mount.metric("cachefs_read_bytes_total")
        for _ in range(20):
            assert os.pread(file.fileno(), MIB, 0) == body[:MIB]
        for at in (1, 4095, MIB + 4097, len(body) - MIB + 5):
            assert os.pread(file.fileno(), MIB, at) == body[at : at + MIB]
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            assert view[-MIB:] == body[-MIB:]
        assert file.readall() == body
    assert mount.metric("cachefs_read_bytes_total") - before >= 20 * MIB
    with path.open("rb") as again:
        assert mount.xattr("lane", "data/large.bin") == "passthrough"
        assert again.read() == body


@pytest.mark.parametrize("lane", ["passthrough"])
def test_a_large_file_opens_when_it_is_here(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """The first and only one of its directory, whoever opens it; and it needs no store any more."""
    body = os.urandom(WHOLE + MIB + 1)
    bucket.put("data/large.bin", body)
    mount = mounted(bucket, options={"cache.whole_wait": "60s"}, endpoint=link.endpoint)
    path = mount.path / "data/large.bin"
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            one, other = map(stack.enter_context, pool.map(_opened, [path] * 2))
        assert mount.xattr("lane", "data/large.bin") == "passthrough"
        link.silent = True
        assert one.read() == body
        assert other.read() == body
    assert mount.metric("cachefs_download_bytes_total") == len(body)
    link.silent = False


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


def _large_and_slow(
    mounted: MountFactory, bucket: Any, link: Any, wait: str, more: int = MIB
) -> tuple[Any, bytes]:
    """A file, and a store that takes minutes for it."""
    body = os.urandom(WHOLE + more)
    bucket.put("data/large.bin", body)
    mount = mounted(bucket, options={"cache.whole_wait": wait}, endpoint=link.endpoint)
    os.stat(mount.path / "data/large.bin")
    link.back_rate = MIB / 4
    return mount, body


def test_a_large_file_that_comes_slowly_is_read_as_it_comes(
    mounted: MountFactory, bucket: Any, link: Any
) -> None:
    """Who wants its beginning does not wait for its end, and that does not come either."""
    mount, body = _large_and_slow(
        mounted, bucket, link, "5s", 16 * MIB
    )  # not all asked for at once
    with (mount.path / "data/large.bin").open("rb", buffering=0) as file:
        assert mount.xattr("lane", "data/large.bin") == "tracked"
        link.back_rate = None
        assert file.read(MIB) == body[:MIB]
    assert mount.metric("cachefs_download_bytes_total") < len(body)


@pytest.mark.parametrize("lane", ["passthrough"])
def test_who_opens_a_large_file_can_be_killed(
    mounted: MountFactory, bucket: Any, link: Any
) -> None:
    mount, body = _large_and_slow(mounted, bucket, link, "1h")
    program = subprocess.Popen(["cat", mount.path / "data/large.bin"], stdout=subprocess.DEVNULL)
    poll(lambda: mount.status()["cache"]["used_bytes"] >= MIB, 20)
    program.kill()
    program.wait(20)
    assert mount.metric("cachefs_download_bytes_total") < len(body), "nobody waits for the rest"
    link.back_rate = None
    assert (mount.path / "data/large.bin").read_bytes() == body
