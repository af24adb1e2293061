"""Metadata speed: `python -m tests.bench.metadata --rounds 3`.

A mount of cachefs, one by `rclone mount --vfs-cache-mode writes` and one of JuiceFS (metadata in
SQLite) are up at the same time, each on a bucket of its own in the same SeaweedFS, caches and
databases on the same disk. They are measured by turns, every second round in the opposite order:

- create: so many files are made and closed, empty ones, in a new directory
- stat: each of them, two seconds later: what a mount lets the kernel remember for longer counts
- asked: each once more by statx(AT_STATX_FORCE_SYNC), which the kernel must ask the mount for
- list: the names of a directory of 20,000 files that the mount made before
- list + stat: the same with the attributes of each

Empty files keep the stores out of it: JuiceFS uploads nothing for them, and cachefs and rclone are
told to hold their uploads back. What is printed is microseconds per file or entry: medians.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import peers
from tests.support import fusectl
from tests.support.mounts import Mount, clean_environment, poll
from tests.support.stores import Seaweed, StoredBucket

KERNEL_FORGETS = 2.0
"""Seconds; rclone and JuiceFS let the kernel remember attributes for one."""
_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = -100, 0x2000, 0x7FF
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one mount took in one round, in microseconds per file or entry."""

    tool: str
    create: float
    stat: float
    asked: float
    list: float
    list_stat: float
    load_average: float


MEASURES = ("create", "stat", "asked", "list", "list_stat")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the mounts of a run keep what they need."""

    work: Path
    home: Path
    seaweed: Seaweed

    def folder(self, name: str) -> Path:
        """A new directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.work))

    def environment(self, extra: dict[str, str]) -> dict[str, str]:
        """Nothing of this machine's settings, the store's credentials, and what is given."""
        return clean_environment(self.home, {**self.seaweed.env, **extra})


# -- who is measured ---------------------------------------------------------------------------


@contextlib.contextmanager
def cachefs(place: Place, bucket: StoredBucket) -> Iterator[Path]:
    """A mount of cachefs."""
    mount = Mount(
        bucket.url,
        place.folder("cachefs"),
        [place.folder("cachefs-cache")],
        options={"flush.settle": "1h", "flush.settle_max": "1h"},
        env=place.environment({}),
        arguments=["--endpoint-url", bucket.endpoint],
    )
    mount.start()
    try:
        yield mount.path
    finally:
        mount.unmount(drain_timeout=0)
        mount.destroy()


@contextlib.contextmanager
def rclone(place: Place, bucket: StoredBucket) -> Iterator[Path]:
    """`rclone mount` with a cache for writes."""
    path = place.folder("rclone")
    words = [
        *("mount", f"sea:{bucket.name}", str(path), "--vfs-cache-mode", "writes"),
        *("--vfs-write-back", "1h", "--cache-dir", str(place.folder("rclone-cache"))),
    ]
    with serving("rclone", words, path, place.environment(peers.rclone_settings(bucket))):
        yield path


@contextlib.contextmanager
def juicefs(place: Place, bucket: StoredBucket) -> Iterator[Path]:
    """JuiceFS with its metadata in SQLite."""
    path = place.folder("juicefs")
    database = f"sqlite3://{place.folder('juicefs-meta')}/meta.db"
    env = place.environment(
        {
            "ACCESS_KEY": place.seaweed.server.access_key,
            "SECRET_KEY": place.seaweed.server.secret_key,
        }
    )
    words = ["--storage", "s3", "--bucket", f"{bucket.endpoint}/{bucket.name}", database, "bench"]
    command = [peers.program("juicefs"), "format", *words]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
    words = [
        *("mount", database, str(path), "--cache-dir", str(place.folder("juicefs-cache"))),
        *("--no-usage-report", "--no-syslog", "--metrics", "127.0.0.1:0"),
    ]
    with serving("juicefs", words, path, env):
        yield path


@contextlib.contextmanager
def serving(tool: str, words: list[str], path: Path, env: dict[str, str]) -> Iterator[int]:
    """The program serves a mount in the foreground while this lasts: the id of its process."""
    command = [peers.program(tool), *words]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet)
    try:
        poll(lambda: os.path.ismount(path), 30, what=f"{tool} mounts")
        yield process.pid
    finally:
        fusectl.detach(path)
        process.terminate()
        process.wait(30)


