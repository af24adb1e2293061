"""Conducts the ranks through the rounds.

Rounds alternate: in each, every directory is measured in every style, and every second round goes
through the directories backwards, so that none always comes first. Files live in a directory of the
run's own, which is removed after each measurement.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from cachefs.bench.workload import Outcome, Style, Task, Timings, Workload
from cachefs.errors import CachefsError, UsageError

_PREFIX = "cachefs-bench-"
_ENDING = 10.0
"""Seconds a rank has to end before it is killed."""
_SETTLING, _LOOK = 3.0, 0.1
"""Seconds for which files may go on being removed, and between two looks at that."""

OnBytes = Callable[[int], None]
"""Told how many bytes were written since the last call."""


class BenchError(CachefsError):
    """The directory cannot be measured."""


@dataclass(slots=True)
class Measurement:
    """One directory in one style, over all rounds."""

    directory: str
    style: Style
    write_rates: list[float] = field(default_factory=list)
    """Bytes per second, one value a round: all ranks' bytes by the slowest rank's time."""
    read_rates: list[float] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings.empty)
    bad: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Rank:
    """One process and the socket to it."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def end(self) -> None:
        """Closing the socket ends the process."""
        self.connection.close()
        try:
            self.process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def started(count: int) -> Iterator[list[Rank]]:
    """`count` ranks, ended on the way out."""
    ranks: list[Rank] = []
    try:
        for _ in range(count):
            ranks.append(_start())  # noqa: PERF401 (those started must end if one fails to start)
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def _start() -> Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "cachefs.bench.rank", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    return Rank(process, Connection(ours.detach()))


def measure(
    directories: Sequence[Path],
    workload: Workload,
    *,
    styles: Sequence[Style],
    rounds: int,
    on_bytes: OnBytes = lambda _: None,
) -> list[Measurement]:
    """Run the workload; one measurement for each style and directory, directories side by side.

    Raises BenchError when a directory cannot be written.
    """
    if rounds < 1:
        raise UsageError("--rounds must be at least 1")
    for directory in directories:
        check(directory)
    found = [Measurement(str(d), style) for style in styles for d in directories]
    with started(workload.ranks) as ranks:
        for number in range(rounds):
            for measurement in found if number % 2 == 0 else reversed(found):
                _one_round(measurement, workload, ranks, on_bytes)
    return found


def check(directory: Path) -> None:
    """Raises BenchError unless files can be made there."""
    if not directory.is_dir():
        raise BenchError(f"{directory} is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BenchError(f"{directory} cannot be written")


def _one_round(
    measurement: Measurement, workload: Workload, ranks: Sequence[Rank], on_bytes: OnBytes
) -> None:
    try:
        place = tempfile.mkdtemp(prefix=_PREFIX, dir=measurement.directory)
    except OSError as error:
        raise BenchError(f"{measurement.directory}: {error.strerror}") from None
    try:
        outcomes = _run(Path(place), measurement.style, workload, ranks, on_bytes)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    _settle(Path(measurement.directory))
    _add(measurement, workload, outcomes)


def _settle(directory: Path) -> None:
    """Wait until the space of removed files is free: where they are removed in the background, that
    would take its time from what is measured next."""
    deadline, free = time.monotonic() + _SETTLING, -1
    while (now := os.statvfs(directory).f_bfree) > free and time.monotonic() < deadline:
        free = now
        time.sleep(_LOOK)


def _run(
    place: Path, style: Style, workload: Workload, ranks: Sequence[Rank], on_bytes: OnBytes
) -> list[Outcome]:
    for number, rank in enumerate(ranks):
        _send(rank, Task(workload, style, str(place), number))
    for rank in ranks:
        _receive(rank)  # "ready"
    for rank in ranks:
        _send(rank, "go")
    outcomes: dict[int, Outcome] = {}
    seen = 0
    while len(outcomes) < len(ranks):
        for number in _readable(ranks, outcomes):
            message = _receive(ranks[number])
            if isinstance(message, Outcome):
                outcomes[number] = message
            elif isinstance(message, int):
                seen += message
                on_bytes(message)
    on_bytes(workload.total - seen)
    return [outcomes[number] for number in range(len(ranks))]


def _readable(ranks: Sequence[Rank], done: dict[int, Outcome]) -> list[int]:
    waiting = {
        id(rank.connection): number for number, rank in enumerate(ranks) if number not in done
    }
    ready = wait([ranks[number].connection for number in waiting.values()])
    return [waiting[id(connection)] for connection in ready]


def _send(rank: Rank, message: object) -> None:
    try:
        rank.connection.send(message)
    except ConnectionError:
        raise _died(rank) from None


def _died(rank: Rank) -> BenchError:
    return BenchError(f"a writing process ended unexpectedly (exit code {rank.process.wait()})")


def _receive(rank: Rank) -> object:
    try:
        message: object = rank.connection.recv()
    except (EOFError, ConnectionError):
        raise _died(rank) from None
    if isinstance(message, OSError):
        raise BenchError(str(message), hint=_hint(message))
    return message


def _hint(error: OSError) -> str:
    if error.errno == errno.EINVAL:
        return "this filesystem may not know direct I/O: leave --direct out"
    if error.errno == errno.ENOSPC:
        return "use a smaller --size, fewer --files or fewer --ranks"
    return ""


def _add(measurement: Measurement, workload: Workload, outcomes: Sequence[Outcome]) -> None:
    slowest = max(outcome.write_seconds for outcome in outcomes)
    measurement.write_rates.append(workload.total / slowest)
    reading = [o.read_seconds for o in outcomes if o.read_seconds is not None]
    if reading:
        measurement.read_rates.append(workload.total / max(reading))
    for outcome in outcomes:
        measurement.timings.add(outcome.timings)
        measurement.bad += outcome.bad
