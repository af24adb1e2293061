"""The daemon is killed again and again under load: no call fails, no byte differs, no leak."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.aiming import KINDS, Aim
from tests.support.actor import pattern
from tests.support.client import Client
from tests.support.livedb import database_of
from tests.support.mounts import Mount, MountFactory, ended, poll

pytestmark = pytest.mark.slow

LOAD = Path(__file__).with_name("load.py")
KILLED = ("ended unexpectedly",)
UNDER_FIRE = (*KILLED, "a cache file that nobody knows, set aside")
"""A kill between a copy for an upload and its transaction leaves that copy, which nobody misses."""
WRITERS = 3
Result = dict[str, Any]


@dataclass(slots=True)
class Loads:
    """Client programs under way, each in a directory of its own, and their local twins."""

    local: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, mounted: Path, *, seed: int, light: bool) -> None:
        for number in range(WRITERS):
            folders = [top / f"w{number}" for top in (mounted, self.local)]
            for folder in folders:
                folder.mkdir()
            words = [sys.executable, str(LOAD), *map(str, folders), str(seed + number)]
            words += ["light"] if light else []
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.running.append(subprocess.Popen(words, text=True, **pipes))  # type: ignore[call-overload]

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.running]

    def results(self) -> list[Result]:
        """Let each come to its end; what it has to tell."""
        for each in self.running:
            assert each.stdin is not None
            each.stdin.close()
            each.stdin = None
        return [json.loads(each.communicate(timeout=60)[0]) for each in self.running]

    def end(self) -> None:
        for each in self.running:
            each.kill()
            each.wait()


@pytest.fixture
def loads(ram_dir: Path) -> Iterator[Loads]:
    local = ram_dir / "local"
    local.mkdir()
    made = Loads(local)
    yield made
    made.end()


# ---- killing ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Kills:
    """Those of one run: when they were, and request -> how many of them found it in flight."""

    times: list[float] = field(default_factory=list)
    hit: Counter[str] = field(default_factory=Counter)


def kill_many(
    mount: Mount, programs: list[int], kills: int, rng: random.Random, longest: float
) -> Kills:
    """Kill at random instants, now and then before the new daemon is ready; in the end while such
    requests are in flight as no kill has hit before."""
    done, aim = Kills(), Aim(mount, programs, rng)
    for number in range(kills):
        missing = [kind for kind in KINDS if not done.hit[kind]]
        if kills - number <= len(missing):
            aim.wait_for(rng.choice(missing))
        else:
            time.sleep(rng.uniform(0.0, longest))
        _kill(mount, aim, done)
        if rng.random() < 0.15:
            old = mount.daemon_pid
            poll(lambda old=old: _reread(mount) != old, what="the start of a new daemon")
        else:
            mount.took_over(mount.daemon_pid)
    mount.took_over(0)
    return done


def _kill(mount: Mount, aim: Aim, done: Kills) -> None:
    mount.keep_log()
    done.times.append(time.monotonic())
    done.hit.update(aim.kill())
    assert ended([mount.daemon_pid], 10)


def _reread(mount: Mount) -> int:
    mount.reread()
    return mount.daemon_pid


def report(results: list[Result], kills: Kills) -> None:
    """For people: what was hit, and how long anybody waited."""
    times = kills.times
    spanning = Counter(
        kind
        for when in times
        for kind in {
            kind for told in results for kind, begun, ended in told["slow"] if begun < when < ended
        }
    )
    print(f"{len(times)} kills, {sum(told['steps'] for told in results)} steps")
    print("requests that kills hit:", dict(kills.hit))
    print("calls that kills hit:", dict(spanning))
    longest = max((seconds, kind) for told in results for kind, seconds in told["longest"].items())
    print(f"longest stall: {longest[0]:.3f} s in {longest[1]}")


# ---- what must hold afterwards ------------------------------------------------------------------


def check(mount: Mount, local: Path, store: Any, results: list[Result]) -> None:
    """Nothing differed, everything is durable, nothing leaked. `store`: a bucket or directory."""
    assert [told["differences"] for told in results] == [[]] * len(results)
    mount.wait(timeout=60)
    files = {str(path.relative_to(local)): path for path in local.rglob("*") if path.is_file()}
    shown = {key for key in store.keys() if not key.endswith("/")}  # noqa: SIM118
    missing = {name: mount.status(mount.path / name) for name in files.keys() - shown}
    assert (missing, shown - files.keys()) == ({}, set())
    for name, path in files.items():
        assert store.get(name) == path.read_bytes(), f"{name} differs in the store"
    check_space(mount)


def check_space(mount: Mount) -> None:
    """Every cache file belongs to a generation of a living inode, and the ledger is right."""
    poll(lambda: _leaked(mount) == (set(), set(), set()), 10, what="no leaked file")
    until = time.monotonic() + 10
    while not _agree(counted := _counted(mount), on_disk := _allocated(mount)):
        assert time.monotonic() < until, f"the ledger says {counted}, the disk {sum(on_disk)} bytes"
        time.sleep(0.05)


def _agree(counted: int, on_disk: list[int]) -> bool:
    """A filesystem that allocates late may take a block for the extents of a file when it writes it
    back, long after the write; the next scan of the reaper finds that."""
    return abs(sum(on_disk) - counted) <= 4096 * len(on_disk)


def _leaked(mount: Mount) -> tuple[set[int], set[int], set[int]]:
    """(files without a row, rows without a file, files of inodes that are gone)."""
    (folder,) = mount.cache_dirs
    files = {int(path.name) for path in (folder / "files").rglob("*") if path.is_file()}
    with database_of(folder) as database:
        rows = database.execute("SELECT file FROM generation").fetchall()
        orphans = database.execute(
            "SELECT file FROM generation WHERE ino NOT IN (SELECT ino FROM inode WHERE nlink>0)"
        ).fetchall()
    known = {row[0] for row in rows}
    return files - known, known - files, {row[0] for row in orphans}


def _counted(mount: Mount) -> int:
    return int(mount.status()["cache"]["used_bytes"])


def _allocated(mount: Mount) -> list[int]:
    """Bytes that each cache file takes."""
    (folder,) = mount.cache_dirs
    return [p.stat().st_blocks * 512 for p in (folder / "files").rglob("*") if p.is_file()]


# ---- runs ---------------------------------------------------------------------------------------


def _under_fire(mount: Mount, loads: Loads, store: Any, kills: int, *, light: bool = False) -> None:
    seed = int(os.environ.get("CACHEFS_TEST_SEED", random.randrange(10**9)))
    print(f"CACHEFS_TEST_SEED={seed}")
    begun = time.monotonic()
    loads.start(mount.path, seed=seed, light=light)
    time.sleep(0.5)
    try:
        longest = 0.6 if light else 1.5
        done = kill_many(mount, loads.pids, kills, random.Random(seed), longest)
        results = loads.results()
        report(results, done)
        assert {kind for kind in KINDS if done.hit[kind]} == set(KINDS)
        print(f"{time.monotonic() - begun:.0f} s")
        assert mount.status()["takeovers"] >= kills / 2
        check(mount, loads.local, store, results)
    except BaseException:
        print(mount.log[-30_000:])
        raise


@pytest.mark.timeout(180)
def test_under_load(mounted: MountFactory, dir_store: Any, loads: Loads) -> None:
    _under_fire(mounted(dir_store, allow=UNDER_FIRE), loads, dir_store, 9)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_fifty_kills(mounted: MountFactory, bucket: Any, loads: Loads) -> None:
    """With a real object store, where uploads take their time."""
    _under_fire(mounted(bucket, allow=UNDER_FIRE), loads, bucket, 50)


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_a_thousand_kills(mounted: MountFactory, dir_store: Any, loads: Loads) -> None:
    _under_fire(mounted(dir_store, allow=UNDER_FIRE), loads, dir_store, 1000, light=True)


def test_a_mapping_across_kills(mounted: MountFactory, dir_store: Any, client: Client) -> None:
    """Closed, yet written through its mapping while one daemon follows the other."""
    mount = mounted(dir_store, allow=KILLED)
    actor = client.actor(mount.path)
    actor("open", 0, "f", "RDWR|CREAT")
    actor("ftruncate", 0, 300_000)
    actor("map", 1, 0, 300_000)
    actor("close", 0)
    expected = bytearray(300_000)
    for number in range(2):
        mount.took_over(mount.kill_daemon())
        actor("store", 1, number, 5000, 100_000 * number)
        expected[100_000 * number : 100_000 * number + 5000] = pattern(number, 5000)
        assert mount.xattr("state", "f") == "open"
    old = mount.kill_daemon()
    actor("unmap", 1)
    mount.took_over(old)
    mount.wait()
    assert dir_store.get("f") == expected
    check_space(mount)
