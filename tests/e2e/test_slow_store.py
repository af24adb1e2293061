"""A store slower than the writer, or gone: saving goes on at local speed, everything arrives."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

SHARDS, SHARD = 64, 4 << 20


def _save(folder: str, shards: int, size: int) -> list[float]:
    """Save a sharded checkpoint; seconds of the whole and of the slowest close."""
    body = os.urandom(size)
    slowest = 0.0
    began = time.perf_counter()
    for number in range(shards):
        fd = os.open(f"{folder}/shard-{number:03d}.bin", os.O_WRONLY | os.O_CREAT)
        os.write(fd, body)
        closing = time.perf_counter()
        os.close(fd)
        slowest = max(slowest, time.perf_counter() - closing)
    return [time.perf_counter() - began, slowest]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_saving_never_waits_for_the_store(
    mounted: MountFactory, bucket: Any, link: Any, client: Client, ram_dir: Path
) -> None:
    """With 1 s added to each request, 64 shards of 4 MiB close at local speed."""
    mount = mounted(bucket, endpoint=link.endpoint)
    link.delay = 1.0
    local = [ram_dir / f"l{number}" for number in range(2)]
    remote = [mount.path / f"step_{number}" for number in range(2)]
    ratios = []
    for ours, theirs in zip(remote, local, strict=True):
        ours.mkdir()
        theirs.mkdir()
        base, _ = client.run(_save, theirs, SHARDS, SHARD)
        took, slowest = client.run(_save, ours, SHARDS, SHARD)
        ratios.append(base / took)
        assert slowest < 0.5, f"a close took {slowest:.3f} s"
        assert took < 0.02 * SHARDS + 5 * base, f"{took:.2f} s, local {base:.2f} s"
    print(f"local time / mount time: {', '.join(f'{r:.2f}' for r in ratios)}")
    seen = [mount.status()["dirty_bytes"]]
    assert seen[0] > SHARDS * SHARD
    link.delay = 0.05
    while seen[-1]:
        time.sleep(0.1)
        seen.append(mount.status()["dirty_bytes"])
    assert seen == sorted(seen, reverse=True), "dirty bytes must only fall once nobody writes"
    assert len(bucket.keys()) == 2 * SHARDS


@pytest.mark.timeout(90)
def test_a_store_that_dies_later_stops_no_write(
    mounted: MountFactory, bucket: Any, link: Any
) -> None:
    """Cut off after the mount: create, write, rename, read go on; all arrives when it is back."""
    mount = mounted(bucket, endpoint=link.endpoint, allow=("store|transient|retry|degraded|reach",))
    (mount.path / "before").write_bytes(b"1")
    mount.wait()
    link.cut()
    began = time.monotonic()
    bodies = {f"d/shard{n}.bin": os.urandom(1 << 20) for n in range(20)}
    (mount.path / "d").mkdir()
    for name, body in bodies.items():
        (mount.path / name).write_bytes(body)
    (mount.path / "t.part").write_bytes(b"renamed")
    os.rename(mount.path / "t.part", mount.path / "d" / "latest")
    assert (mount.path / "d" / "shard3.bin").read_bytes() == bodies["d/shard3.bin"]
    assert (mount.path / "before").read_bytes() == b"1"
    assert time.monotonic() - began < 5
    poll(lambda: mount.status()["degraded"], 30)
    assert mount.metric("cachefs_degraded") == 1
    assert mount.status()["dirty_files"] == 21
    assert mount.cli("wait", mount.path, "--timeout", "1").returncode == 4
    assert bucket.keys() == ["before"]
    link.mend()
    mount.wait(timeout=60)
    assert not mount.status()["degraded"]
    assert bucket.keys() == sorted([*bodies, "before", "d/latest"])
    assert all(bucket.get(name) == body for name, body in bodies.items())


@pytest.mark.timeout(90)
def test_a_store_that_falls_silent(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """No answer at all (packets dropped) in the middle of uploads: time-outs, then all arrives."""
    mount = mounted(
        bucket,
        endpoint=link.endpoint,
        options={"store.read_timeout": "2s", "store.connect_timeout": "2s"},
        allow=("store|transient|retry|degraded|reach|time",),
    )
    link.silent = True
    bodies = {f"shard{n}.bin": os.urandom(9 << 20) for n in range(4)}
    for name, body in bodies.items():
        (mount.path / name).write_bytes(body)
    time.sleep(3)
    assert mount.status()["dirty_files"] == 4
    link.cut()
    link.silent = False
    link.mend()
    mount.wait(timeout=60)
    assert {k: bucket.get(k) for k in bucket.keys()} == bodies  # noqa: SIM118


@pytest.mark.timeout(90)
def test_mounting_while_the_store_is_away(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """With a cache of this store: degraded, known names answer, what is new arrives later."""
    allow = ("store|transient|retry|degraded|reach",)
    mount = mounted(bucket, endpoint=link.endpoint, allow=allow)
    (mount.path / "known").write_bytes(b"in the cache")
    assert mount.unmount() == 0
    link.cut()
    began = time.monotonic()
    mount.start()
    assert time.monotonic() - began < 15
    assert mount.status()["degraded"]
    assert (mount.path / "known").read_bytes() == b"in the cache"
    (mount.path / "new").write_bytes(b"made meanwhile")
    link.mend()
    mount.wait(timeout=60)
    assert bucket.get("new") == b"made meanwhile"
    poll(lambda: not mount.status()["degraded"], 30)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_very_many_dirty_at_the_start(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """1,000 dirty files and an unreachable store: the mount answers at once."""
    allow = ("store|transient|retry|degraded|reach|remain|unmount",)
    mount = mounted(bucket, endpoint=link.endpoint, allow=allow)
    assert os.listdir(mount.path) == []
    link.cut()
    for number in range(1000):
        (mount.path / f"f{number}").write_bytes(b"x%d" % number)
    assert mount.unmount(drain_timeout=0) == 3
    mount.wait_gone()
    began = time.monotonic()
    mount.start()
    assert time.monotonic() - began < 10
    assert len(os.listdir(mount.path)) == 1000
    assert mount.status()["dirty_files"] == 1000
    link.mend()
    mount.wait(timeout=90)
    assert len(bucket.keys()) == 1000


def _dirty(mount: Mount) -> int:
    return int(mount.status()["dirty_files"])


def test_one_slow_put_and_a_rename(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Uploads hang; old/c is queued; old becomes new; release: only new/c is there."""
    mount = mounted(bucket, endpoint=link.endpoint)
    link.delay = 1.0
    (mount.path / "old").mkdir()
    (mount.path / "old" / "c").write_bytes(b"content")
    time.sleep(0.3)
    os.rename(mount.path / "old", mount.path / "new")
    link.delay = 0
    mount.wait()
    assert bucket.keys() == ["new/c"]


