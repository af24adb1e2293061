"""A cache in RAM over one on a disk over a warm tier over the store: each may go, in that order."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Failed, Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

MIB = 1 << 20
NEVER = {"flush.settle": "100s", "flush.settle_max": "100s"}
LOST = ("missing", "lost", "has failed", "not tended", "damaged", "stalled", "copied|copy")
KEPT = ("store|reach|transient|retry|degraded|again",)


def kind_of(mount: Mount, name: str) -> str:
    """`ram`, `disk` or nothing: where the file's bytes are in the cache, by what lies there."""
    size = (mount.path / name).stat().st_size
    kinds = zip(("ram", "disk"), mount.cache_dirs, strict=True)
    for kind, folder in kinds:
        if any(path.stat().st_size == size for path in (folder / "files").glob("*/*")):
            return kind
    return ""


def lose(folder: Path) -> None:
    """All that is in a directory."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def dirs(ram_dir: Path, disk_dir: Path) -> list[Path]:
    return [ram_dir / "cache", disk_dir / "cache"]


@pytest.mark.timeout(120)
def test_what_is_left_is_read(
    mounted: MountFactory, bucket: Any, link: Any, dirs: list[Path], disk_dir: Path
) -> None:
    """The levels are reached one after the other, while the store is out of reach; then RAM goes,
    the disk's cache files do, the warm directory does."""
    warm = disk_dir / "warm"
    warm.mkdir()
    mount = mounted(
        bucket,
        endpoint=link.endpoint,
        cache_dirs=dirs,
        options={"tiers.warm": str(warm), "mount.takeover": "off"},
        allow=(*LOST, *KEPT, "no takeover|died|killed|exit|signal|gone|abort|ended|restart"),
    )
    assert os.listdir(mount.path) == []
    link.cut()
    body = os.urandom(3 * MIB + 5)
    file = mount.path / "model.bin"
    file.write_bytes(body)
    for level in ("process", "reboot", "instance"):
        mount.wait(file, survives=level, timeout=20)
        order = ["process", "reboot", "instance", "site"]
        assert order.index(mount.xattr("survives", "model.bin")) >= order.index(level)
    with pytest.raises(Failed, match="time is up"):
        mount.wait(file, timeout=0.5)
    assert mount.xattr("survives", "model.bin") == "instance"
    poll(lambda: kind_of(mount, "model.bin") == "disk", 10)

    mount.crash()
    shutil.rmtree(dirs[0])
    mount.start()
    assert file.read_bytes() == body
    mount.crash()
    lose(dirs[1] / "files")
    mount.spoiled = True  # by the test
    mount.start()
    assert file.read_bytes() == body
    assert mount.xattr("survives", "model.bin") == "instance"
    link.mend()
    mount.wait(file, survives="site", timeout=60)
    assert bucket.get("model.bin") == body
    mount.crash()
    shutil.rmtree(warm)
    lose(dirs[1] / "files")
    shutil.rmtree(dirs[0])
    mount.start()
    assert file.read_bytes() == body
    assert mount.xattr("survives", "model.bin") == "site"


