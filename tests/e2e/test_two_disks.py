"""Two disks under one cache: the counters of both tell who is written to."""

from __future__ import annotations

import hashlib
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
SHARDS = 8
OPTIONS = {"cache.size": "400MiB", "cache.meta_reserve": "1MiB", "flush.settle": "60s",
           "cache.measure": "false", "flush.settle_max": "60s"}  # fmt: skip


class Disk:
    """An ext4 on a block device of its own."""

    def __init__(self, image: Path, top: Path, size: int = 256) -> None:
        """`size` in MiB."""
        self.top = top
        top.mkdir()
        with open(image, "wb") as file:
            file.truncate(size * MIB)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, top], check=True)
        found = subprocess.check_output(["findmnt", "-no", "SOURCE", top], text=True).strip()
        self._sys = Path("/sys/block", os.path.basename(found))

    @property
    def written(self) -> int:
        """Bytes so far."""
        return int((self._sys / "stat").read_text().split()[6]) * 512

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", self.top], check=True)

    def spin(self, yes: bool) -> None:
        (self._sys / "queue/rotational").write_text(str(int(yes)))


@pytest.fixture
def disks(tmp_path: Path, after_mounts: ExitStack) -> list[Disk]:
    made = [Disk(tmp_path / f"{n}.img", tmp_path / f"disk{n}") for n in range(2)]
    for disk in made:
        disk.spin(False)
        after_mounts.callback(disk.unmount)
    return made


