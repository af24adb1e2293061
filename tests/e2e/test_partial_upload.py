"""Only what changed goes over the wire, and the object is right all the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import program
from tests.support.mounts import Failed, Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
ROOM = {"cache.size": "8GiB"}  # so that a passthrough writer may have 0.8 GiB
KEY = "run/checkpoint-1/model.bin"


def new_object(mount: Mount, mebibytes: int) -> Path:
    """A file of random bytes, durable."""
    file = mount.path / KEY
    file.parent.mkdir(parents=True)
    count = f"count={mebibytes // 4}"
    program("dd", "if=/dev/urandom", f"of={file}", "bs=4M", count, "status=none")
    mount.wait(timeout=120)
    return file


def append(file: Path, data: bytes) -> None:
    with open(file, "ab") as out:
        out.write(data)


def overwrite(file: Path, offset: int, data: bytes) -> None:
    fd = os.open(file, os.O_WRONLY)
    try:
        assert os.pwrite(fd, data, offset) == len(data)
    finally:
        os.close(fd)


def digest(file: Path) -> str:
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [160, pytest.param(512, marks=pytest.mark.soak)])
def test_small_changes_of_a_large_object(
    mounted: MountFactory, bucket: Any, faults: Any, size: int
) -> None:
    """1 byte appended, then 4 KiB changed in the middle: at most 16 MiB sent each."""
    mount = mounted(bucket, endpoint=faults.endpoint, options=ROOM)
    file = new_object(mount, size)
    assert faults.counts()["bytes_in"] >= size * MIB
    changes: list[Callable[[], None]] = [
        lambda: append(file, b"!"),
        lambda: overwrite(file, size // 2 * MIB + 12_345, os.urandom(4096)),
    ]
    for change in changes:
        faults.forget()
        change()
        mount.wait(timeout=120)
        counts = faults.counts()
        assert counts["bytes_in"] <= 16 * MIB
        assert counts["copy_part 200"] >= 1
        assert counts.get("get 200", 0) == 0, "nothing needs to be read back"
        assert bucket.sha256(KEY) == digest(file)
    assert bucket.sizes()[KEY] == size * MIB + 1
    assert bucket.uploads() == []


def test_a_file_that_is_saved_anew(mounted: MountFactory, bucket: Any, faults: Any) -> None:
    """As programs save, beside the old one and renamed over it: only parts that differ are sent."""
    mount = mounted(bucket, endpoint=faults.endpoint)
    file = new_object(mount, 48)
    beside = file.with_suffix(".tmp")
    shutil.copyfile(file, beside)
    overwrite(beside, 20 * MIB, os.urandom(4096))
    faults.forget()
    os.rename(beside, file)
    mount.wait(timeout=60)
    counts = faults.counts()
    assert counts["bytes_in"] <= 17 * MIB
    assert counts["copy_part 200"] >= 1
    assert bucket.sha256(KEY) == digest(file)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("settle", ["1ms", "2s"], ids=["in-flight", "superseded"])
def test_edits_in_a_row_send_what_they_changed(
    mounted: MountFactory, bucket: Any, faults: Any, settle: str
) -> None:
    """Closed three times, before or while the version before goes up: never all of it again."""
    mount = mounted(bucket, endpoint=faults.endpoint, options={**ROOM, "flush.settle": settle})
    file = new_object(mount, 96)
    faults.forget()
    for number in range(3):
        overwrite(file, number * 30 * MIB + 7, os.urandom(100))
        time.sleep(0.1)
    mount.wait()
    assert faults.counts()["bytes_in"] <= 3 * 6 * MIB, "S3's least part for each place"
    assert bucket.sha256(KEY) == digest(file)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_file_cut_short_and_grown_again(mounted: MountFactory, bucket: Any, faults: Any) -> None:
    """The versions between are never uploaded; what they lost does not come back from the store."""
    mount = mounted(bucket, endpoint=faults.endpoint, options={**ROOM, "flush.settle": "2s"})
    file = new_object(mount, 64)
    faults.forget()
    os.truncate(file, 40 * MIB)
    append(file, b"after the cut")
    os.truncate(file, 50 * MIB)
    overwrite(file, 100, b"at the front")
    mount.wait()
    assert faults.counts()["bytes_in"] <= 24 * MIB
    assert bucket.sha256(KEY) == digest(file)


@pytest.mark.timeout(120)
def test_cut_short_after_a_change_further_on(
    mounted: MountFactory, bucket: Any, faults: Any
) -> None:
    """The version with the change never got into the store: the next one has nothing of it."""
    mount = mounted(bucket, endpoint=faults.endpoint, options={**ROOM, "flush.settle": "2s"})
    file = new_object(mount, 48)
    faults.forget()
    overwrite(file, 40 * MIB, b"beyond the cut")
    os.truncate(file, 30 * MIB)
    mount.wait()
    assert faults.counts()["bytes_in"] <= 6 * MIB
    assert bucket.sha256(KEY) == digest(file)


@pytest.mark.timeout(120)
def test_attributes_alone_send_nothing(mounted: MountFactory, bucket: Any, faults: Any) -> None:
    mount = mounted(bucket, endpoint=faults.endpoint, options=ROOM)
    file = new_object(mount, 32)
    was = bucket.sha256(KEY)
    faults.forget()
    file.chmod(0o600)
    mount.wait()
    assert faults.counts().get("bytes_in", 0) < 10_000
    assert bucket.attributes(KEY).permissions == 0o600
    assert bucket.sha256(KEY) == was


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_appending_to_an_object_that_is_not_in_the_cache(
    mounted: MountFactory, bucket: Any, faults: Any
) -> None:
    """Another mount, whose cache is empty."""
    first = mounted(bucket, options=ROOM)
    new_object(first, 64)
    assert first.unmount() == 0
    mount = mounted(bucket, endpoint=faults.endpoint, options=ROOM)
    faults.forget()
    append(mount.path / KEY, b"the end")
    mount.wait()
    assert faults.counts()["bytes_in"] <= 16 * MIB
    assert bucket.sizes()[KEY] == 64 * MIB + 7
    assert bucket.sha256(KEY) == digest(mount.path / KEY)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("theirs", [b"another writer's", None], ids=["replaced", "deleted"])
def test_an_object_that_changed_meanwhile_is_no_source(
    mounted: MountFactory, bucket: Any, theirs: bytes | None
) -> None:
    """Ranges cannot be copied from an object that is not what it was: everything is sent, and
    nothing of the other writer is overwritten."""
    mount = mounted(bucket, options=ROOM, allow=("conflict", "deleted by another"))
    file = new_object(mount, 32)
    if theirs is None:
        bucket.delete(KEY)
    else:
        bucket.put(KEY, theirs)
    append(file, b"mine")
    with contextlib.suppress(Failed):
        mount.wait()
    copies = [key for key in bucket.keys() if key.startswith(f"{KEY}.conflict-")]  # noqa: SIM118
    ours = KEY if theirs is None else copies[0]
    poll(lambda: bucket.exists(ours) and bucket.sha256(ours) == digest(file))
    assert theirs is None or bucket.get(KEY) == theirs