def fresh(path: Path) -> bytes:
    """Content without what the kernel remembers of it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


@pytest.mark.timeout(120)
def test_what_is_left_is_read_while_mounted(
    mounted: MountFactory, bucket: Any, link: Any, dirs: list[Path], disk_dir: Path
) -> None:
    """The same without a restart in between."""
    warm = disk_dir / "warm"
    warm.mkdir()
    mount = mounted(
        bucket,
        endpoint=link.endpoint,
        cache_dirs=dirs,
        options={"tiers.warm": str(warm)},
        allow=(*LOST, *KEPT),
    )
    assert os.listdir(mount.path) == []
    link.cut()
    body = os.urandom(3 * MIB + 5)
    file = mount.path / "model.bin"
    file.write_bytes(body)
    mount.wait(file, survives="instance", timeout=30)
    poll(lambda: kind_of(mount, "model.bin") == "disk", 10)
    mount.spoiled = True  # by the test
    shutil.rmtree(dirs[0])
    assert fresh(file) == body
    lose(dirs[1] / "files")
    assert fresh(file) == body
    assert mount.xattr("survives", "model.bin") == "instance"
    link.mend()
    mount.wait(file, survives="site", timeout=60)
    assert bucket.get("model.bin") == body
    shutil.rmtree(warm)
    lose(dirs[1] / "files")
    assert fresh(file) == body
    assert mount.xattr("survives", "model.bin") == "site"


def test_new_files_begin_in_ram_and_leave_it(
    mounted: MountFactory, bucket: Any, dirs: list[Path]
) -> None:
    """In the order in which they were closed, and not while they are open."""
    mount = mounted(bucket, cache_dirs=dirs, options={**NEVER})
    held = os.open(mount.path / "open.bin", os.O_RDWR | os.O_CREAT)
    os.write(held, b"o" * 1_000_001)
    body = os.urandom(MIB)
    (mount.path / "closed.bin").write_bytes(body)
    mount.wait(mount.path / "closed.bin", survives="reboot", timeout=20)
    poll(lambda: kind_of(mount, "closed.bin") == "disk", 10)
    assert mount.xattr("survives", "closed.bin") == "reboot"
    assert (mount.path / "closed.bin").read_bytes() == body
    assert kind_of(mount, "open.bin") == "ram"
    assert mount.xattr("survives", "open.bin") == "process"
    os.close(held)
    poll(lambda: kind_of(mount, "open.bin") == "disk", 10)
    devices = mount.status()["cache"]["devices"]
    assert [each["kind"] for each in devices] == ["ram", "disk"]
    assert devices[0]["used_bytes"] < MIB
    assert mount.metric("cachefs_spilled_bytes_total") == MIB + 1_000_001


def test_what_was_synced_survives_the_loss_of_ram(
    mounted: MountFactory, bucket: Any, dirs: list[Path]
) -> None:
    """fsync of a file in RAM, open all the while: what it returned for is there, and is held."""
    options = {**NEVER, "mount.takeover": "off"}
    mount = mounted(
        bucket, cache_dirs=dirs, options=options, allow=(*LOST, "held|orphan|died|ended|takeover")
    )
    (mount.path / "before.bin").write_bytes(b"b" * 200_000)
    mount.wait(mount.path / "before.bin", survives="reboot", timeout=20)
    fd = os.open(mount.path / "f.bin", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"1" * 100_000)
    os.fsync(fd)
    os.pwrite(fd, b"2" * 1000, 500)
    os.fsync(fd)
    assert kind_of(mount, "f.bin") == "ram"
    mount.crash()
    with contextlib.suppress(OSError):  # Its connection has ended.
        os.close(fd)
    shutil.rmtree(dirs[0])
    mount.start()
    expected = b"1" * 500 + b"2" * 1000 + b"1" * 98_500
    assert (mount.path / "f.bin").read_bytes() == expected
    assert mount.xattr("state", "f.bin") == "held"
    with open(mount.path / "f.bin", "rb+"):
        pass  # Somebody says that it is whole.
    mount.wait()
    assert bucket.get("f.bin") == expected


@pytest.mark.timeout(90)
def test_a_writer_that_ram_has_no_room_for(
    mounted: MountFactory, bucket: Any, dirs: list[Path], client: Client
) -> None:
    """In the tracked lane its file goes on on the disk; nobody waits, not a byte is lost."""
    options = {"cache.size": "512MiB", **NEVER, "mount.passthrough": "off"}
    mount = mounted(bucket, cache_dirs=dirs, options=options)
    ram = mount.status()["cache"]["devices"][0]
    assert ram["kind"] == "ram"
    count = ram["size_bytes"] // MIB + 20

    def write(path: str, count: int) -> None:
        with open(path, "wb", buffering=0) as file:
            for number in range(count):
                file.write(bytes([number % 251]) * (1 << 20))

    client.run(write, mount.path / "huge.bin", count, timeout=60)
    with open(mount.path / "huge.bin", "rb") as file:
        for number in range(count):
            assert file.read(MIB) == bytes([number % 251]) * MIB, number
    assert kind_of(mount, "huge.bin") == "disk"
    os.unlink(mount.path / "huge.bin")
