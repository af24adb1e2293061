"""warm, evict, pin, unpin and adopt, by the command line and from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
SMALL = {"cache.size": "64MiB", "cache.meta_reserve": "4MiB"}


def _ask(mount: Mount, *words: str | Path, code: int = 0) -> dict[str, Any]:
    """One verb with --json; its answer."""
    done = mount.cli(*words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
    return told


def _state(mount: Mount, name: str) -> str:
    return mount.xattr("state", name)


def test_warm_and_evict_trees(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """What was warmed is read without the store; what was evicted is fetched again."""
    bodies = {f"d/{n}/f": os.urandom(3 * MIB + n) for n in range(6)} | {"d/one": b"1"}
    for name, body in bodies.items():
        bucket.put(name, body)
    mount = mounted(bucket, endpoint=link.endpoint, allow=(".",))
    told = _ask(mount, "warm", mount.path / "d")
    assert (told["files"], told["bytes"]) == (7, sum(map(len, bodies.values())))
    assert _ask(mount, "warm", mount.path / "d")["files"] == 0, "all is there"
    link.cut()
    for name, body in bodies.items():
        assert (mount.path / name).read_bytes() == body
    link.mend()
    told = _ask(mount, "evict", mount.path / "d")
    assert told["files"] == 7
    assert told["bytes"] >= 18 * MIB
    assert mount.status()["cache"]["used_bytes"] < MIB
    assert (mount.path / "d/0/f").read_bytes() == bodies["d/0/f"]


def test_evict_leaves_what_is_needed(mounted: MountFactory, bucket: Any) -> None:
    """Dirty, open and pinned files stay, whoever asks."""
    mount = mounted(bucket, options={"flush.settle": "10s"})
    for name in ("durable", "open", "pinned"):
        (mount.path / name).write_bytes(name.encode() * 1000)
    mount.wait()
    (mount.path / "dirty").write_bytes(b"dirty")
    _ask(mount, "pin", mount.path / "pinned")
    with (mount.path / "open").open("rb"):
        told = _ask(mount, "evict", mount.path)
    assert told["files"] == 1
    assert told["kept"] == {"dirty": 1, "open": 1, "pinned": 1}
    assert _state(mount, "durable") == "remote"
    assert [_state(mount, name) for name in ("open", "pinned")] == ["durable"] * 2
    assert (mount.path / "dirty").read_bytes() == b"dirty"


def test_pinned_is_never_evicted(mounted: MountFactory, bucket: Any) -> None:
    """Not by pressure, not after a restart, not when it was replaced; until it is unpinned."""
    body = os.urandom(16 * MIB)
    bucket.put("base/model.bin", body)
    mount = mounted(bucket, options=SMALL)
    assert _ask(mount, "pin", mount.path / "base")["bytes"] == len(body)
    mount.remount()
    body = os.urandom(16 * MIB)
    (mount.path / "base/model.tmp").write_bytes(body)
    (mount.path / "base/model.tmp").rename(mount.path / "base/model.bin")
    for number in range(16):
        (mount.path / f"f{number}").write_bytes(os.urandom(8 * MIB))
    mount.wait()
    poll(lambda: mount.status()["cache"]["used_bytes"] <= 60 * MIB, 20)
    assert _state(mount, "base/model.bin") == "durable"
    assert _state(mount, "f0") == "remote"
    assert (mount.path / "base/model.bin").read_bytes() == body
    refused = mount.cli("unpin", mount.path / "base/model.bin")
    assert refused.returncode == 2
    assert f"is pinned with {mount.path / 'base'}" in refused.stderr
    _ask(mount, "unpin", mount.path / "base")
    assert _ask(mount, "evict", mount.path / "base")["files"] == 1


def test_warm_refuses_what_does_not_fit(mounted: MountFactory, bucket: Any) -> None:
    """Fetching the second half must not push the first one out: nothing is fetched."""
    for number in range(10):
        bucket.put(f"d/{number}", bytes(8 * MIB))
    mount = mounted(bucket, options=SMALL)
    told = _ask(mount, "warm", mount.path / "d", code=1)
    assert "room" in told["error"]["message"]
    assert mount.status()["cache"]["used_bytes"] < MIB


def test_adopting_a_snapshot_in_ram(
    mounted: MountFactory, bucket: Any, ram_dir: Path, disk_dir: Path
) -> None:
    """An asynchronous saver writes to tmpfs and hands each shard over, index last, over the ones of
    the step before; from a program, by the Python call."""
    mount = mounted(bucket, cache_dirs=[disk_dir / "cache"])
    shards = {f"shard-{n}.safetensors": os.urandom(2 * MIB + n) for n in range(3)}
    files = {**shards, "model.index.json": b"{}"}
    (mount.path / "last").mkdir()
    (mount.path / "last/shard-0.safetensors").write_bytes(b"of the step before")
    mount.wait()
    before = (mount.path / "last/shard-0.safetensors").open("rb")
    script = "import sys, cachefs\nfor name in sys.argv[3:]:\n"
    script += " print(cachefs.adopt(f'{sys.argv[1]}/{name}', f'{sys.argv[2]}/{name}'))"
    for name, body in files.items():
        (ram_dir / name).write_bytes(body)
        (ram_dir / name).chmod(0o640)
    labels: dict[str, bytes] = {}
    with suppress(OSError):  # A tmpfs may not have such attributes.
        os.setxattr(ram_dir / "model.index.json", "user.step", b"4000")
        labels["user.step"] = b"4000"
    words = [sys.executable, "-c", script, str(ram_dir), str(mount.path / "last"), *files]
    done = subprocess.run(words, env=mount.env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["copy"] * 4, done.stderr
    for name, body in files.items():
        assert (mount.path / "last" / name).read_bytes() == body
        assert not (ram_dir / name).exists()
    index = mount.path / "last/model.index.json"
    assert os.stat(index).st_mode & 0o777 == 0o640
    assert {each: os.getxattr(index, each) for each in os.listxattr(index)} == labels
    with before:
        assert before.read() == b"of the step before", "who had it open keeps it"
    mount.wait()
    for name, body in files.items():
        assert bucket.get(f"last/{name}") == body
    assert sorted(os.listdir(mount.path / "last")) == sorted(files)


def test_adopting_what_was_written_to_the_device(
    mounted: MountFactory, bucket: Any, disk_dir: Path, client: Client
) -> None:
    """O_DIRECT to the cache's own filesystem, as GPUDirect Storage does: the very file moves in."""
    mount = mounted(bucket, cache_dirs=[disk_dir / "cache"])
    source = disk_dir / "direct.bin"

    def write(path: str) -> bytes:
        import mmap

        block = mmap.mmap(-1, 4 << 20)
        block.write(os.urandom(4 << 20))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.pwrite(fd, block, 0)
        os.close(fd)
        return bytes(block)

    body = client.run(write, source)
    writer = source.open("ab")
    told = mount.cli("adopt", source, mount.path / "direct.bin")
    assert (told.returncode, source.exists()) == (1, True), "somebody may still write to it"
    assert "open for writing" in told.stderr
    writer.close()
    number = source.stat().st_ino
    told = mount.cli("adopt", source, mount.path / "direct.bin", "--json")
    assert json.loads(told.stdout) == {"method": "link", "bytes": len(body)}
    assert not source.exists()
    inodes = {path.stat().st_ino for path in (disk_dir / "cache/files").rglob("*")}
    assert number in inodes, "not one byte was copied"
    assert (mount.path / "direct.bin").read_bytes() == body
    (mount.path / "direct.bin").rename(mount.path / "model.bin")
    mount.wait()
    assert bucket.get("model.bin") == body
    inside = disk_dir / "inside"
    inside.symlink_to(mount.path)
    for path, code in (
        (mount.path / "model.bin", 2),
        (inside / "missing", 1),
        (disk_dir / "missing", 1),
        (disk_dir, 1),
    ):
        assert mount.cli("adopt", path, mount.path / "x").returncode == code, path
