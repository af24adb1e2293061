"""Which lane a file takes, with the proof that it did."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.place import Place, Watch, in_lane, require_passthrough
from tests.support.actor import pattern
from tests.support.client import Client
from tests.support.mounts import MountFactory

MIB = 1 << 20
passthrough_only = pytest.mark.parametrize("lane", [in_lane("passthrough")], indirect=True)


# ---- passthrough --------------------------------------------------------------------------------


def test_new_files(fast_place: Place) -> None:
    actor, watch = fast_place.actor(), fast_place.watch()
    actor("open", 0, "f", "RDWR|CREAT|EXCL")
    for number in range(5):
        actor("write", 0, number, MIB)
    assert actor("pread", 0, 5000, MIB - 1000)["len"] == 5000
    assert fast_place.lane_of("f") == "passthrough"
    actor("close", 0)
    assert watch.data() == {}
    assert (fast_place / "f").stat().st_size == 5 * MIB
    fast_place.durable()
    assert fast_place.store.get("f") == b"".join(pattern(n, MIB) for n in range(5))


@pytest.mark.parametrize("how", ["open", "path"])
def test_truncated_files(fast_place: Place, how: str) -> None:
    """Emptied with no other handle open: as good as new."""
    (fast_place / "f").write_bytes(b"old" * 1000)
    fast_place.durable()
    actor, watch = fast_place.actor(), fast_place.watch()
    if how == "path":
        actor("truncate", "f", 0)
        assert (fast_place / "f").stat().st_size == 0
    actor("open", 0, "f", "WRONLY|TRUNC")
    actor("write", 0, 1, MIB)
    assert fast_place.lane_of("f") == "passthrough"
    actor("close", 0)
    assert watch.data() == {}
    fast_place.durable()
    assert fast_place.store.get("f") == pattern(1, MIB)


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "dirty"])
def test_reads_of_cached_files(fast_place: Place, durable: bool) -> None:
    body = os.urandom(3 * MIB)
    (fast_place / "f").write_bytes(body)
    if durable:
        fast_place.durable()
    actor, watch = fast_place.actor(), fast_place.watch()
    actor("open", 0, "f", "RDONLY")
    actor("open", 1, "f", "RDONLY")
    for offset in range(0, 3 * MIB, 100_000):
        assert actor("pread", offset // 100_000 % 2, 100_000, offset)["len"] > 0
    assert actor("mmap_read", 0, 5000, 2 * MIB)["len"] == 5000
    assert fast_place.lane_of("f") == "passthrough"
    assert watch.data() == {}
    assert (fast_place / "f").read_bytes() == body


def _write_ten_thousand(path: str, ready: str, go: str, done: str, end: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x")
    Path(ready).touch()
    while not os.path.exists(go):
        time.sleep(0.01)
    for _ in range(10_000):
        os.write(fd, b"y" * 4096)
    Path(done).touch()
    while not os.path.exists(end):
        time.sleep(0.01)
    os.close(fd)
    return os.stat(path).st_size


def test_ten_thousand_writes_ask_next_to_nothing(fast_place: Place) -> None:
    """Not one request for security.capability or for attributes before each of them."""
    from tests.support.mounts import poll

    ready, go, done, end = (fast_place.local / name for name in ("ready", "go", "done", "end"))
    writer = fast_place.client.start(_write_ten_thousand, fast_place / "f", ready, go, done, end)
    poll(ready.exists)
    os.getxattr(fast_place / "f", "user.cachefs.lane")
    watch = fast_place.watch()
    go.touch()
    poll(done.exists, timeout=40)
    seen = watch.seen()
    assert fast_place.lane_of("f") == "passthrough"
    end.touch()
    assert writer.result() == 1 + 4096 * 10_000
    assert sum(seen.values()) <= 2, seen


# ---- tracked ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["RDWR", "WRONLY|APPEND", "RDWR|CREAT"])
def test_editing_is_tracked(fast_place: Place, flags: str) -> None:
    """Every extent is known, so that only it is uploaded."""
    body = bytearray(os.urandom(MIB))
    (fast_place / "f").write_bytes(body)
    fast_place.durable()
    actor, watch = fast_place.actor(), fast_place.watch()
    actor("open", 0, "f", flags)
    for number in range(3):
        actor("pwrite", 0, number, 5000, 10_000 * number)
    assert fast_place.lane_of("f") == "tracked"
    actor("close", 0)
    assert watch.data()["WRITE"] >= 3
    for number in range(3):
        at = len(body) if "APPEND" in flags else 10_000 * number
        body[at : at + 5000] = pattern(number, 5000)
    fast_place.durable()
    assert fast_place.store.get("f") == body


@pytest.mark.parametrize("flag", ["SYNC", "DSYNC"])
def test_synchronous_writers_are_tracked(fast_place: Place, flag: str) -> None:
    """Each write is followed by a sync of the metadata, too."""
    actor, watch = fast_place.actor(), fast_place.watch()
    actor("open", 0, "f", f"RDWR|CREAT|{flag}")
    actor("write", 0, 1, 5000)
    assert fast_place.lane_of("f") == "tracked"
    assert watch.data()["WRITE"] >= 1
    actor("close", 0)
    assert (fast_place / "f").read_bytes() == pattern(1, 5000)


@pytest.mark.parametrize("mode", [stat.S_ISUID | 0o755, stat.S_ISGID | 0o775])
def test_privileged_files_are_written_in_the_tracked_lane(fast_place: Place, mode: int) -> None:
    """Clearing the bits at a write is the daemon's, so it must see the write."""
    actor, watch = fast_place.actor(), fast_place.watch()
    (fast_place / "f").write_bytes(b"old")
    os.chmod(fast_place / "f", mode)
    fast_place.path.chmod(0o777)
    os.chown(fast_place / "f", 12345, 12345)
    os.chmod(fast_place / "f", mode)
    watch.restart()
    actor("become", 12345, 12345, [])
    actor("open", 0, "f", "WRONLY|TRUNC")
    actor("write", 0, 1, 5000)
    assert fast_place.lane_of("f") == "tracked"
    assert watch.data()["WRITE"] >= 1
    assert stat.S_IMODE((fast_place / "f").stat().st_mode) == mode & 0o777
    actor("close", 0)


