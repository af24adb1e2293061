"""Several machines on one bucket: what one does, the others see within `mount.metadata_ttl`."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
TTL = 1.0
SHARED = {"mount.metadata_ttl": f"{TTL}s"}
LATE = TTL + 3.0
"""Seconds after which everything must have been seen, on a busy machine too."""


def _names(mount: Mount, folder: str = "") -> list[str]:
    return sorted(os.listdir(mount.path / folder))


def _shows(mount: Mount, folder: str, names: list[str]) -> None:
    """Within the time that others may take to see it."""
    deadline = time.monotonic() + LATE
    while (seen := _names(mount, folder)) != names:
        assert time.monotonic() < deadline, f"{seen} instead of {names}"
        time.sleep(0.05)


def _delete(bucket: Any, *keys: str) -> None:
    """With markers of directories, which SeaweedFS shows for all that it ever had."""
    objects = [{"Key": bucket.prefix + key} for key in keys]
    bucket.client.delete_objects(Bucket=bucket.name, Delete={"Objects": objects})


def _reads(mount: Mount, name: str) -> bytes | None:
    try:
        return (mount.path / name).read_bytes()
    except OSError as error:
        assert error.errno in (errno.ENOENT, errno.ESTALE)
        return None


def test_what_others_do_is_seen(mounted: MountFactory, bucket: Any) -> None:
    """New, replaced and deleted objects and whole directories, in directories of the bucket's and
    in those made here."""
    bucket.put("d/same", b"same")
    bucket.put("d/old", b"old")
    bucket.put("d/gone", b"gone")
    bucket.put("d/sub/gone", b"gone")
    mount = mounted(bucket, options=SHARED)
    (mount.path / "mine").mkdir()
    (mount.path / "mine" / "f").write_bytes(b"mine")
    mount.wait()
    assert _names(mount, "d") == ["gone", "old", "same", "sub"]
    assert _names(mount, "d/sub") == ["gone"]
    assert [_reads(mount, f"d/{name}") for name in ("same", "old")] == [b"same", b"old"]
    bucket.put("d/new", b"new")
    bucket.put("d/deep/er/new", b"deep")
    bucket.put("d/old", b"replaced")
    bucket.put("mine/theirs", b"theirs")
    _delete(bucket, "d/gone", "d/sub/gone", "d/sub/", "mine/f")
    _shows(mount, "d", ["deep", "new", "old", "same"])
    poll(lambda: _reads(mount, "d/old") == b"replaced", LATE)
    _shows(mount, "mine", ["theirs"])
    assert os.stat(mount.path / "d/old").st_size == len(b"replaced")
    assert _reads(mount, "d/new") == b"new"
    assert _reads(mount, "d/deep/er/new") == b"deep"
    assert _reads(mount, "mine/theirs") == b"theirs"
    assert _reads(mount, "d/same") == b"same"


def test_a_name_that_nobody_lists_is_seen_too(mounted: MountFactory, bucket: Any) -> None:
    """A program that only opens `latest`, again and again, needs no listing to see it change."""
    bucket.put("run/latest", b"step_1")
    mount = mounted(bucket, options=SHARED)
    assert _reads(mount, "run/latest") == b"step_1"
    assert _reads(mount, "run/step_2") is None
    bucket.put("run/latest", b"step_2")
    bucket.put("run/step_2", b"weights")
    poll(lambda: _reads(mount, "run/latest") == b"step_2", LATE)
    poll(lambda: _reads(mount, "run/step_2") == b"weights", LATE)
    time.sleep(3 * TTL)  # Nobody looks, so nothing is listed; the first look waits for a listing.
    bucket.put("run/latest", b"step_3")
    time.sleep(TTL + 0.2)
    assert _reads(mount, "run/latest") == b"step_3"


def test_what_is_not_in_the_bucket_yet_wins(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Files, removals and renames that wait for the store are not undone by a listing of it."""
    for name in ("removed", "renamed", "edited", "opened"):
        bucket.put(f"d/{name}", name.encode())
    mount = mounted(
        bucket, endpoint=link.endpoint, options={**SHARED, "flush.settle": "10s"}, allow=(".",)
    )
    assert len(_names(mount, "d")) == 4
    folder = mount.path / "d"
    (folder / "removed").unlink()
    (folder / "renamed").rename(folder / "other")
    (folder / "edited").write_bytes(b"edited here")
    (folder / "created").write_bytes(b"created here")
    (folder / "empty").mkdir()
    opened = os.open(folder / "opened", os.O_RDWR)
    assert os.pread(opened, 100, 0) == b"opened"
    bucket.delete("d/opened")
    expected = ["created", "edited", "empty", "opened", "other"]
    deadline = time.monotonic() + 3 * TTL
    while time.monotonic() < deadline:
        assert _names(mount, "d") == expected
        time.sleep(0.05)
    assert _reads(mount, "d/edited") == b"edited here"
    assert _reads(mount, "d/other") == b"renamed"
    os.pwrite(opened, b"O", 0)
    os.close(opened)
    mount.wait()
    assert bucket.get("d/opened") == b"Opened"
    assert bucket.keys() == ["d/created", "d/edited", "d/empty/", "d/opened", "d/other"]


