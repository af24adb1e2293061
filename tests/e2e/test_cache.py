"""A cache smaller than what is written and read: nothing dirty is lost, nothing waits for ever."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
SMALL = {"cache.size": "64MiB", "cache.meta_reserve": "4MiB"}


def _used(mount: Mount) -> int:
    return int(mount.status()["cache"]["used_bytes"])


@pytest.mark.slow
def test_durable_files_make_room(mounted: MountFactory, bucket: Any) -> None:
    """Four times the cache is written; each file reads back, from the cache or the bucket."""
    mount = mounted(bucket, options=SMALL)
    bodies = {f"f{n}.bin": os.urandom(8 * MIB) for n in range(32)}
    for name, body in bodies.items():
        (mount.path / name).write_bytes(body)
    mount.wait()
    poll(lambda: _used(mount) <= 64 * MIB, 20)
    for name, body in bodies.items():
        assert (mount.path / name).read_bytes() == body, name
    poll(lambda: _used(mount) <= 64 * MIB, 20)
    states = {mount.xattr("state", name) for name in bodies}
    assert states == {"durable", "remote"}


@pytest.mark.timeout(90)
def test_one_file_larger_than_the_cache(mounted: MountFactory, bucket: Any, client: Client) -> None:
    """It cannot fit: the writer gets ENOSPC (or waits, as configured), everything else goes on."""
    options = {**SMALL, "cache.full": "enospc"}
    mount = mounted(bucket, options=options, allow=("full|space|room|outgrew",))

    def write(path: str) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            for _ in range(200):
                os.write(fd, bytes(1 << 20))
        except OSError as error:
            return error.errno or 0
        finally:
            os.close(fd)
        return 0

    if mount.lane == "tracked":
        assert client.run(write, mount.path / "huge.bin", timeout=60) == errno.ENOSPC
        os.unlink(mount.path / "huge.bin")
    else:
        client.run(write, mount.path / "huge.bin", timeout=60)  # an overrun is counted, not lost
        os.unlink(mount.path / "huge.bin")
    (mount.path / "small").write_bytes(b"fine")
    mount.wait()
    assert bucket.keys() == ["small"]


@pytest.mark.timeout(120)
def test_a_full_cache_makes_writers_wait(
    mounted: MountFactory, bucket: Any, link: Any, client: Client
) -> None:
    """Store slower than the writer, cache.full=wait: writers are held up, all bytes arrive."""
    mount = mounted(bucket, endpoint=link.endpoint, options=SMALL, allow=("full|space|room",))
    link.delay = 0.3

    def write(folder: str, count: int) -> None:
        for number in range(count):
            with open(f"{folder}/f{number}.bin", "wb") as file:
                file.write(bytes([number]) * (8 << 20))

    writing = client.start(write, mount.path, 20)
    used, told = [0], mount.status()["cache"]
    while writing.process.poll() is None:
        told = mount.status()["cache"]
        used.append(told["used_bytes"])
        time.sleep(0.05)
    writing.result(90)
    assert max(used) > 40 * MIB
    if mount.lane == "tracked":
        assert max(used) <= told["size_bytes"], "never more than it may take"
    mount.wait()
    for number in range(20):
        assert bucket.get(f"f{number}.bin") == bytes([number]) * (8 * MIB)


@pytest.mark.slow
def test_a_full_cache_of_dirty_data(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Store away, cache.full=enospc: ENOSPC in the end, dirty data complete, and then it flows."""
    mount = mounted(
        bucket,
        endpoint=link.endpoint,
        options={**SMALL, "cache.full": "enospc"},
        allow=("full|space|room|store|transient|retry|degraded|reach",),
    )
    assert os.listdir(mount.path) == []
    link.cut()
    written: dict[str, bytes] = {}
    for number in range(40):
        body = os.urandom(4 * MIB)
        try:
            (mount.path / f"f{number}.bin").write_bytes(body)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            break
        written[f"f{number}.bin"] = body
    assert 8 <= len(written) < 40
    for name, body in written.items():
        assert (mount.path / name).read_bytes() == body
    assert os.listdir(mount.path)
    os.rename(mount.path / "f0.bin", mount.path / "renamed.bin")
    written["renamed.bin"] = written.pop("f0.bin")
    link.mend()
    poll(lambda: mount.status()["dirty_files"] == 0, 40)
    for name, body in written.items():
        assert bucket.get(name) == body
    (mount.path / "after").write_bytes(b"room again")