def test_privileged_files_are_read_in_the_passthrough_lane(fast_place: Place) -> None:
    (fast_place / "f").write_bytes(b"x" * 5000)
    os.chmod(fast_place / "f", 0o4755)
    actor, watch = fast_place.actor(), fast_place.watch()
    actor("open", 0, "f", "RDONLY")
    assert actor("pread", 0, 5000, 0)["len"] == 5000
    assert fast_place.lane_of("f") == "passthrough"
    assert watch.data() == {}


@passthrough_only
def test_low_headroom(mounted: MountFactory, dir_store: Any, client: Client) -> None:
    """Each passthrough writer reserves 30 of 100 MiB: the fourth is tracked, until one is gone."""
    options = {"cache.size": "100MiB", "mount.passthrough_headroom": "0.3"}
    mount = mounted(dir_store, options=options)
    require_passthrough(mount)
    actor = client.actor(mount.path)
    for number in range(4):
        actor("open", number, f"f{number}", "WRONLY|CREAT")
        actor("write", number, number, 5000)
    lanes = [mount.xattr("lane", f"f{number}") for number in range(4)]
    assert lanes == ["passthrough", "passthrough", "passthrough", "tracked"]
    actor("close", 0)
    actor("open", 4, "f4", "WRONLY|CREAT")
    assert mount.xattr("lane", "f4") == "passthrough"
    for number in range(1, 5):
        actor("close", number)
    mount.wait()
    assert dir_store.keys() == [f"f{number}" for number in range(5)]


@passthrough_only
def test_twice_the_largest_file_of_the_directory(
    mounted: MountFactory, dir_store: Any, client: Client
) -> None:
    """A writer that cannot be slowed down gets the lane where its like would fit."""
    options = {"cache.size": "100MiB", "mount.passthrough_headroom": "0.01"}
    mount = mounted(dir_store, options=options, allow=("outgrew its reservation",))
    actor = client.actor(mount.path)
    for folder in ("big", "small"):
        actor("mkdir", folder)
    actor("open", 0, "big/one", "WRONLY|CREAT")
    for number in range(40):
        actor("write", 0, number, MIB)
    assert mount.xattr("lane", "big/one") == "passthrough"
    actor("close", 0)
    actor("open", 0, "big/two", "WRONLY|CREAT")
    actor("open", 1, "small/one", "WRONLY|CREAT")
    assert mount.xattr("lane", "big/two") == "tracked"
    assert mount.xattr("lane", "small/one") == "passthrough"
    actor("close", 0)
    actor("close", 1)


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
def test_switched_off(place: Place) -> None:
    """`mount.passthrough=off`: every byte passes the daemon, and status says why."""
    told = place.mount.status()["lanes"]
    assert told["passthrough"] is False
    assert "mount.passthrough" in told["reason"]
    actor, watch = place.actor(), place.watch()
    actor("open", 0, "f", "RDWR|CREAT")
    actor("write", 0, 1, 100_000)
    assert place.lane_of("f") == "tracked"
    actor("close", 0)
    assert watch.data()["WRITE"] >= 1
    watch.restart()
    actor("open", 0, "f", "RDONLY|DIRECT")
    actor("open", 1, "f", "RDONLY")
    assert actor("pread", 1, 100_000, 0)["len"] == 100_000
    assert place.lane_of("f") == "tracked"


@passthrough_only
def test_files_of_the_store(mounted: MountFactory, dir_store: Any, client: Client) -> None:
    """Tracked while they are being fetched, passthrough once they are all here."""
    body = os.urandom(3 * MIB)
    (dir_store.path / "f").write_bytes(body)
    mount = mounted(dir_store)
    actor = client.actor(mount.path)
    actor("open", 0, "f", "RDONLY")
    assert mount.xattr("lane", "f") == "tracked"
    assert actor("pread", 0, 3 * MIB, 0)["len"] == 3 * MIB
    actor("close", 0)
    watch = Watch(mount)
    actor("open", 0, "f", "RDONLY")
    assert mount.xattr("lane", "f") == "passthrough"
    assert actor("pread", 0, 3 * MIB, 0)["len"] == 3 * MIB
    assert watch.data() == {}
    assert (mount.path / "f").read_bytes() == body


def test_who_clears_privileges(place: Place) -> None:
    """A write by somebody else than root takes set-user-id away, also where a reader had pinned the
    file in the passthrough lane before; root's leaves it."""
    place.path.chmod(0o777)
    (place / "f").write_bytes(b"x" * 5000)
    os.chmod(place / "f", 0o4777)
    reader, root, user = (place.actor() for _ in range(3))
    user("become", 12345, 12345, [])
    reader("open", 0, "f", "RDONLY")
    assert place.lane_of("f") == place.lane
    for flags in ("RDWR", "WRONLY|TRUNC"):
        root("open", 0, "f", flags)
        root("write", 0, 1, 1000)
        root("close", 0)
        assert stat.S_IMODE((place / "f").stat().st_mode) == 0o4777
        user("open", 0, "f", flags)
        user("write", 0, 2, 1000)
        assert stat.S_IMODE((place / "f").stat().st_mode) == 0o777
        user("close", 0)
        os.chmod(place / "f", 0o4777)
