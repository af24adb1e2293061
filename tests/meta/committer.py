"""A process with a database open, which does what it is told and can be killed: `Committer`.

python -m tests.meta.committer DATABASE MEMORY PATIENCE

Without MEMORY (it is empty) commits are made by SQLite itself.
"""

from __future__ import annotations

import json
import os
import select
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cachefs.meta import Meta
from cachefs.meta.ring import SIZE

PATIENT = 15.0


class Committer:
    """The process, seen from a test."""

    def __init__(
        self,
        database: Path,
        memory: Path | None,
        env: dict[str, str] | None = None,
        patience: float = 0.02,
    ) -> None:
        words = [sys.executable, "-m", __name__, str(database), str(memory or ""), str(patience)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(env or {})}
        )
        self.note = self.receive()

    def send(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, timeout: float = PATIENT) -> Any:
        """Its answer. TimeoutError: it is busy."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        return json.loads(self.process.stdout.readline())

    def __call__(self, *words: Any) -> Any:
        self.send(*words)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL. A thread of it that writes to a frozen disk ends later: see `gone`."""
        self.process.kill()

    def gone(self) -> None:
        self.process.wait(PATIENT)

    def end(self) -> None:
        """Let it close the database, or else kill it."""
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(PATIENT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextmanager
def frozen(top: Path) -> Iterator[Callable[[], None]]:
    """The filesystem takes nothing until the end, or until what is given is called; nor longer
    than anybody waits, whatever hangs."""
    lock, thawed = threading.Lock(), list[object]()

    def thaw() -> None:
        with lock:
            if not thawed:
                thawed.append(subprocess.run(["fsfreeze", "--unfreeze", top], check=True))

    subprocess.run(["fsfreeze", "--freeze", top], check=True)
    watchdog = threading.Timer(2 * PATIENT, thaw)
    watchdog.start()
    try:
        yield thaw
    finally:
        watchdog.cancel()
        thaw()


class _Commands:
    """What it can be told to do."""

    def __init__(self, database: Path, memory: Path | None, patience: float) -> None:
        self.meta = Meta(database, memory=memory, patience=patience)
        assert (self.meta.db.deferral is not None) == bool(memory), self.meta.db.undeferred
        self.other = self.meta.db._connect()  # opening one is a matter of the disk

    def commit(self, key: str, size: int) -> str:
        with self.meta.transaction("TEST"):
            self.meta.set_setting(key, f"{key} " + "x" * size)
        return "ok"

    def many(self, key: str, count: int, size: int) -> float:
        """The longest of many commits, in seconds."""
        longest = 0.0
        for number in range(count):
            began = time.perf_counter()
            self.commit(f"{key}{number}", size)
            longest = max(longest, time.perf_counter() - began)
        return longest

    def fill(self, key: str) -> int:
        """Commit until the ring has room for no more; how many there were."""
        count = 0
        while self.lag()[0] < SIZE - (256 << 10):
            self.commit(f"{key}{count}", 50_000)
            count += 1
        return count

    def keys(self) -> list[str]:
        return _keys(self.meta.db._db)

    def others(self) -> list[str]:
        """The same, seen by another connection."""
        return _keys(self.other)

    def lag(self) -> list[Any]:
        assert self.meta.db.deferral is not None
        return list(self.meta.db.deferral.lag)

    def sync(self) -> str:
        self.meta.db.sync()
        return "ok"

    def checkpoint(self) -> str:
        self.meta.db.checkpoint()
        return "ok"

    def integrity(self) -> str:
        row = self.meta.db.one("PRAGMA integrity_check")
        return str(row[0]) if row else ""

    def crowded(self) -> bool:
        assert self.meta.db.deferral is not None
        return self.meta.db.deferral.crowded


def _keys(db: sqlite3.Connection) -> list[str]:
    rows = db.execute("SELECT key,value FROM setting ORDER BY key").fetchall()
    found = [key for key, value in rows if value.startswith(f"{key} ")]
    return [key for key in found if key != "schema_version"]


def main() -> None:
    memory = Path(sys.argv[2]) if sys.argv[2] else None
    commands = _Commands(Path(sys.argv[1]), memory, float(sys.argv[3]))
    print(json.dumps(commands.meta.db.note), flush=True)
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = getattr(commands, name)(*args)
        except (sqlite3.Error, OSError) as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
    commands.other.close()
    commands.meta.close()


if __name__ == "__main__":
    main()
