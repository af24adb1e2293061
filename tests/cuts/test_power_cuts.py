"""The power goes while programs save: what fsync promised is there, nothing torn is published.

A real mount writes to a recorded disk, its `file:///` store to another; afterwards images of both
are made as a cut at some instant would have left them (any part of what was not flushed, torn at
sectors), mounted, recovered by the product's own code and compared with what the programs had been
told.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachefs.flush.reboot import NOT_ON_DISK
from cachefs.model.states import NEVER_ON_DISK
from tests.cuts import recovered
from tests.cuts.oracle import Oracle, check
from tests.cuts.recording import Disks, Past, run, unmount
from tests.support import lanes
from tests.support.mounts import Mount, clean_environment

pytestmark = pytest.mark.slow

WRITER = Path(__file__).with_name("writer.py")
WRITERS = 3
HELD = (NOT_ON_DISK, NEVER_ON_DISK, "pending")
"""What may be in an effect's way."""
LANES = ("tracked", "passthrough")
_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE, see sync_file_range(2)."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Recording:
    """A run that was recorded: the disks, what programs were told, from where on to cut."""

    disks: Disks
    oracle: Oracle
    begin: int


def record(
    folder: Path, kind: str, lane: str, seconds: float, seed: int, *, large: bool = False
) -> Recording:
    """Programs save for a while; `large`: one writes a file that is larger than the cache."""
    disks = Disks(folder, kind, "ext4", times=2 if large else 1)
    cache, store = disks.tops
    (store / "store").mkdir()
    (folder / "home").mkdir()
    options = dict(each.split("=") for each in recovered.OPTIONS)
    options["mount.passthrough"] = lanes.OPTIONS[lane]
    if large:
        options["cache.size"] = "64MiB"
    mount = Mount(
        store=(store / "store").as_uri(), path=folder / "mnt", cache_dirs=[cache / "cache"],
        options=options, env=clean_environment(folder / "home"),
    )  # fmt: skip
    facts = [folder / f"facts{number}" for number in range(1 if large else WRITERS)]
    try:
        mount.start()
        for top in (cache, store):
            run("sync", "-f", top)
        begin = disks.position
        mode = ["large"] if large else []
        _write_for(seconds, mount.path, disks.log, facts, seed, cache, mode)
        offloaded = mount.metric("cachefs_offloaded_bytes_total")
        assert not large or offloaded > 0, "nothing left the cache while it was written"
        assert mount.unmount(drain_timeout=5) in (0, 3)
    finally:
        mount.destroy()
        disks.close()
    lines = [line for each in facts for line in each.read_text().splitlines()]
    return Recording(disks, Oracle(lines), begin)


def _write_for(
    seconds: float,
    top: Path,
    log: Path,
    facts: list[Path],
    seed: int,
    cache: Path,
    mode: list[str],
) -> None:
    with ExitStack() as stack:
        programs = []
        for number, path in enumerate(facts):
            words = [str(top / f"w{number}"), str(log), str(10 * seed + number), *mode]
            out = stack.enter_context(open(path, "w"))
            started = subprocess.Popen(
                [sys.executable, str(WRITER), *words], stdin=subprocess.PIPE, stdout=out
            )
            stack.callback(started.kill)
            programs.append(started)
        _write_back_for(seconds, cache, random.Random(seed))
        for each in programs:
            assert each.stdin is not None
            each.stdin.close()
            assert each.wait(60) == 0, "a program was told of an error"


def _write_back_for(seconds: float, top: Path, rng: random.Random) -> None:
    """As the kernel does under load: bytes go to the disk in no order, and without a flush."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        files = [path for path in top.rglob("*") if path.is_file()]
        for path in rng.sample(files, min(3, len(files))):
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _START_WRITING)
            os.close(fd)
        time.sleep(0.01)


@contextmanager
def mounted(images: list[Path], tops: list[Path]) -> Iterator[None]:
    with ExitStack() as stack:
        for image, top in zip(images, tops, strict=True):
            run("mount", "-o", "loop", image, top)
            stack.callback(unmount, top)
        yield


def survive(recording: Recording, folder: Path, count: int, seed: int) -> Counter[str]:
    """Cut so many times; AssertionError with all that is wrong."""
    past, rng = Past(recording.disks, folder), random.Random(seed)
    images = [folder / "cut0", folder / "cut1"]
    tops = recording.disks.tops
    told: Counter[str] = Counter()
    wrong: list[str] = []
    for instant in past.instants(count, recording.begin, rng):
        told["writes in doubt"] += past.cut(instant, images, rng)
        told["images"] += 1
        with mounted(images, tops):
            view = recovered.look(tops[0] / "cache", tops[1] / "store")
        told["held"] += view.recovered.held
        told["lost, never synced"] += view.recovered.lost
        told["published later"] += view.recovered.dirty
        found = _judge(recording.oracle, instant, view)
        wrong += [f"seed {seed}, cut at {instant}: {each}" for each in found]
    past.close()
    assert not wrong, "\n".join(wrong[:20])
    return told


def _judge(oracle: Oracle, instant: int, view: recovered.View) -> list[str]:
    found = check(oracle, instant, view.shown, {})
    found += [f"after flushing: {each}" for each in check(oracle, instant, view.after, view.bucket)]
    found += [f"left: {each}" for each in view.left if not any(why in each for why in HELD)]
    found += [f"fsck: {each}" for each in view.offences]
    if view.recovered.missing:
        found.append(f"{view.recovered.missing} dirty cache files are missing")
    if (view.again.dirty, view.again.held) != (view.recovered.dirty, 0):
        found.append(f"recovered twice: {view.recovered}, {view.again}")
    return found


def cut_power(
    folder: Path, kind: str, lane: str, seconds: float, count: int, *, large: bool = False
) -> None:
    seed = int(os.environ.get("CACHEFS_TEST_SEED", random.randrange(10**6)))
    print(f"CACHEFS_TEST_SEED={seed}")
    recording = record(folder, kind, lane, seconds, seed, large=large)
    told = survive(recording, folder, count, seed)
    told["calls"] = len(recording.oracle.facts)
    told["synced calls"] = sum(each["op"] == "fsync" for each in recording.oracle.facts)
    print(f"{kind} {lane}:", dict(told))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "lane", "images"), [("ext4", "tracked", 6), ("xfs", "passthrough", 3)]
)
def test_power_cuts(ram_dir: Path, kind: str, lane: str, images: int) -> None:
    cut_power(ram_dir, kind, lane, 3.0, images)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_of_a_file_larger_than_the_cache(ram_dir: Path, kind: str) -> None:
    """What an fsync returned for is there, in the cache or in the store, and nothing is torn: while
    ranges leave and come back, while it is put together, and when it is edited in place later."""
    cut_power(ram_dir, kind, "tracked", 8.0, 4, large=True)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "rounds"), [("ext4", 4), ("xfs", 2)])
def test_many_power_cuts_of_larger_files(ram_dir: Path, kind: str, rounds: int) -> None:
    """160 images of ext4, 80 of XFS."""
    for number in range(rounds):
        folder = ram_dir / str(number)
        folder.mkdir()
        cut_power(folder, kind, "tracked", 10.0, 40, large=True)
        run("rm", "-rf", folder)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "rounds"), [("ext4", 10), ("xfs", 4)])
def test_many_power_cuts(ram_dir: Path, kind: str, rounds: int) -> None:
    """500 images of ext4, 200 of XFS, of runs in both lanes."""
    for number in range(rounds):
        folder = ram_dir / str(number)
        folder.mkdir()
        cut_power(folder, kind, LANES[number % 2], 8.0, 50)
        run("rm", "-rf", folder)
