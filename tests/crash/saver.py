"""A client program that saves, replaces and deletes files, whatever the mount answers.

Run as a program (standard library only): `saver.py DIRECTORY SEED`. It tries again after errors,
and remembers what it was told: at the end (of its standard input) it prints one JSON object with
the digest of each file that must be there, the names of which nobody knows, and figures.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import select
import sys
import time
from collections import Counter
from typing import Any

NAMES = [f"step{number}.bin" for number in range(6)] + ["latest", "model.index.json"]
SIZES = [100, 4096, 70_000, 400_000, 1_500_000, 3_000_000]


class Saver:
    """One program in a directory of its own."""

    def __init__(self, top: str, seed: int) -> None:
        self.top, self.rng = top, random.Random(seed)
        self.kept: dict[str, str] = {}
        self.doubtful: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []
        self.longest = 0.0

    def at(self, name: str) -> str:
        return os.path.join(self.top, name)

    def attempt(self, what: str, call: Any) -> bool:
        """Whether it worked."""
        begun = time.monotonic()
        try:
            call()
        except OSError as error:
            self.counts[f"{what}: {errno.errorcode.get(error.errno or 0, '?')}"] += 1
            time.sleep(0.2)
            return False
        finally:
            self.longest = max(self.longest, time.monotonic() - begun)
        self.counts[what] += 1
        return True

    def save(self) -> None:
        name = self.rng.choice(NAMES)
        part, data = f"{name}.tmp", self.rng.randbytes(self.rng.choice(SIZES))
        self.doubtful.add(part)
        if not self.attempt("write", lambda: self.write(part, data)):
            self.attempt("clean up", lambda: os.unlink(self.at(part)))
            return
        self.counts["bytes"] += len(data)
        if self.attempt("rename", lambda: os.rename(self.at(part), self.at(name))):
            self.kept[name] = hashlib.sha1(data).hexdigest()
            self.doubtful -= {name, part}
        else:
            self.kept.pop(name, None)
            self.doubtful.add(name)

    def write(self, name: str, data: bytes) -> None:
        fd = os.open(self.at(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for start in range(0, len(data), 256 << 10):
                piece = data[start : start + (256 << 10)]
                while piece:
                    piece = piece[os.write(fd, piece) :]
            if self.rng.random() < 0.5:
                os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self) -> None:
        if not self.kept:
            return
        name = self.rng.choice(sorted(self.kept))
        del self.kept[name]
        if self.attempt("unlink", lambda: os.unlink(self.at(name))):
            self.doubtful.discard(name)
        else:
            self.doubtful.add(name)

    def look(self) -> None:
        if not self.kept:
            return
        name = self.rng.choice(sorted(self.kept))
        self.attempt("read", lambda: self.compare(name))

    def compare(self, name: str) -> None:
        with open(self.at(name), "rb") as file:
            digest = hashlib.sha1(file.read()).hexdigest()
        if digest != self.kept[name]:
            self.differences.append(f"{self.at(name)} at step {sum(self.counts.values())}")

    def told(self) -> str:
        return json.dumps({
            "kept": self.kept, "doubtful": sorted(self.doubtful), "counts": self.counts,
            "differences": self.differences, "longest": self.longest,
        })  # fmt: skip


def main() -> None:
    top, seed = sys.argv[1:]
    saver = Saver(top, int(seed))
    while not saver.attempt("mkdir", lambda: os.makedirs(top, exist_ok=True)):
        pass
    while not select.select([sys.stdin], [], [], 0)[0]:
        saver.rng.choices([saver.save, saver.remove, saver.look], [6, 2, 3])[0]()
        time.sleep(saver.rng.choice([0.0, 0.01, 0.1]))
    print(saver.told())


if __name__ == "__main__":
    main()
