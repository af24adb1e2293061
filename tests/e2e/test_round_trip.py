"""Write into the mount, find it in the bucket; put it into the bucket, find it in the mount."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import program
from tests.support.mounts import MountFactory


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.either_lane
@pytest.mark.parametrize("size", [256, pytest.param(1024, marks=pytest.mark.soak)])
def test_one_large_file(mounted: MountFactory, bucket: Any, size: int) -> None:
    """dd, `cachefs wait`: one object with the same digest, and the file's attributes."""
    mount = mounted(bucket, options={"cache.size": "4GiB"})
    folder = mount.path / "run" / "checkpoint-1000"
    folder.mkdir(parents=True)
    file = folder / "model.bin"
    program("dd", "if=/dev/urandom", f"of={file}", "bs=4M", f"count={size // 4}", "status=none")
    os.chmod(file, 0o640)
    os.chown(file, 1234, 4321)
    told = file.stat()
    assert told.st_size == size << 20
    digest = program("sha256sum", file).split()[0]
    assert mount.cli("wait", mount.path).returncode == 0
    key = "run/checkpoint-1000/model.bin"
    sizes = {k: size for k, size in bucket.sizes().items() if not k.endswith("/")}
    assert sizes == {key: size << 20}, "one object (and perhaps a directory that was empty first)"
    assert bucket.sha256(key) == digest
    seen = bucket.attributes(key)
    assert (seen.permissions, seen.uid, seen.gid) == (0o640, 1234, 4321)
    assert stat.S_ISREG(seen.mode)
    assert seen.mtime == pytest.approx(told.st_mtime_ns / 1e9, abs=1e-5)
    assert bucket.uploads() == []
    assert mount.unmount() == 0


def test_empty_cache_reads_what_another_mount_wrote(mounted: MountFactory, bucket: Any) -> None:
    """A second mount with an empty cache lists the bucket and reads files, links, attributes."""
    first = mounted(bucket)
    tree = first.path / "step_1"
    (tree / "sub" / "empty").mkdir(parents=True)
    bodies = {f"shard{n}": os.urandom(n * 100_000) for n in range(5)}
    bodies["big"] = os.urandom(40 << 20)
    for name, body in bodies.items():
        (tree / name).write_bytes(body)
    (tree / "link").symlink_to("shard1")
    os.chmod(tree / "shard2", 0o751)
    os.chown(tree / "shard2", 7, 8)
    os.utime(tree / "shard2", ns=(10**18, 10**18 + 1000))
    assert first.unmount() == 0
    second = mounted(bucket)
    tree = second.path / "step_1"
    assert sorted(os.listdir(tree)) == sorted([*bodies, "link", "sub"])
    assert os.listdir(tree / "sub") == ["empty"]
    assert os.readlink(tree / "link") == "shard1"
    told = (tree / "shard2").stat()
    assert (stat.S_IMODE(told.st_mode), told.st_uid, told.st_gid) == (0o751, 7, 8)
    assert told.st_mtime_ns == pytest.approx(10**18 + 1000, abs=1000)
    for name, body in bodies.items():
        assert (tree / name).stat().st_size == len(body)
        assert (tree / name).read_bytes() == body
    assert second.status()["dirty_files"] == 0


def test_objects_of_other_programs(mounted: MountFactory, bucket: Any) -> None:
    """Objects without metadata get default attributes; a 0-byte marker is a directory."""
    bucket.put("data/plain.txt", b"hello")
    bucket.put("marked/", b"")
    bucket.put("deep/er/x", b"x" * 1000)
    mount = mounted(bucket, options={"mount.uid": "11", "mount.gid": "22", "mount.umask": "027"})
    assert sorted(os.listdir(mount.path)) == ["data", "deep", "marked"]
    told = (mount.path / "data" / "plain.txt").stat()
    assert stat.S_IMODE(told.st_mode) == 0o640
    assert (told.st_uid, told.st_gid, told.st_size) == (11, 22, 5)
    assert (mount.path / "data" / "plain.txt").read_text() == "hello"
    assert os.listdir(mount.path / "marked") == []
    assert (mount.path / "deep" / "er" / "x").read_bytes() == b"x" * 1000
    with pytest.raises(FileNotFoundError):
        (mount.path / "data" / "missing").stat()