def test_low_space_and_a_long_settle_delay(mounted: MountFactory, bucket: Any) -> None:
    """Eviction never takes dirty data, however long its upload is put off."""
    mount = mounted(bucket, options={**SMALL, "flush.settle": "8s"})
    old = os.urandom(20 * MIB)
    (mount.path / "old.bin").write_bytes(old)
    mount.wait()
    dirty = {f"d{n}.bin": os.urandom(6 * MIB) for n in range(7)}
    for name, body in dirty.items():
        (mount.path / name).write_bytes(body)
    for name, body in dirty.items():
        assert (mount.path / name).read_bytes() == body
    mount.wait()
    assert (mount.path / "old.bin").read_bytes() == old
    for name, body in dirty.items():
        assert bucket.get(name) == body


def test_a_second_writer_after_a_long_pause(mounted: MountFactory, bucket: Any) -> None:
    """Two writers of one file, one closes, idle, the cache under pressure, the other writes on."""
    mount = mounted(bucket, options=SMALL)
    first = os.open(mount.path / "shared.bin", os.O_WRONLY | os.O_CREAT)
    second = os.open(mount.path / "shared.bin", os.O_WRONLY)
    os.pwrite(first, b"A" * MIB, 0)
    os.close(first)
    for number in range(10):
        (mount.path / f"other{number}.bin").write_bytes(os.urandom(8 * MIB))
    mount.wait(*(mount.path / f"other{n}.bin" for n in range(10)))
    os.pwrite(second, b"B" * MIB, MIB)
    os.close(second)
    mount.wait()
    assert bucket.get("shared.bin") == b"A" * MIB + b"B" * MIB


def test_tail_of_a_live_log(mounted: MountFactory, bucket: Any, client: Client) -> None:
    """tail -f sees each line as it is written, while uploads and evictions go on."""
    mount = mounted(bucket, options={**SMALL, "flush.open_file_interval": "300ms"})
    log = os.open(mount.path / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"begin\n")

    def tail(path: str, lines: int) -> list[str]:
        seen: list[str] = []
        with open(path) as file:
            while len(seen) < lines:
                line = file.readline()
                if line:
                    seen.append(line.strip())
                else:
                    time.sleep(0.01)
        return seen

    reader = client.start(tail, mount.path / "train.log", 31)
    for number in range(30):
        os.write(log, f"line {number}\n".encode())
        time.sleep(0.05)
    assert reader.result(20) == ["begin", *(f"line {n}" for n in range(30))]
    poll(lambda: bucket.exists("train.log"), 10, what="an open log becomes visible")
    os.write(log, b"end\n")
    os.close(log)
    mount.wait()
    assert bucket.get("train.log") == (mount.path / "train.log").read_bytes()


def test_two_devices(mounted: MountFactory, bucket: Any, ram_dir: Path, disk_dir: Path) -> None:
    """RAM first, spilling to disk; content is found on either after a remount."""
    dirs = [ram_dir / "cache", disk_dir / "cache"]
    mount = mounted(bucket, cache_dirs=dirs, options={"flush.settle": "8s"})
    bodies = {f"f{n}.bin": os.urandom(3 * MIB) for n in range(6)}
    for name, body in bodies.items():
        (mount.path / name).write_bytes(body)
    assert len(mount.status()["cache"]["devices"]) == 2
    mount.remount()
    for name, body in bodies.items():
        assert (mount.path / name).read_bytes() == body
    assert bucket.keys() == sorted(bodies)


def test_reading_in_pieces(mounted: MountFactory, bucket: Any) -> None:
    """Reads at random offsets of a large object that is not cached return its bytes."""
    body = os.urandom(48 * MIB)
    bucket.put("big.bin", body)
    mount = mounted(bucket)
    fd = os.open(mount.path / "big.bin", os.O_RDONLY)
    for offset in (40 * MIB, 5, 12 * MIB + 7, 47 * MIB, 48 * MIB - 3):
        assert os.pread(fd, 5000, offset) == body[offset : offset + 5000]
    os.close(fd)
    assert (mount.path / "big.bin").read_bytes() == body


def test_an_object_that_changes_under_a_reader(mounted: MountFactory, bucket: Any) -> None:
    """An open reader keeps its version or gets ESTALE; never a mix."""
    old, new = b"O" * (24 * MIB), b"N" * (24 * MIB)
    bucket.put("f.bin", old)
    mount = mounted(bucket)
    fd = os.open(mount.path / "f.bin", os.O_RDONLY)
    assert os.pread(fd, 100, 0) == old[:100]
    bucket.put("f.bin", new)
    seen = b""
    try:
        for offset in range(0, 24 * MIB, MIB):
            seen += os.pread(fd, MIB, offset)
    except OSError as error:
        assert error.errno == errno.ESTALE
    os.close(fd)
    assert set(seen) <= {ord("O")} or set(seen) <= {ord("N")}
