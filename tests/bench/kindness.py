"""How long local writes take while everything is flushed at full speed, against a quiet mount:
`python -m tests.bench.kindness --gib 1 --rounds 3`.

The cache is on a disk. By turns, a program writes into a file of the mount, blocks of 1 MiB and of
4 KiB with pauses between them, once while uploads are held back and once while a backlog goes to a
SeaweedFS on the same machine as fast as it can. Shown are the 99th percentiles of both and their
ratio, in each lane, with what the store spent of the processors meanwhile: where there are few, it
competes with the writer like any other program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.flushing import Bench, cpu_seconds
from tests.support import lanes, scratch
from tests.support.mounts import Mount, clean_environment
from tests.support.stores import Seaweed

_LONGEST = 20.0
_WRITER = r"""
import json, os, sys, time
path, seconds, stop = sys.argv[1], float(sys.argv[2]), sys.argv[3]
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
sizes = {"1 MiB": 1 << 20, "4 KiB": 4096}
blocks = {name: os.urandom(size) for name, size in sizes.items()}
took = {name: [] for name in sizes}
end, number = time.monotonic() + seconds, 0
while time.monotonic() < end and not os.path.exists(stop):
    for name, block in blocks.items():
        offset = number * len(block) % (64 << 20)
        began = time.perf_counter()
        os.pwrite(fd, block, offset)
        took[name].append(time.perf_counter() - began)
        time.sleep(0.003)
    number += 1
os.close(fd)
print(json.dumps(took))
"""
"""Writes over the same 64 MiB, so that what it measures is the mount and not a full page cache."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement."""

    lane: str
    block: str
    quiet_p99: float
    """Seconds."""
    flushing_p99: float
    writes: int
    """During the flush."""
    mib_per_second: float
    """Of the flush."""
    store_cpus: float
    """Processors that the store kept busy meanwhile."""


def run(gib: float, rounds: int, chosen: list[str]) -> Iterator[Turn]:
    """Turn by turn, in each lane."""
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        seaweed = Seaweed(data)
        seaweed.start()
        stack.callback(seaweed.stop)
        bench = Bench(work, seaweed, gib)
        for number in range(rounds):
            for lane in chosen if number % 2 == 0 else reversed(chosen):
                yield from _turn(bench, lane)


def _turn(bench: Bench, lane: str) -> Iterator[Turn]:
    whole = bench.seaweed.fresh_bucket()
    bucket = whole.below("run")
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=bench.work))
    mount = Mount(
        bucket.url,
        scratch.make("/tmp", "kindness"),
        [cache],
        options={
            "flush.settle": "1h",
            "flush.settle_max": "1h",
            "cache.size": str(4 * bench.total + (1 << 30)),
            "mount.passthrough": lanes.OPTIONS[lane],
        },
        env=clean_environment(bench.home, bucket.env),
        arguments=["--endpoint-url", bucket.endpoint],
    )
    mount.start()
    try:
        bench.write(mount.path / "save")
        time.sleep(2)  # closed files are synced in the background
        os.sync()
        yield from _measure(bench, mount, lane)
    finally:
        mount.unmount(drain_timeout=0)
        mount.destroy()
        mount.path.rmdir()
        shutil.rmtree(cache)
        bench.seaweed.remove_bucket(whole)


def _measure(bench: Bench, mount: Mount, lane: str) -> Iterator[Turn]:
    never, done = bench.work / "never", bench.work / "done"
    done.unlink(missing_ok=True)
    quiet = _write(mount.path / "probe-quiet.bin", 5.0, never)
    store, began = cpu_seconds(bench.seaweed.server.pid), time.monotonic()
    seconds: list[float] = []

    def flush() -> None:
        try:
            mount.wait(mount.path / "save", timeout=600)
        finally:
            seconds.append(time.monotonic() - began)
            done.touch()

    flushing = threading.Thread(target=flush)
    flushing.start()
    busy = _write(mount.path / "probe-busy.bin", _LONGEST, done)
    flushing.join()
    store = cpu_seconds(bench.seaweed.server.pid) - store
    for block, took in busy.items():
        yield Turn(
            lane,
            block,
            _p99(quiet[block]),
            _p99(took),
            len(took),
            bench.total / (1 << 20) / seconds[0],
            store / seconds[0],
        )


def _write(path: Path, seconds: float, stop: Path) -> dict[str, list[float]]:
    words = [sys.executable, "-c", _WRITER, str(path), str(seconds), str(stop)]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[float]] = json.loads(told)
    return found


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[(len(seconds) * 99 - 1) // 100]


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Medians over the rounds, by lane and size of the writes."""
    found: dict[str, Any] = {}
    for lane, block in dict.fromkeys((turn.lane, turn.block) for turn in turns):
        mine = [turn for turn in turns if (turn.lane, turn.block) == (lane, block)]
        found[f"{lane}, {block}"] = {
            "quiet_p99_us": median(turn.quiet_p99 for turn in mine) * 1e6,
            "flushing_p99_us": median(turn.flushing_p99 for turn in mine) * 1e6,
            "ratio": median(turn.flushing_p99 / turn.quiet_p99 for turn in mine),
            "flush_mib_per_second": median(turn.mib_per_second for turn in mine),
            "store_cpus": median(turn.store_cpus for turn in mine),
        }
    return {
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        "writes": found,
        "turns": [asdict(turn) for turn in turns],
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kindness")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    turns = []
    for turn in run(arguments.gib, arguments.rounds, lanes.to_test()):
        turns.append(turn)
        print(
            f"{turn.lane:11} {turn.block}: p99 {turn.quiet_p99 * 1e6:6.0f} us quiet, "
            f"{turn.flushing_p99 * 1e6:6.0f} us at {turn.mib_per_second:.0f} MiB/s",
            file=sys.stderr,
        )
    print(json.dumps(summary(turns), indent=2))


if __name__ == "__main__":
    main()
