"""Cold restores against others: `python -m tests.bench.restore --gib 4 --rounds 3`.

One file, and 64 shards that 8 readers share out, come from the same SeaweedFS by turns: read
through a mount with an empty cache, by `rclone copy` and `s5cmd cp` to the same disk, and through a
mount of JuiceFS with an empty cache, which has its own copy of them in the store. Then the mount is
read a second time, and so are the files that were copied: that is native speed. Two ratios are
told: to the bare copying of the others, and to copying and reading, as long as it takes them until
a program has the bytes. Processor seconds are told as well, by who spent them: on two cores that a
server shares, they are what bounds everybody. The store's data is in RAM. Caches and copies are on
the same disk, listing the directory counts for everybody, and the others run with their own numbers
of connections. Free memory is written to before each turn: in a virtual machine the host may have
taken it back, and then the first to use it would pay for that, a second a GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import peers
from tests.bench.metadata import Place, serving
from tests.bench.processor import Usage
from tests.support import scratch
from tests.support.mounts import Mount, clean_environment
from tests.support.stores import Seaweed

MIB, GIB = 1 << 20, 1 << 30
TOOLS = ("cachefs", "rclone", "s5cmd", "juicefs")
COPIERS = ("rclone", "s5cmd")
"""They bring files to the disk; the others give them to a program that reads."""
LAYOUTS = {"one file": (1, 1), "64 shards": (64, 8)}
"""Files, and readers that share them out."""
_READ = 4 * MIB


@dataclass(frozen=True, slots=True)
class Turn:
    """One restore."""

    tool: str
    layout: str
    seconds: float
    again_seconds: float
    """The same files once more, from where they are now."""
    lost_mib: int
    """Of what had been restored, how much the second reading took from the disk again, since there
    was no memory to keep it in. With some, its time says nothing of the tool."""
    processor: dict[str, float]
    """Seconds that the restore cost, by who spent them."""
    processor_until_read: dict[str, float]
    """As `until_read`."""

    @property
    def until_read(self) -> float:
        """Seconds until a program has all the bytes: what was copied is still to be read."""
        return self.seconds + (self.again_seconds if self.tool in COPIERS else 0.0)


def read_all(folder: Path, readers: int) -> float:
    """Seconds that listing a directory and reading every file of it takes."""

    def read(path: Path) -> None:
        buffer = bytearray(_READ)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    began = time.monotonic()
    names = sorted(path for path in folder.iterdir() if path.is_file())
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, names))
    return time.monotonic() - began


@dataclass(frozen=True, slots=True)
class _Restored:
    """Seconds of a first and a second reading, and what the processors did until then."""

    cold: float
    again: float
    lost: int
    """MiB that were in no memory any more."""
    processor: dict[str, float]
    processor_again: dict[str, float]


def _again(
    folder: Path, readers: int, usage: Usage, cold: float, cost: dict[str, float]
) -> _Restored:
    """Read what was restored once more."""
    lost = _refaulted()
    again = read_all(folder, readers)
    return _Restored(cold, again, _refaulted() - lost, cost, usage.so_far())


def _refaulted() -> int:
    """MiB that were in memory, had to leave it and were wanted again, so far."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    pages = next(line.split()[1] for line in lines if line.startswith("workingset_refault_file "))
    return int(pages) * mmap.PAGESIZE // MIB