def test_object_and_prefix_of_one_name(mounted: MountFactory, bucket: Any) -> None:
    """A bucket that holds both `foo` and `foo/bar`: one of them shows, nothing fails or is lost."""
    bucket.put("foo", b"file")
    bucket.put("foo/bar", b"below")
    mount = mounted(bucket)
    assert "foo" in os.listdir(mount.path)
    shown = mount.path / "foo"
    if shown.is_dir():
        assert (shown / "bar").read_bytes() == b"below"
    else:
        assert shown.read_bytes() == b"file"
    (mount.path / "other").write_bytes(b"x")
    mount.wait()
    assert bucket.get("foo") == b"file"
    assert bucket.get("foo/bar") == b"below"


@pytest.mark.either_lane
def test_many_objects_in_a_directory(mounted: MountFactory, bucket: Any) -> None:
    """More entries than one listing page."""
    for number in range(1100):
        bucket.put(f"d/o{number:04d}", b"")
    mount = mounted(bucket)
    assert sorted(os.listdir(mount.path / "d")) == [f"o{number:04d}" for number in range(1100)]


def test_editing_what_is_only_in_the_bucket(mounted: MountFactory, bucket: Any) -> None:
    """Appending to, and overwriting part of, an object that was never read here."""
    body = os.urandom(6_000_000)
    bucket.put("log", b"one\n")
    bucket.put("big", body)
    mount = mounted(bucket)
    with open(mount.path / "log", "ab") as file:
        file.write(b"two\n")
    with open(mount.path / "big", "r+b") as file:
        file.seek(3_000_000)
        file.write(b"patched")
    mount.wait()
    assert bucket.get("log") == b"one\ntwo\n"
    expected = body[:3_000_000] + b"patched" + body[3_000_007:]
    assert bucket.get("big") == expected
    assert (mount.path / "big").read_bytes() == expected


def test_renaming_what_is_only_in_the_bucket(mounted: MountFactory, bucket: Any) -> None:
    """A published directory is renamed: at once here, key by key in the bucket."""
    for name in ("a", "b", "sub/c"):
        bucket.put(f"old/{name}", name.encode(), {"mode": "33188", "uid": "1", "gid": "2"})
    mount = mounted(bucket)
    os.rename(mount.path / "old", mount.path / "new")
    assert os.listdir(mount.path) == ["new"]
    assert (mount.path / "new" / "sub" / "c").read_bytes() == b"sub/c"
    mount.wait()
    assert bucket.keys() == ["new/a", "new/b", "new/sub/c"]
    assert bucket.get("new/a") == b"a"
    assert bucket.metadata("new/a")["uid"] == "1"


def test_removing_what_is_only_in_the_bucket(mounted: MountFactory, bucket: Any) -> None:
    for name in ("x", "d/y", "d/z"):
        bucket.put(name, b"data")
    mount = mounted(bucket)
    program("rm", "-r", mount.path / "d")
    mount.wait()
    assert bucket.keys() == ["x"]
    assert os.listdir(mount.path) == ["x"]


def test_directory_store(mounted: MountFactory, dir_store: Any, ram_dir: Path) -> None:
    """A `file:///dir` store: plain files, readable by any tool, and readable back."""
    mount = mounted(dir_store)
    body = os.urandom(20 << 20)
    (mount.path / "d").mkdir()
    (mount.path / "d" / "model.bin").write_bytes(body)
    mount.wait()
    assert dir_store.keys() == ["d/model.bin"]
    assert dir_store.get("d/model.bin") == body
    assert mount.unmount() == 0
    second = mounted(dir_store)
    assert (second.path / "d" / "model.bin").read_bytes() == body


def test_overwriting(mounted: MountFactory, bucket: Any) -> None:
    """The bucket shows one consistent version, then the next."""
    mount = mounted(bucket)
    for version in range(3):
        body = bytes([version]) * (10_000 + version)
        (mount.path / "state.bin").write_bytes(body)
        mount.wait()
        assert bucket.get("state.bin") == body
    assert bucket.keys() == ["state.bin"]


def test_keys_stay_below_the_prefix(mounted: MountFactory, seaweed: Any, bucket: Any) -> None:
    """Nothing is written, seen or removed outside `s3://bucket/prefix`."""
    outside = seaweed_view(bucket)
    outside.put("runs-other/x", b"x")
    outside.put("runsx", b"x")
    mount = mounted(bucket)
    assert os.listdir(mount.path) == []
    (mount.path / "inside").write_bytes(b"1")
    mount.wait()
    keys = outside.keys(reserved=True)
    assert {"runs-other/x", "runsx", "runs/inside"} <= set(keys)
    assert all(k.startswith("runs/") or k in ("runs-other/x", "runsx") for k in keys)


def seaweed_view(bucket: Any) -> Any:
    """The whole bucket of a prefix."""
    from tests.support.bucket import Bucket

    return Bucket(bucket.client, bucket.name)
