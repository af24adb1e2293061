"""Cache devices that are missing, or go while the mount goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import Failed, Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
NEVER = {
    "flush.settle": "100s",
    "flush.settle_max": "100s",
    "mount.small_files": "off",  # They are made many at a time on one device.
}
FAILED = ("missing", "has failed", "not tended", "damaged", "stalled", "spare")
COUNT = 12


@pytest.fixture
def dirs(disk_dir: Path) -> list[Path]:
    (disk_dir / "second").mkdir()
    return [disk_dir / "first", disk_dir / "second" / "cache"]


def fill(mount: Mount, prefix: str) -> dict[str, bytes]:
    size = 300_000 + 1000 * len(prefix)  # All sizes are different ones.
    bodies = {f"{prefix}{n}.bin": os.urandom(size + n) for n in range(COUNT)}
    for name, body in bodies.items():
        (mount.path / name).write_bytes(body)
    return bodies


def on_second(mount: Mount, bodies: dict[str, bytes]) -> set[str]:
    """Names of those whose cache file is on the second device; sizes tell them apart."""
    found = {path.stat().st_size for path in (mount.cache_dirs[1] / "files").glob("*/*")}
    return {name for name, body in bodies.items() if len(body) in found}


def named(mount: Mount) -> set[str]:
    """Files that `status` names as being in trouble."""
    return {Path(each["path"]).name for each in mount.status()["errors"]}


@pytest.mark.timeout(90)
def test_a_device_that_vanishes(mounted: MountFactory, bucket: Any, dirs: list[Path]) -> None:
    """What the store has is read from there, what only it had is named, all else goes on."""
    mount = mounted(bucket, cache_dirs=dirs, options={"mount.small_files": "off"}, allow=FAILED)
    safe = fill(mount, "safe")
    mount.wait()
    mount.remount(flush__settle="100s", flush__settle_max="100s")
    dirty = fill(mount, "dirty")
    poll(lambda: mount.status()["dirty_files"] == COUNT, 10)
    lost = on_second(mount, dirty)
    assert lost
    assert lost != set(dirty)
    assert on_second(mount, safe)
    shutil.rmtree(dirs[1])
    poll(lambda: mount.status()["cache"]["devices"][1]["healthy"] is False, 10)
    poll(lambda: named(mount) == lost, 10)
    assert mount.status()["cache"]["devices"][1]["error"]
    name = min(lost)
    assert str(dirs[1]) in mount.xattr("error", name)
    poll(lambda: "a cache device has failed" in mount.log, 10)
    assert name in mount.log
    for each, body in safe.items():
        assert (mount.path / each).read_bytes() == body, each
    fresh = fill(mount, "newer")
    for each in fresh.keys() | (dirty.keys() - lost):
        mount.wait(mount.path / each)
        assert bucket.get(each) == {**dirty, **fresh}[each]
    with pytest.raises(Failed) as failed:
        mount.wait(mount.path / name, timeout=20)
    assert failed.value.exit_code == 5
    mount.spoiled = True


@pytest.mark.timeout(90)
def test_a_device_that_is_missing_at_the_start(
    mounted: MountFactory, bucket: Any, dirs: list[Path], disk_dir: Path
) -> None:
    """Named, with its files; once it is back, they are uploaded."""
    mount = mounted(bucket, cache_dirs=dirs, options={**NEVER}, allow=FAILED)
    safe = fill(mount, "safe")
    mount.wait()
    dirty = fill(mount, "dirty")
    lost = on_second(mount, dirty)
    assert lost
    assert mount.unmount(drain_timeout=0) == 3
    mount.wait_gone()
    os.rename(disk_dir / "second", disk_dir / "away")
    done = mount.cli(*mount.command())
    assert done.returncode == 0, done.stderr
    assert str(dirs[1]) in done.stderr
    assert f"{len(lost)} files of it are not in the store" in done.stderr
    mount.reread()
    assert named(mount) == lost
    assert {each["healthy"] for each in mount.status()["cache"]["devices"]} == {True, False}
    for each, body in safe.items():
        assert (mount.path / each).read_bytes() == body, each
    (mount.path / "more.bin").write_bytes(b"goes on")
    mount.wait(mount.path / "more.bin")
    with pytest.raises(OSError, match="Input/output"):
        (mount.path / min(lost)).read_bytes()
    with pytest.raises(Failed, match="missing"):
        mount.wait(mount.path / min(lost), timeout=20)
    assert mount.unmount(drain_timeout=0) == 3
    mount.wait_gone()
    shutil.rmtree(disk_dir / "second", ignore_errors=True)
    os.rename(disk_dir / "away", disk_dir / "second")
    mount.start()
    mount.wait()
    for each, body in {**safe, **dirty}.items():
        assert bucket.get(each) == body


@pytest.mark.timeout(90)
def test_directories_in_another_order(
    mounted: MountFactory, bucket: Any, dirs: list[Path], ram_dir: Path
) -> None:
    """Devices are known by what they are: turned round, and with a new one in front."""
    mount = mounted(bucket, cache_dirs=dirs, options={**NEVER})
    bodies = fill(mount, "f")
    assert mount.unmount(drain_timeout=0) == 3
    mount.wait_gone()
    mount.cache_dirs = [ram_dir / "cache", dirs[1], dirs[0]]
    mount.start()
    for each, body in bodies.items():
        assert (mount.path / each).read_bytes() == body
    (mount.path / "new.bin").write_bytes(b"n" * MIB)
    mount.wait()
    for each, body in bodies.items():
        assert bucket.get(each) == body


def test_an_empty_directory_in_place_of_a_disk(
    mounted: MountFactory, bucket: Any, dirs: list[Path], disk_dir: Path
) -> None:
    """As when the disk is not mounted: it is not taken for the device that has dirty files."""
    mount = mounted(bucket, cache_dirs=dirs, options={**NEVER}, allow=FAILED)
    dirty = fill(mount, "dirty")
    lost = on_second(mount, dirty)
    assert mount.unmount(drain_timeout=0) == 3
    mount.wait_gone()
    os.rename(dirs[1], disk_dir / "away")
    mount.start()
    assert named(mount) == lost
    assert "is its disk mounted?" in str(mount.status()["cache"]["devices"])
    assert mount.unmount(drain_timeout=0) == 3
    mount.wait_gone()
    shutil.rmtree(dirs[1])
    os.rename(disk_dir / "away", dirs[1])
    mount.start()
    mount.wait()
    assert {name: bucket.get(name) for name in dirty} == dirty