def _have_memory(nbytes: int) -> None:
    """Have the host give memory that is free here, and leave it free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemFree:")) << 10
    populated = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, max(min(nbytes, free - GIB), mmap.PAGESIZE), flags=populated).close()


class Bench:
    """What is in the store, and who brings it here."""

    def __init__(self, work: Path, seaweed: Seaweed, gib: float) -> None:
        self.work = work
        self.seaweed = seaweed
        self.gib = gib
        self.home = work / "home"
        self.home.mkdir()
        self.bucket = seaweed.fresh_bucket().below("run")
        self.place = Place(work / "place", self.home, seaweed)
        self.database = f"sqlite3://{work}/juicefs.db"
        self.brought: set[str] = set()

    def fill(self, layout: str, source: Path) -> None:
        """Bring files to the store, as plain objects and through JuiceFS."""
        count, _ = LAYOUTS[layout]
        folder = source / layout.replace(" ", "-")
        folder.mkdir()
        for number in range(count):
            with open(folder / f"shard-{number:02}.bin", "wb") as out:
                for _ in range(int(self.gib * GIB / count / (4 * MIB))):
                    out.write(os.urandom(4 * MIB))
        target = f"{self.bucket.url}/{folder.name}/"
        words = ["--endpoint-url", self.bucket.endpoint, "cp", f"{folder}/", target]
        self._run("s5cmd", words, {})
        for path in folder.iterdir():  # It is in the way of what is restored.
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def cachefs(self, name: str, readers: int) -> _Restored:
        """Through a mount with an empty cache."""
        cache = Path(tempfile.mkdtemp(prefix="cache-", dir=self.work))
        mount = Mount(
            self.bucket.url,
            scratch.make("/tmp", "restore"),
            [cache],
            options={"cache.size": str(int(3 * self.gib * GIB))},
            env=clean_environment(self.home, self.bucket.env),
            arguments=["--endpoint-url", self.bucket.endpoint],
        )
        mount.start()
        try:
            return self._read_twice(mount.path / name, readers, mount.supervisor_pid)
        finally:
            mount.unmount(drain_timeout=0)
            mount.destroy()
            mount.path.rmdir()
            shutil.rmtree(cache)

    def rclone(self, name: str, readers: int) -> _Restored:
        """`rclone copy`."""
        source = f"sea:{self.bucket.name}/{self.bucket.prefix}{name}"
        env = peers.rclone_settings(self.bucket)
        return self._copy("rclone", lambda to: ["copy", source, to], env, readers)

    def s5cmd(self, name: str, readers: int) -> _Restored:
        """`s5cmd cp`."""
        where = ["--endpoint-url", self.bucket.endpoint, "cp", f"{self.bucket.url}/{name}/*"]
        return self._copy("s5cmd", lambda to: [*where, f"{to}/"], {}, readers)

    def _copy(
        self, tool: str, words: Callable[[str], list[str]], env: dict[str, str], readers: int
    ) -> _Restored:
        with tempfile.TemporaryDirectory(dir=self.work) as target:
            began, usage = time.monotonic(), self._usage()
            self._run(tool, words(target), env)
            seconds, cost = time.monotonic() - began, usage.so_far()
            return _again(Path(target), readers, usage, seconds, cost)

    def _run(self, tool: str, words: Sequence[str], env: dict[str, str]) -> None:
        full = {**clean_environment(self.home, self.bucket.env), **env}
        quiet = subprocess.DEVNULL
        subprocess.run([peers.program(tool), *words], env=full, stdout=quiet, check=True)

    def juicefs(self, name: str, readers: int) -> _Restored:
        """Written through one mount of it, read through another whose cache is empty."""
        if not self.brought:
            bucket = self.seaweed.fresh_bucket()
            words = ["--storage", "s3", "--bucket", f"{bucket.endpoint}/{bucket.name}"]
            self._run("juicefs", ["format", *words, self.database, "bench"], self._keys())
        if name not in self.brought:
            with self._mounted() as (path, _):
                shutil.copytree(self.work / "source" / name, path / name)
            self.brought.add(name)
        with self._mounted() as (path, pid):
            return self._read_twice(path / name, readers, pid)

    def _usage(self, *pids: int) -> Usage:
        return Usage(self.seaweed.server.pid, pids)

    def _read_twice(self, folder: Path, readers: int, pid: int) -> _Restored:
        usage = self._usage(pid)
        cold, cost = read_all(folder, readers), usage.so_far()
        return _again(folder, readers, usage, cold, cost)

    def _keys(self) -> dict[str, str]:
        server = self.seaweed.server
        return {"ACCESS_KEY": server.access_key, "SECRET_KEY": server.secret_key}

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[tuple[Path, int]]:
        """JuiceFS with an empty cache, and its process."""
        path, cache = self.place.folder("juicefs"), self.place.folder("juicefs-cache")
        words = [
            *("mount", self.database, str(path), "--cache-dir", str(cache)),
            *("--no-usage-report", "--no-syslog", "--metrics", "127.0.0.1:0"),
        ]
        with serving("juicefs", words, path, self.place.environment(self._keys())) as pid:
            yield path, pid
        shutil.rmtree(cache, ignore_errors=True)


def run(gib: float, rounds: int, tools: Sequence[str], layouts: Sequence[str]) -> Iterator[Turn]:
    """Turn by turn; every second round in the opposite order. Each layout has a store of its own:
    with more data in RAM nothing of what is restored would stay there."""
    for layout in layouts:
        with contextlib.ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
            data = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            seaweed = Seaweed(data)
            seaweed.start()
            stack.callback(seaweed.stop)
            (work / "place").mkdir()
            (work / "source").mkdir()
            bench = Bench(work, seaweed, gib)
            bench.fill(layout, work / "source")
            for number in range(rounds):
                for tool in tools if number % 2 == 0 else reversed(tools):
                    yield _turn(bench, tool, layout)
                    time.sleep(1)


def _turn(bench: Bench, tool: str, layout: str) -> Turn:
    _have_memory(int(3 * bench.gib * GIB))
    restore = getattr(bench, tool)
    did: _Restored = restore(layout.replace(" ", "-"), LAYOUTS[layout][1])
    until_read = did.processor_again if tool in COPIERS else did.processor
    return Turn(tool, layout, did.cold, did.again, did.lost, did.processor, until_read)


def _rates(turns: Sequence[Turn], gib: float, seconds: Callable[[Turn], float]) -> dict[str, float]:
    """Medians in MiB/s, by tool."""
    return {
        tool: median(gib * 1024 / seconds(turn) for turn in turns if turn.tool == tool)
        for tool in dict.fromkeys(turn.tool for turn in turns)
    }


def _processor(turns: Sequence[Turn], gib: float) -> dict[str, dict[str, float]]:
    """Medians of processor seconds per GiB until the bytes are read, by tool and who spent them."""
    told: dict[str, dict[str, float]] = {}
    for tool in dict.fromkeys(turn.tool for turn in turns):
        spent = [turn.processor_until_read for turn in turns if turn.tool == tool]
        told[tool] = {who: round(median(each[who] for each in spent) / gib, 3) for who in spent[0]}
    return told


def _ratio(rates: dict[str, float]) -> float | None:
    others = [rate for tool, rate in rates.items() if tool != "cachefs"]
    return rates["cachefs"] / max(others) if others else None


def summary(turns: Sequence[Turn], gib: float) -> dict[str, Any]:
    """Medians by layout and tool, and how cachefs compares with the fastest of the others."""
    told: dict[str, Any] = {"gib": gib, "load_average": os.getloadavg()[0], "layouts": {}}
    for layout in dict.fromkeys(turn.layout for turn in turns):
        here = [turn for turn in turns if turn.layout == layout]
        rates = _rates(here, gib, lambda turn: turn.seconds)
        read = _rates(here, gib, lambda turn: turn.until_read)
        again = {
            kind: median(t.again_seconds for t in turns if t.layout == layout and t.tool in of)
            for kind, of in (("cachefs", ("cachefs",)), ("native", COPIERS))
            if any(t.tool in of for t in turns)
        }
        told["layouts"][layout] = {
            "mib_per_second": rates,
            "ratio_to_fastest": _ratio(rates),
            "mib_per_second_until_read": read,
            "ratio_to_fastest_until_read": _ratio(read),
            "processor_seconds_per_gib_until_read": _processor(here, gib),
            "second_read_ratio_to_native": again.get("native", 0.0) / again["cachefs"],
        }
    told["turns"] = [asdict(turn) for turn in turns]
    return told


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restore")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    arguments = parser.parse_args()
    turns = []
    layouts = arguments.layouts.split(",")
    for turn in run(arguments.gib, arguments.rounds, arguments.tools.split(","), layouts):
        turns.append(turn)
        rate, again = (arguments.gib * 1024 / s for s in (turn.seconds, turn.again_seconds))
        print(
            f"{turn.layout:10} {turn.tool:8} {rate:7.0f} MiB/s, again {again:7.0f} "
            f"({turn.lost_mib} MiB of it not in memory), "
            f"processor seconds {turn.processor_until_read}",
            file=sys.stderr,
        )
    print(json.dumps(summary(turns, arguments.gib), indent=2))


if __name__ == "__main__":
    main()
