"""A rank: a process of its own that writes shards when told to.

    python -m cachefs.bench.rank FD

Speaks pickles over the socket FD: receives a `Task`, answers "ready" once its buffers are filled,
starts at "go", sends the number of bytes written now and then, and at last an `Outcome` or the
OSError that ended it. Ends when the socket closes.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection

from cachefs.bench.content import Content
from cachefs.bench.workload import Outcome, Task, Timings
from cachefs.bench.writers import differing, read_all, write_all

_REPORT_INTERVAL = 0.1
"""Seconds between two reports of progress: often enough for a bar, too rarely to be felt."""


class _Progress:
    """Adds bytes up and passes the sum on now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bytes, self._due = 0, time.monotonic() + _REPORT_INTERVAL

    def __call__(self, count: int) -> None:
        self._bytes += count
        now = time.monotonic()
        if now >= self._due:
            self._connection.send(self._bytes)
            self._bytes, self._due = 0, now + _REPORT_INTERVAL


def _perform(task: Task, connection: Connection) -> Outcome:
    work = task.workload
    contents = [Content(work, task.rank, number) for number in range(work.files)]
    timings = Timings.empty()
    connection.send("ready")
    connection.recv()  # "go"
    begun = time.perf_counter()
    write_all(task, contents, timings, _Progress(connection))
    seconds = time.perf_counter() - begun
    reading = read_all(task, timings) if work.read else None
    bad = differing(task, contents) if work.verify else []
    return Outcome(timings, seconds, reading, bad)


def main(fd: int) -> None:
    """Serve tasks until the other side closes."""
    connection = Connection(fd)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_perform(task, connection))
        except ConnectionError:
            return  # the other side gave up
        except OSError as error:
            connection.send(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