def test_removed_during_upload(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Ten 4 MiB files against a slow store, half of them removed while they go up."""
    mount = mounted(bucket, endpoint=link.endpoint)
    link.delay = 0.5
    for number in range(10):
        (mount.path / f"f{number}").write_bytes(os.urandom(4 << 20))
    time.sleep(0.4)
    for number in range(0, 10, 2):
        (mount.path / f"f{number}").unlink()
    link.delay = 0
    mount.wait()
    poll(lambda: _dirty(mount) == 0)
    assert bucket.keys() == [f"f{number}" for number in range(1, 10, 2)]
    assert bucket.uploads() == []


@pytest.mark.parametrize("change", ["overwrite", "truncate", "append", "replace"])
def test_changed_during_a_multipart_upload(
    mounted: MountFactory, bucket: Any, link: Any, change: str
) -> None:
    """The bucket shows one consistent version, then the next; never a mix."""
    mount = mounted(bucket, endpoint=link.endpoint, options={"flush.part_size": "5MiB"})
    file = mount.path / "model.bin"
    body = bytearray(os.urandom(30 << 20))
    link.delay = 0.4
    file.write_bytes(body)
    first = bytes(body)
    time.sleep(1.0)
    if change == "overwrite":
        with open(file, "r+b") as out:
            out.seek(1000)
            out.write(b"patch")
        body[1000:1005] = b"patch"
    elif change == "truncate":
        os.truncate(file, 12_345_678)
        del body[12_345_678:]
    elif change == "append":
        with open(file, "ab") as out:
            out.write(b"more")
        body += b"more"
    else:
        body = bytearray(os.urandom(7 << 20))
        file.write_bytes(body)
    link.delay = 0.05
    seen = set()
    while _dirty(mount):
        if bucket.exists("model.bin"):
            seen.add(bucket.sha256("model.bin"))
        time.sleep(0.05)
    mount.wait()
    assert bucket.get("model.bin") == bytes(body)
    assert file.read_bytes() == bytes(body)
    from hashlib import sha256

    assert seen <= {sha256(first).hexdigest(), sha256(bytes(body)).hexdigest()}
    poll(lambda: bucket.uploads() == [], 10, what="no upload left behind")
