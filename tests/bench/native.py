"""The lanes against what is below them: `python -m tests.bench.native --rounds 9 --base /dev/shm`.

One file of each block size, and four ranks at once, by turns of `cachefs bench` on

- a mount in the passthrough lane and the cache device itself,
- a mount in the tracked lane and a minimal pass-through filesystem on pyfuse3 (`plainfs`).

Uploads are held back. Printed are ratios of medians (writing, and reading what was just written),
the 99th percentile of a write on both sides, and the daemon's processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench import creates
from tests.support import lanes, scratch
from tests.support.mounts import Mount, clean_environment

_HELD = {"flush.settle": "1h", "flush.settle_max": "1h", "cache.size": "12GiB"}


@dataclass(frozen=True, slots=True)
class Load:
    """What is written in a round."""

    block: str
    size: str
    ranks: int


LOADS = (
    Load("1MiB", "1GiB", 1),
    Load("128KiB", "1GiB", 1),
    Load("4KiB", "256MiB", 1),
    Load("1MiB", "1GiB", 4),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One load on one lane."""

    lane: str
    against: str
    block: str
    ranks: int
    write_ratio: float
    read_ratio: float
    bytes_per_second: float
    p99: float
    """Seconds of a write."""
    p99_against: float
    daemon_cpu: float
    """Seconds of processor time in all rounds, making and removing the files included."""
    load_average: float


def run(base: Path, rounds: int, chosen: Sequence[str]) -> Iterator[Result]:
    """Load by load, in each lane, with the cache device below `base`."""
    for lane in chosen:
        work = Path(tempfile.mkdtemp(prefix="cachefs-native-", dir=base))
        try:
            yield from _lane(work, rounds, lane)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _lane(work: Path, rounds: int, lane: str) -> Iterator[Result]:
    for name in ("store", "cache", "home", "native"):
        (work / name).mkdir()
    mount = Mount(
        f"file://{work}/store",
        scratch.make("/tmp", "native"),
        [work / "cache"],
        options={**_HELD, "mount.passthrough": lanes.OPTIONS[lane]},
        env=clean_environment(work / "home"),
    )
    mount.start()
    try:
        if lane == "passthrough":
            yield from _measure(mount, lane, work / "native", "native", rounds)
        else:
            with creates.plain(work) as (plain, _):
                yield from _measure(mount, lane, plain, "plainfs", rounds)
    finally:
        mount.unmount(drain_timeout=0)
        mount.destroy()
        mount.path.rmdir()


def _measure(mount: Mount, lane: str, other: Path, against: str, rounds: int) -> Iterator[Result]:
    for load in LOADS:
        used = creates.cpu(mount.daemon_pid)
        told = _bench(mount.path, other, load, rounds)
        used = creates.cpu(mount.daemon_pid) - used
        by_role = {each["role"]: each for each in told["results"]}
        ratios = told["ratios"]["blocking"]
        yield Result(
            lane, against, load.block, load.ranks, ratios["write"], ratios["read"],
            by_role["subject"]["write"]["median"], by_role["subject"]["latency"]["write"]["p99"],
            by_role["against"]["latency"]["write"]["p99"], used, os.getloadavg()[0],
        )  # fmt: skip


def _bench(directory: Path, against: Path, load: Load, rounds: int) -> Any:
    done = subprocess.run(
        [
            sys.executable, "-m", "cachefs", "bench", directory, "--against", against,
            "--size", load.size, "--block", load.block, "--ranks", str(load.ranks), "--files", "1",
            "--rounds", str(rounds), "--style", "blocking", "--read", "--json",
        ],
        check=True, stdout=subprocess.PIPE, timeout=900,
    )  # fmt: skip
    return json.loads(done.stdout)


def main() -> None:
    """Parse, run, print: each load on standard error, all as JSON on standard output."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.native")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--base", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--lanes", default=",".join(lanes.OPTIONS))
    arguments = parser.parse_args()
    results = []
    for each in run(arguments.base, arguments.rounds, arguments.lanes.split(",")):
        results.append(asdict(each))
        print(each, file=sys.stderr)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