TOOLS: dict[str, Callable[[Place, StoredBucket], contextlib.AbstractContextManager[Path]]] = {
    "cachefs": cachefs,
    "rclone": rclone,
    "juicefs": juicefs,
}


# -- what is measured --------------------------------------------------------------------------


def _create(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def _stat(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        os.stat(f"{folder}/{name}")


def _ask(folder: Path, names: Sequence[str]) -> None:
    told = ctypes.create_string_buffer(256)
    for name in names:
        path = os.fsencode(f"{folder}/{name}")
        if _LIBC.statx(_AT_FDCWD, path, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, told):
            raise OSError(ctypes.get_errno(), "statx", path)


def _list(folder: Path, names: Sequence[str]) -> None:
    assert len(os.listdir(folder)) == len(names)


def _list_stat(folder: Path, names: Sequence[str]) -> None:
    with os.scandir(folder) as entries:
        assert sum(entry.stat().st_nlink for entry in entries) == len(names)


def _cost(work: Callable[[Path, Sequence[str]], None], folder: Path, names: Sequence[str]) -> float:
    """Microseconds per name."""
    began = time.perf_counter()
    work(folder, names)
    return (time.perf_counter() - began) / len(names) * 1e6


def turn(
    tool: str, mountpoint: Path, number: int, names: Sequence[str], many: Sequence[str]
) -> Turn:
    """One round of one mount."""
    folder = mountpoint / f"round-{number}"
    folder.mkdir()
    create = _cost(_create, folder, names)
    time.sleep(KERNEL_FORGETS)
    return Turn(
        tool,
        create,
        stat=_cost(_stat, folder, names),
        asked=_cost(_ask, folder, names),
        list=_cost(_list, mountpoint / "many", many),
        list_stat=_cost(_list_stat, mountpoint / "many", many),
        load_average=os.getloadavg()[0],
    )


# -- all together ------------------------------------------------------------------------------


def run(rounds: int, files: int, entries: int, tools: Sequence[str]) -> Iterator[Turn]:
    """Turn by turn."""
    names = [f"file-{number:05}" for number in range(files)]
    many = [f"entry-{number:05}" for number in range(entries)]
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        (work / "home").mkdir()
        seaweed = Seaweed(data)
        seaweed.start()
        stack.callback(seaweed.stop)
        place = Place(work, work / "home", seaweed)
        buckets = {tool: seaweed.fresh_bucket() for tool in tools}
        mountpoints = {}
        for tool, bucket in buckets.items():
            mountpoint = stack.enter_context(TOOLS[tool](place, bucket))
            (mountpoint / "many").mkdir()
            _create(mountpoint / "many", many)
            mountpoints[tool] = mountpoint
        for number in range(rounds):
            for tool in tools if number % 2 == 0 else reversed(tools):
                yield turn(tool, mountpoints[tool], number, names, many)


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians by tool, and how many times longer the others take than cachefs."""
    medians = {
        tool: {
            name: median(getattr(turn, name) for turn in turns if turn.tool == tool)
            for name in MEASURES
        }
        for tool in dict.fromkeys(turn.tool for turn in turns)
    }
    ours = medians.get("cachefs")
    ratios = {
        f"{name}_{tool}_by_cachefs": medians[tool][name] / ours[name]
        for tool in medians
        for name in MEASURES
        if ours is not None and tool != "cachefs"
    }
    return {"microseconds": medians, "ratios": ratios, "turns": [asdict(turn) for turn in turns]}


def table(medians: dict[str, dict[str, float]]) -> str:
    """A line per tool."""
    lines = [f"{'us per file':11}" + "".join(f"{name:>11}" for name in MEASURES)]
    for tool, values in medians.items():
        lines.append(f"{tool:11}" + "".join(f"{values[name]:11.1f}" for name in MEASURES))
    return "\n".join(lines)


def main() -> None:
    """Parse, run, print: the table on standard error, JSON on standard output."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.metadata")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--tools", default=",".join(TOOLS))
    arguments = parser.parse_args()
    tools = arguments.tools.split(",")
    turns = []
    for each in run(arguments.rounds, arguments.files, arguments.entries, tools):
        turns.append(each)
        print(each, file=sys.stderr)
    told = summary(turns)
    print(table(told["microseconds"]), file=sys.stderr)
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