def test_open_readers_keep_their_version(
    mounted: MountFactory, bucket: Any, client: Client
) -> None:
    """Whoever has it open reads the old bytes or gets ESTALE, also from the next daemon; who opens
    it now, the new ones."""
    old, new = b"O" * (24 * MIB), b"N" * (20 * MIB)
    for name in ("whole.bin", "part.bin", "gone.bin"):
        bucket.put(name, old)
    mount = mounted(bucket, options=SHARED, allow=("ended unexpectedly",))
    assert _reads(mount, "whole.bin") == old
    whole = os.open(mount.path / "whole.bin", os.O_RDONLY)
    part = os.open(mount.path / "part.bin", os.O_RDONLY)
    gone = os.open(mount.path / "gone.bin", os.O_RDONLY)
    assert os.pread(part, 10, 0) == os.pread(gone, 10, 0) == old[:10]
    bucket.delete("gone.bin")
    for name in ("whole.bin", "part.bin"):
        bucket.put(name, new)
    for name in ("whole.bin", "part.bin"):
        poll(lambda name=name: _reads(mount, name) == new, LATE)
    poll(lambda: not (mount.path / "gone.bin").exists(), LATE)
    mount.took_over(mount.kill_daemon())
    assert os.fstat(gone).st_size == len(old)
    assert os.pread(whole, len(old), 0) == old
    assert os.fstat(whole).st_size == len(old)
    try:
        seen = b"".join(os.pread(part, MIB, at) for at in range(0, len(old), MIB))
    except OSError as error:
        assert error.errno == errno.ESTALE
    else:
        assert seen == old
    for each in (whole, part, gone):
        os.close(each)
    used = poll(lambda: mount.status()["cache"]["used_bytes"] < 2 * len(new) + 8 * MIB, 10)
    assert used, "the old versions leave the cache with their last reader"


def test_two_mounts_of_one_bucket(mounted: MountFactory, bucket: Any) -> None:
    """Two nodes save and clean up in one directory; each sees what the other has published."""
    one = mounted(bucket, options={**SHARED, "node.id": "one"})
    other = mounted(bucket, options={**SHARED, "node.id": "other"})
    for mount, name in ((one, "a"), (other, "b")):
        (mount.path / "run").mkdir(exist_ok=True)
        (mount.path / "run" / name).write_bytes(name.encode() * 1000)
    one.wait()
    other.wait()
    for mount in (one, other):
        _shows(mount, "run", ["a", "b"])
        assert _reads(mount, "run/a") == b"a" * 1000
        assert _reads(mount, "run/b") == b"b" * 1000
    (other.path / "run" / "a").unlink()
    (one.path / "run" / "b").rename(one.path / "run" / "c")
    (other.path / "late").mkdir()
    one.wait()
    other.wait()
    for mount in (one, other):
        _shows(mount, "run", ["c"])
        _shows(mount, "", ["late", "run"])
    (one.path / "late").rmdir()
    one.wait()
    _shows(other, "", ["run"])
    assert bucket.keys() == ["run/c"]


def read_all(folder: str, digests: dict[str, str]) -> list[str]:
    """Several readers at once; names of the files that are not what they should be."""
    import hashlib
    from concurrent.futures import ThreadPoolExecutor

    def differs(name: str) -> bool:
        with open(f"{folder}/{name}", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest() != digests[name]

    with ThreadPoolExecutor(4) as pool:
        return [
            name for name, wrong in zip(digests, pool.map(differs, digests), strict=True) if wrong
        ]


@pytest.mark.timeout(90)
def test_several_nodes_restore_one_checkpoint_at_once(
    mounted: MountFactory, bucket: Any, client: Client
) -> None:
    """While one of them saves the next one. Each fetches it once, whoever reads."""
    bodies = {f"{n}.safetensors": os.urandom(3 * MIB + n) for n in range(8)}
    for name, body in bodies.items():
        bucket.put(f"step-1/{name}", body)
    digests = {name: hashlib.sha256(body).hexdigest() for name, body in bodies.items()}
    nodes = [mounted(bucket, options={**SHARED, "node.id": f"n{n}"}) for n in range(3)]
    readers = [client.start(read_all, mount.path / "step-1", digests) for mount in nodes]
    (nodes[0].path / "step-2").mkdir()
    for name, body in bodies.items():
        (nodes[0].path / "step-2" / name).write_bytes(body)
    assert [each.result(60) for each in readers] == [[], [], []]
    whole = sum(map(len, bodies.values()))
    assert [mount.metric("cachefs_download_bytes_total") for mount in nodes] == [whole] * 3
    nodes[0].wait()
    _shows(nodes[2], "step-2", sorted(bodies))
    assert client.run(read_all, nodes[2].path / "step-2", digests) == []


def test_a_store_that_is_away_empties_nothing(
    mounted: MountFactory, bucket: Any, link: Any
) -> None:
    """Listings that fail change nothing, and hold up the first look only for a moment."""
    bucket.put("d/f", b"f")
    mount = mounted(bucket, endpoint=link.endpoint, options=SHARED, allow=(".",))
    assert _names(mount, "d") == ["f"]
    assert _reads(mount, "d/f") == b"f"
    link.cut()
    time.sleep(2.5 * TTL)
    began = time.monotonic()
    for number in range(20):
        assert _names(mount, "d") == ["f", "new"][: 1 + (number > 0)]
        (mount.path / "d" / "new").write_bytes(b"new")
    assert time.monotonic() - began < 5
    assert _reads(mount, "d/f") == b"f"
    link.mend()
    bucket.put("d/g", b"g")
    poll(lambda: _names(mount, "d") == ["f", "g", "new"], 20)
