"""Flushing against copying: `python -m tests.bench.flushing --gib 4 --rounds 3`.

The same files go to the same SeaweedFS by turns: from a mount whose uploads were held back until
then (the time of `cachefs wait`), by `rclone copy` and by `s5cmd cp`, both with their defaults.
Every turn has a bucket of its own. Files and cache are on a disk and in the page cache; the store's
data is in RAM. Shown are throughput, CPU time (without the store's) and the peak of memory.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import peers
from tests.support import scratch
from tests.support.mounts import Mount, clean_environment
from tests.support.stores import Seaweed, StoredBucket

MIB, GIB = 1 << 20, 1 << 30
SIZES = (1024, 1024, 512, 512, 256, 256, 128, 128, 64, 64, 32, 32, 16, 16, 16, 16)
"""MiB of the files in 4 GiB."""
TOOLS = ("cachefs", "rclone", "s5cmd")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Turn:
    """One copy of everything."""

    tool: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Resident memory, over all of its processes."""
    daemon_peak_bytes: int = 0
    """Of that the daemon's, where there is one."""
    storecpu_seconds: float = 0.0
    """What the store spent meanwhile: on a small machine it sets the pace."""


class Bench:
    """Files, store, and who brings the one into the other."""

    def __init__(self, work: Path, seaweed: Seaweed, gib: float) -> None:
        self.work = work
        self.seaweed = seaweed
        self.sizes = [int(size * gib / 4 * MIB) for size in SIZES]
        self.source = work / "source"
        self.home = work / "home"
        self.home.mkdir()

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    def write(self, folder: Path) -> None:
        """Random files of the sizes that are measured."""
        folder.mkdir(parents=True)
        block = os.urandom(16 * MIB)
        for number, size in enumerate(self.sizes):
            with open(folder / f"shard-{number:02}.bin", "wb") as out:
                for start in range(0, size, len(block)):
                    out.write(block[: size - start])
                    block = block[4096:] + block[:4096]

    def check(self, bucket: StoredBucket) -> None:
        """All of it arrived."""
        assert sorted(bucket.sizes().values()) == sorted(self.sizes)

    # -- who is measured ----------------------------------------------------------------------

    def cachefs(self, bucket: StoredBucket, options: dict[str, str]) -> Turn:
        """From a mount; its settle delay holds the uploads back until they are waited for."""
        cache = Path(tempfile.mkdtemp(prefix="cache-", dir=self.work))
        mount = Mount(
            bucket.url,
            scratch.make("/tmp", "flushing"),
            [cache],
            options={
                "flush.settle": "1h",
                "flush.settle_max": "1h",
                "cache.size": str(4 * self.total),
                **options,
            },
            env=clean_environment(self.home, bucket.env),
            arguments=["--endpoint-url", bucket.endpoint],
        )
        mount.start()
        try:
            self.write(mount.path / "save")
            time.sleep(2)  # closed files are synced in the background
            os.sync()
            return _timed(mount)
        finally:
            mount.unmount(drain_timeout=0)
            mount.destroy()
            mount.path.rmdir()
            shutil.rmtree(cache)

    def rclone(self, bucket: StoredBucket) -> Turn:
        """`rclone copy`."""
        env = peers.rclone_settings(bucket)
        target = f"sea:{bucket.name}/{bucket.prefix}save"
        return self._run("rclone", ["copy", str(self.source), target], bucket, env)

    def s5cmd(self, bucket: StoredBucket) -> Turn:
        """`s5cmd cp`."""
        words = ["--endpoint-url", bucket.endpoint, "cp", f"{self.source}/", f"{bucket.url}/save/"]
        return self._run("s5cmd", words, bucket, {})

    def _run(
        self, tool: str, words: Sequence[str], bucket: StoredBucket, env: dict[str, str]
    ) -> Turn:
        began = time.monotonic()
        process = subprocess.Popen(
            [peers.program(tool), *words],
            env={**clean_environment(self.home, bucket.env), **env},
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        assert status == 0, f"{tool} failed"
        cpu = usage.ru_utime + usage.ru_stime
        return Turn(tool, seconds, cpu, usage.ru_maxrss * 1024)


def _timed(mount: Mount) -> Turn:
    pids = _processes(mount.daemon_pid)
    before = sum(cpu_seconds(pid) for pid in pids)
    began = time.monotonic()
    mount.wait(timeout=1800)
    seconds = time.monotonic() - began
    cpu = sum(cpu_seconds(pid) for pid in pids) - before
    peaks = {pid: _peak(pid) for pid in pids}
    return Turn("cachefs", seconds, cpu, sum(peaks.values()), peaks[mount.daemon_pid])


def _processes(daemon: int) -> list[int]:
    """The daemon and its movers."""
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text()
    return [daemon, *map(int, children.split())]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -- all together ------------------------------------------------------------------------------


def run(gib: float, rounds: int, options: dict[str, str], tools: Sequence[str]) -> Iterator[Turn]:
    """Turn by turn; every second round in the opposite order."""
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        seaweed = Seaweed(data)
        seaweed.start()
        stack.callback(seaweed.stop)
        bench = Bench(work, seaweed, gib)
        bench.write(bench.source)
        os.sync()
        for number in range(rounds):
            for tool in tools if number % 2 == 0 else reversed(tools):
                whole = seaweed.fresh_bucket()
                bucket = whole.below("run")
                spent = cpu_seconds(seaweed.server.pid)
                turn = _turn(bench, tool, bucket, options)
                spent = cpu_seconds(seaweed.server.pid) - spent
                yield replace(turn, storecpu_seconds=spent)
                bench.check(bucket)
                seaweed.remove_bucket(whole)
                time.sleep(1)


def _turn(bench: Bench, tool: str, bucket: StoredBucket, options: dict[str, str]) -> Turn:
    if tool == "cachefs":
        return bench.cachefs(bucket, options)
    return bench.rclone(bucket) if tool == "rclone" else bench.s5cmd(bucket)


def summary(turns: Sequence[Turn], gib: float) -> dict[str, Any]:
    """Medians by tool, and how cachefs compares."""
    tools: dict[str, Any] = {}
    for tool in dict.fromkeys(turn.tool for turn in turns):
        mine = [turn for turn in turns if turn.tool == tool]
        tools[tool] = {
            "mib_per_second": median(gib * 1024 / turn.seconds for turn in mine),
            "cpu_seconds_per_gib": median(turn.cpu_seconds / gib for turn in mine),
            "store_cpu_seconds_per_gib": median(turn.storecpu_seconds / gib for turn in mine),
            "peak_mib": max(turn.peak_bytes for turn in mine) / MIB,
            "daemon_peak_mib": max(turn.daemon_peak_bytes for turn in mine) / MIB,
        }
    ours = tools.get("cachefs")
    ratios = {
        f"{name}_by_{tool}": ours[name] / tools[tool][name]
        for tool in tools
        for name in ("mib_per_second", "cpu_seconds_per_gib")
        if ours is not None and tool != "cachefs"
    }
    return {
        "gib": gib,
        "load_average": os.getloadavg()[0],
        "tools": tools,
        "ratios": ratios,
        "turns": [asdict(turn) for turn in turns],
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.flushing")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.options)
    turns = []
    for turn in run(arguments.gib, arguments.rounds, options, arguments.tools.split(",")):
        turns.append(turn)
        print(
            f"{turn.tool:8} {arguments.gib * 1024 / turn.seconds:7.0f} MiB/s "
            f"{turn.cpu_seconds / arguments.gib:6.2f} CPU s/GiB {turn.peak_bytes / MIB:6.0f} MiB, "
            f"store {turn.storecpu_seconds / arguments.gib:6.2f} CPU s/GiB",
            file=sys.stderr,
        )
    print(json.dumps(summary(turns, arguments.gib), indent=2))


if __name__ == "__main__":
    main()
