"""Small files: `python -m tests.bench.creates --rounds 5 --files 2000`.

Create, write 4 KiB, close: so many files a round, in a new directory, by turns on

- cachefs: a mount in the tracked lane,
- long: the same with every file made by a handler (`mount.small_files=off`),
- plain: a minimal pass-through filesystem on pyfuse3 (`plainfs`),

every second round in the opposite order, all on tmpfs. Uploads are held back. What is printed is
files per second and the daemon's processor time per file: medians, and the ratio to `plain`.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.support import fusectl
from tests.support.mounts import Mount, clean_environment, poll

PLAIN = Path(__file__).with_name("plainfs.py")
SIZE = 4096
TOOLS = ("cachefs", "long", "plain")
_HELD = {"flush.settle": "1h", "flush.settle_max": "1h", "mount.passthrough": "off"}
_SETTLED = 0.3
"""Seconds after a round until what it left to do is done."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one filesystem."""

    tool: str
    per_second: float
    cpu_us: float
    """Microseconds of the daemon's processor time per file."""
    load_average: float


@contextlib.contextmanager
def cachefs(work: Path, small_files: str) -> Iterator[tuple[Path, int]]:
    """A mount of cachefs on a directory as store: mountpoint and the daemon's pid."""
    folder = Path(tempfile.mkdtemp(dir=work))
    for name in ("store", "cache", "home"):
        (folder / name).mkdir()
    options = {**_HELD, "mount.small_files": small_files}
    env = clean_environment(folder / "home")
    store = f"file://{folder}/store"
    mount = Mount(store, folder / "mnt", [folder / "cache"], options=options, env=env)
    mount.start()
    try:
        yield mount.path, mount.daemon_pid
    finally:
        mount.unmount(drain_timeout=0)
        mount.destroy()


@contextlib.contextmanager
def plain(work: Path) -> Iterator[tuple[Path, int]]:
    """The minimal one."""
    folder = Path(tempfile.mkdtemp(dir=work))
    for name in ("source", "mnt"):
        (folder / name).mkdir()
    process = subprocess.Popen([sys.executable, str(PLAIN), folder / "source", folder / "mnt"])
    try:
        poll(lambda: os.path.ismount(folder / "mnt"), 30, what="plainfs mounts")
        yield folder / "mnt", process.pid
    finally:
        fusectl.detach(folder / "mnt")
        process.wait(30)


def cpu(pid: int) -> float:
    """Seconds of processor time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def turn(tool: str, mountpoint: Path, pid: int, number: int, files: int) -> Turn:
    """One round."""
    folder, data = mountpoint / f"round-{number}", bytes(SIZE)
    folder.mkdir()
    used, began = cpu(pid), time.perf_counter()
    for each in range(files):
        fd = os.open(f"{folder}/file-{each:05}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(fd, data)
        os.close(fd)
    took = time.perf_counter() - began
    time.sleep(_SETTLED)
    return Turn(tool, files / took, (cpu(pid) - used) / files * 1e6, os.getloadavg()[0])


def run(rounds: int, files: int, tools: Sequence[str]) -> Iterator[Turn]:
    """Turn by turn."""
    work = Path(tempfile.mkdtemp(prefix="cachefs-creates-", dir="/dev/shm"))
    try:
        with contextlib.ExitStack() as stack:
            places = {}
            for tool in tools:
                opened = plain(work) if tool == "plain" else cachefs(work, _mode(tool))
                places[tool] = stack.enter_context(opened)
            for number in range(rounds):
                for tool in tools if number % 2 == 0 else reversed(tools):
                    yield turn(tool, *places[tool], number, files)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _mode(tool: str) -> str:
    return "auto" if tool == "cachefs" else "off"


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians by tool, and the others' rate by that of `plain`."""
    tools = dict.fromkeys(each.tool for each in turns)
    rates = {tool: median(each.per_second for each in turns if each.tool == tool) for tool in tools}
    cpu = {tool: median(each.cpu_us for each in turns if each.tool == tool) for tool in tools}
    ratios = {tool: rate / rates["plain"] for tool, rate in rates.items() if "plain" in rates}
    return {
        "per_second": rates,
        "cpu_us": cpu,
        "by_plain": ratios,
        "turns": list(map(asdict, turns)),
    }


def main() -> None:
    """Parse, run, print: the turns on standard error, JSON on standard output."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.creates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--tools", default=",".join(TOOLS))
    arguments = parser.parse_args()
    turns = []
    for each in run(arguments.rounds, arguments.files, arguments.tools.split(",")):
        turns.append(each)
        print(each, file=sys.stderr)
    print(json.dumps(summary(turns), indent=2))


if __name__ == "__main__":
    main()
