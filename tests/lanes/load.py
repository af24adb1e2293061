"""A client program: a random load on the mount and the same on a local directory, step by step.

Run as a program (standard library only): `load.py MOUNTED LOCAL SEED [light]`. It compares what
every call returns, stops at the first difference or when its standard input ends, compares both
trees whole, and prints one JSON object: steps, differences, the calls that took long (kind, begin
and end on the machine's monotonic clock) and the longest of each kind.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import random
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

SLOW = 0.02
MAX_FILE = 3 << 20
NAMES = [f"f{n}.bin" for n in range(8)] + ["latest", "config.json", "index.json"]
FOLDERS = ["", "a", "b", "a/c"]


class Side:
    """One of the two directories, with the files that are open in it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.slots: dict[int, int] = {}

    def at(self, path: str) -> str:
        return os.path.join(self.root, path)


class Load:
    """Chooses steps, does each of them twice, compares."""

    def __init__(self, mounted: str, local: str, seed: int, light: bool) -> None:
        self.rng = random.Random(seed)
        self.local, self.mounted = Side(local), Side(mounted)
        self.light = light
        self.differences: list[str] = []
        self.slow: list[tuple[str, float, float]] = []
        self.longest: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        for folder in FOLDERS[1:]:
            self.do("mkdir", os.mkdir, folder)

    # ---- doing ---------------------------------------------------------------------------------

    def both(self, kind: str, call: Callable[[Side], Any]) -> Any:
        """One step on each side; what the local one returned."""
        expected = self._answer(call, self.local)
        begun = time.monotonic()
        got = self._answer(call, self.mounted)
        ended = time.monotonic()
        self.counts[kind] += 1
        self.longest[kind] = max(self.longest.get(kind, 0.0), ended - begun)
        if ended - begun > SLOW:
            self.slow.append((kind, begun, ended))
        if got != expected:
            text = f"step {sum(self.counts.values())} {kind}: mount {got!r:.300}, local"
            self.differences.append(f"{text} {expected!r:.300}")
        return expected

    @staticmethod
    def _answer(call: Callable[[Side], Any], side: Side) -> Any:
        try:
            return call(side)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))

    def do(
        self, kind: str, call: Callable[..., Any], *paths: str, more: tuple[Any, ...] = ()
    ) -> Any:
        """A call on paths."""
        return self.both(kind, lambda side: call(*(side.at(p) for p in paths), *more))

    def path(self) -> str:
        return os.path.join(self.rng.choice(FOLDERS), self.rng.choice(NAMES))

    def slot(self) -> int | None:
        """One of the open files."""
        return self.rng.choice(sorted(self.local.slots)) if self.local.slots else None

    def body(self, most: int = 200_000) -> bytes:
        size = self.rng.choice([0, 1, 100, 4096, 5000, 65_536, most])
        return self.rng.randbytes(min(size, most))

    # ---- steps ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One of them, at random."""
        getattr(self, "do_" + self.rng.choices(*self._weights())[0])()

    def _weights(self) -> tuple[list[str], list[int]]:
        if self.light:
            kinds = {"create": 3, "write": 5, "close": 3, "rename": 1, "unlink": 1, "truncating": 1,
                     "truncate": 1}  # fmt: skip
        else:
            kinds = {
                "create": 6, "open": 6, "truncating": 4, "write": 25, "stream": 8, "read": 10,
                "close": 14, "truncate": 4, "ftruncate": 4, "rename": 6, "unlink": 6, "walk": 2,
                "stat": 8, "chmod": 2, "utime": 2, "folder": 3, "sync": 1, "map": 3, "dup": 2,
            }  # fmt: skip
        return list(kinds), list(kinds.values())

    def _open(self, kind: str, flags: int) -> None:
        number = min(set(range(9)) - self.local.slots.keys(), default=None)
        if number is None:
            return
        path = self.path()

        def call(side: Side) -> None:
            side.slots[number] = os.open(side.at(path), flags, 0o644)

        self.both(kind, call)

    def do_create(self) -> None:
        self._open("create", os.O_RDWR | os.O_CREAT | self.rng.choice([0, os.O_EXCL]))

    def do_open(self) -> None:
        flags = [os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_WRONLY | os.O_APPEND]
        self._open("open", self.rng.choice(flags))

    def do_truncating(self) -> None:
        self._open("open_trunc", self.rng.choice([os.O_WRONLY, os.O_RDWR]) | os.O_TRUNC)

    def do_write(self) -> None:
        number, body = self.slot(), self.body()
        offset = self.rng.randrange(MAX_FILE)
        if number is not None:
            self.both("pwrite", lambda side: os.pwrite(side.slots[number], body, offset))

    def do_stream(self) -> None:
        """A few blocks at the end, as a saving trainer writes them."""
        number, body = self.slot(), self.rng.randbytes(131_072)
        if number is None or os.fstat(self.local.slots[number]).st_size > MAX_FILE:
            return
        self.both("seek", lambda side: os.lseek(side.slots[number], 0, os.SEEK_END))
        for _ in range(6):
            self.both("write", lambda side: os.write(side.slots[number], body))

    def do_read(self) -> None:
        number = self.slot()
        offset, size = self.rng.randrange(MAX_FILE), self.rng.choice([1, 4096, 100_000])
        if number is not None:
            self.both("read", lambda side: os.pread(side.slots[number], size, offset))

    def do_close(self) -> None:
        number = self.slot()
        if number is not None:
            self.both("close", lambda side: os.close(side.slots.pop(number)))

    def do_dup(self) -> None:
        number = self.slot()
        other = min(set(range(9)) - self.local.slots.keys(), default=None)
        if number is None or other is None:
            return

        def call(side: Side) -> None:
            side.slots[other] = os.dup(side.slots[number])

        self.both("dup", call)

    def do_truncate(self) -> None:
        size = self.rng.choice([0, 0, 1000, 70_000, 1_000_000])
        self.do("truncate", os.truncate, self.path(), more=(size,))

    def do_ftruncate(self) -> None:
        number, size = self.slot(), self.rng.choice([0, 1000, 70_000, 1_000_000])
        if number is not None:
            self.both("ftruncate", lambda side: os.ftruncate(side.slots[number], size))

    def do_rename(self) -> None:
        self.do("rename", os.rename, self.path(), self.path())

    def do_unlink(self) -> None:
        self.do("unlink", os.unlink, self.path())

    def do_folder(self) -> None:
        path = os.path.join(self.rng.choice(FOLDERS), "sub")
        self.do(*self.rng.choice([("mkdir", os.mkdir), ("rmdir", os.rmdir)]), path)

    def do_stat(self) -> None:
        def call(path: str) -> tuple[int, int, int]:
            told = os.stat(path)
            return told.st_size, told.st_mode, told.st_nlink

        self.do("stat", call, self.path())

    def do_chmod(self) -> None:
        self.do("chmod", os.chmod, self.path(), more=(self.rng.choice([0o644, 0o600, 0o755]),))

    def do_utime(self) -> None:
        when = 10**9 * self.rng.randrange(10**9)

        def call(path: str) -> int:
            os.utime(path, ns=(when, when))
            return os.stat(path).st_mtime_ns

        self.do("utime", call, self.path())

    def do_sync(self) -> None:
        number = self.slot()
        if number is not None:
            self.both("fsync", lambda side: os.fsync(side.slots[number]))

    def do_map(self) -> None:
        number, body = self.slot(), self.body(5000)

        def call(side: Side) -> str:
            size = os.fstat(side.slots[number or 0]).st_size
            if size < len(body):
                return "too short"
            try:
                with mmap.mmap(side.slots[number or 0], size) as mapped:
                    mapped[: len(body)] = body
                    return hashlib.sha1(mapped).hexdigest()
            except ValueError:
                return "empty"

        if number is not None:
            self.both("map", call)

    def do_walk(self) -> None:
        self.do("walk", lambda top: sorted(_walk(top)), "")

    # ---- the end -------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Close everything, compare all bytes."""
        while self.local.slots:
            self.do_close()
        self.do("compare", lambda top: sorted(_digests(top)), "")
        return {
            "steps": sum(self.counts.values()),
            "counts": self.counts,
            "differences": self.differences,
            "slow": self.slow,
            "longest": self.longest,
        }


def _walk(top: str) -> list[tuple[str, list[str], list[str]]]:
    return [
        (os.path.relpath(folder, top), sorted(folders), sorted(files))
        for folder, folders, files in os.walk(top)
    ]


def _digests(top: str) -> list[tuple[str, str]]:
    found = []
    for folder, _, files in os.walk(top):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                digest = hashlib.sha1(file.read()).hexdigest()
            found.append((os.path.relpath(os.path.join(folder, name), top), digest))
    return found


def main() -> None:
    mounted, local, seed, *more = sys.argv[1:]
    load = Load(mounted, local, int(seed), "light" in more)
    while not load.differences and not select.select([sys.stdin], [], [], 0)[0]:
        load.step()
        time.sleep(0.05 if load.light else 0.002)
    print(json.dumps(load.finish()))


if __name__ == "__main__":
    main()