def save(folder: str, shards: int) -> None:
    """Several writers at once, and all of it on the disk."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> None:
        fd = os.open(f"{folder}/{number}.safetensors", os.O_WRONLY | os.O_CREAT)
        for _ in range(6):
            os.write(fd, os.urandom(1 << 20))
        os.fsync(fd)
        os.close(fd)

    with ThreadPoolExecutor(shards) as pool:
        list(pool.map(one, range(shards)))


def test_one_save_is_written_to_both(
    mounted: MountFactory, dir_store: Any, disks: list[Disk], client: Client
) -> None:
    mount = mounted(dir_store, cache_dirs=[d.top / "cache" for d in disks], options=OPTIONS)
    before = [disk.written for disk in disks]
    client.run(save, mount.path, SHARDS)
    shares = [disk.written - start for disk, start in zip(disks, before, strict=True)]
    assert sum(shares) >= SHARDS * 6 * MIB
    assert min(shares) >= 0.4 * SHARDS * 6 * MIB, "half each, and what the database takes"
    assert max(shares) <= 0.8 * SHARDS * 6 * MIB


def test_the_one_that_spins_waits_until_it_is_needed(
    mounted: MountFactory, dir_store: Any, disks: list[Disk], client: Client
) -> None:
    disks[0].spin(True)
    mount = mounted(dir_store, cache_dirs=[d.top / "cache" for d in disks], options=OPTIONS)
    before = disks[1].written
    client.run(save, mount.path, SHARDS)
    assert disks[1].written - before >= SHARDS * 6 * MIB
    used = [each["used_bytes"] for each in mount.status()["cache"]["devices"]]
    assert used[0] == 0
    assert used[1] >= SHARDS * 6 * MIB


@pytest.fixture
def unequal(tmp_path: Path, after_mounts: ExitStack) -> list[Disk]:
    """A small fast one, and a large one that spins."""
    made = [Disk(tmp_path / f"{n}.img", tmp_path / f"d{n}", n) for n in (120, 500)]
    for disk in made:
        disk.spin(disk is made[1])
        after_mounts.callback(disk.unmount)
    return made


def write_long(path: str, count: int, told: str) -> str:
    """`count` MiB, a tenth of it on the disk already; the SHA-256."""
    import hashlib
    import os

    whole, fd = hashlib.sha256(), os.open(path, os.O_RDWR | os.O_CREAT)
    for number in range(count):
        body = number.to_bytes(4, "big") * (1 << 18)
        whole.update(body)
        assert os.write(fd, body) == len(body)
        if number == count // 10:
            os.fsync(fd)
            open(told, "w").close()
    os.close(fd)
    return whole.hexdigest()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["tracked"])
def test_a_file_that_outgrows_its_disk_goes_on_on_the_other(
    mounted: MountFactory, dir_store: Any, unequal: list[Disk], client: Client, tmp_path: Path
) -> None:
    """Nothing of it is sent away while there is room, and a daemon that dies loses nothing."""
    told = tmp_path / "told"
    options = {**OPTIONS, "cache.size": "500MiB"}
    allow = ("ended unexpectedly", "set aside", "room|full")
    mount = mounted(
        dir_store, cache_dirs=[d.top / "cache" for d in unequal], options=options, allow=allow
    )
    writer = client.start(write_long, mount.path / "long.bin", 280, told)
    poll(told.exists, 30)
    mount.took_over(mount.kill_daemon())
    written = writer.result(60)
    used = [each["used_bytes"] for each in mount.status()["cache"]["devices"]]
    assert used[1] >= 280 * MIB, used
    assert mount.metric("cachefs_offloaded_bytes_total") == 0
    poll(lambda: mount.status()["cache"]["devices"][0]["used_bytes"] == 0, 20)
    mount.wait()
    assert hashlib.sha256(dir_store.get("long.bin")).hexdigest() == written


def punch(path: str, growing: str, size: int) -> tuple[int, list[int]]:
    """Holes into the first 60 MiB of a file, one after another, while one (perhaps the same) grows
    to `size` MiB: how many, and which of them are none afterwards."""
    import ctypes
    import os
    from concurrent.futures import ThreadPoolExecutor

    fallocate, block = ctypes.CDLL(None, use_errno=True).fallocate64, 4096
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    fd, other = (os.open(name, os.O_RDWR | os.O_CREAT) for name in (path, growing))
    for number in range(60):
        os.pwrite(fd, b"\xff" * (1 << 20), number << 20)

    def grow() -> None:
        for number in range(60 if path == growing else 0, size):
            assert os.pwrite(other, b"\xee" * (1 << 20), number << 20) == 1 << 20

    made = 0
    with ThreadPoolExecutor() as pool:
        grown = pool.submit(grow)
        while not grown.done() and made < (60 << 20) // block:
            assert fallocate(fd, 3, made * block, block) == 0, os.strerror(ctypes.get_errno())
            made += 1
        grown.result()
    holes = [number for number in range(made) if any(os.pread(fd, block, number * block))]
    os.close(fd)
    os.close(other)
    return made, holes


@pytest.mark.timeout(90)
@pytest.mark.parametrize("lane", ["tracked"])
@pytest.mark.parametrize(("growing", "size"), [("a.bin", 180), ("b.bin", 80)])
def test_holes_are_made_in_a_file_that_moves(
    mounted: MountFactory,
    dir_store: Any,
    unequal: list[Disk],
    client: Client,
    growing: str,
    size: int,
) -> None:
    """None of them is left behind, and who waits for room has it where the file is then."""
    options = {**OPTIONS, "cache.size": "500MiB"}
    mount = mounted(dir_store, cache_dirs=[d.top / "cache" for d in unequal], options=options)
    made, lost = client.run(punch, mount.path / "a.bin", mount.path / growing, size)
    assert made and lost == []
    assert "goes on on another device" in mount.log


@pytest.mark.timeout(90)
@pytest.mark.parametrize("lane", ["tracked"])
def test_the_speed_of_disks_is_measured_once(
    mounted: MountFactory, dir_store: Any, disks: list[Disk]
) -> None:
    """It is shown, and still known after a restart."""
    options = {**OPTIONS, "cache.measure": "true"}
    mount = mounted(dir_store, cache_dirs=[d.top / "cache" for d in disks], options=options)

    def speeds() -> list[int | None]:
        return [d["write_bytes_per_second"] for d in mount.status()["cache"]["devices"]]

    poll(lambda: all(speeds()), 40, what="both are measured")
    assert all(disk.written >= 48 * MIB for disk in disks)
    known = speeds()
    mount.remount()
    assert speeds() == known
