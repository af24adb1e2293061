"""A client program: saves, edits, renames and deletes files, and writes down what it was told.

Run as a program (standard library only): `writer.py DIRECTORY LOG SEED [large]`. Each call is a
line of JSON on standard output with the positions in the recorder's log before and after it: what
an fsync said before the power went must be true. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from typing import Any

NAMES = ["a.bin", "b.bin", "c.bin", "d.json", "latest"]
LARGE = 90 << 20
SIZES = [1, 700, 4096, 30_000, 150_000, 600_000]


def block(seed: int, length: int) -> bytes:
    """The bytes of one write."""
    return random.Random(seed).randbytes(length)


class Writer:
    """One program in a directory of its own."""

    def __init__(self, top: str, log: str, seed: int) -> None:
        self.top, self.log, self.seed = top, log, seed
        self.rng = random.Random(seed)
        self.folder = os.path.basename(top)
        self.files: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.made = 0
        self.fd = -1

    def call(self, op: str, call: Any, **facts: Any) -> None:
        begin = os.stat(self.log).st_size
        call()
        end = os.stat(self.log).st_size
        print(json.dumps({"op": op, "begin": begin, "end": end, **facts}), flush=True)

    def at(self, name: str) -> str:
        return os.path.join(self.top, name)

    def open(self, name: str, flags: int) -> None:
        self.fd = os.open(self.at(name), flags, 0o644)

    # ---- pieces --------------------------------------------------------------------------------

    def create(self, name: str) -> str:
        self.made += 1
        file = f"{self.folder}-{self.made}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        self.call("create", lambda: self.open(name, flags), file=file, name=self.key(name))
        self.sizes[file] = 0
        return file

    def key(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def write(self, file: str, at: int, length: int = 0) -> None:
        length = length or self.rng.choice(SIZES)
        seed = self.rng.randrange(1 << 40)
        data = block(seed, length)
        self.call(
            "write", lambda: os.pwrite(self.fd, data, at), file=file, at=at, length=length,
            seed=seed,
        )  # fmt: skip
        self.sizes[file] = max(self.sizes[file], at + length)

    def append_some(self, file: str) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            self.write(file, self.sizes[file])
            if self.rng.random() < 0.15:
                self.sync(file)

    def sync(self, file: str) -> None:
        self.call("fsync", lambda: os.fsync(self.fd), file=file)

    def close(self, file: str, synced: float) -> None:
        if self.rng.random() < synced:
            self.sync(file)
        self.call("close", lambda: os.close(self.fd), file=file)

    def sync_directory(self) -> None:
        fd = os.open(self.top, os.O_RDONLY)
        self.call("fsync", lambda: os.fsync(fd), file="")
        os.close(fd)

    # ---- what programs do ----------------------------------------------------------------------

    def do_save(self) -> None:
        """Beside the name, synced, and renamed over it."""
        name = self.rng.choice(NAMES)
        part = name + self.rng.choice([".tmp", ".part"])
        file = self.create(part)
        self.append_some(file)
        self.close(file, 0.8)
        self.rename(part, name, file)
        if self.rng.random() < 0.3:
            self.sync_directory()

    def rename(self, old: str, new: str, file: str) -> None:
        self.call(
            "rename", lambda: os.rename(self.at(old), self.at(new)), file=file,
            old=self.key(old), new=self.key(new),
        )  # fmt: skip
        self.files.pop(old, None)
        self.files[new] = file

    def do_overwrite(self) -> None:
        """Truncated and written anew, in place."""
        name = self.rng.choice(NAMES)
        if name not in self.files:
            self.files[name] = self.create(name)
        else:
            file = self.files[name]
            self.call("trunc", lambda: self.open(name, os.O_WRONLY | os.O_TRUNC), file=file)
            self.sizes[file] = 0
        self.append_some(self.files[name])
        self.close(self.files[name], 0.5)

    def do_edit(self) -> None:
        """Some bytes in the middle, in place."""
        if not self.files:
            return
        name = self.rng.choice(sorted(self.files))
        file = self.files[name]
        self.open(name, os.O_RDWR)
        for _ in range(self.rng.randrange(1, 4)):
            self.write(file, self.rng.randrange(self.sizes[file] + 1))
        self.close(file, 0.5)

    def do_remove(self) -> None:
        if self.files:
            name = self.rng.choice(sorted(self.files))
            file = self.files.pop(name)
            self.call("unlink", lambda: os.unlink(self.at(name)), file=file, name=self.key(name))

    def do_move(self) -> None:
        if self.files:
            old = self.rng.choice(sorted(self.files))
            new = self.rng.choice(NAMES)
            if old != new:
                self.rename(old, new, self.files[old])

    def do_grow(self) -> None:
        """One file that no cache of 64 MiB holds: appended to and edited, synced now and then;
        closed once it is long enough, and edited in place when it has left for the store."""
        name = "big.bin"
        if name not in self.files:
            self.files[name] = self.create(name)
        file = self.files[name]
        if self.fd < 0:
            if os.getxattr(self.at(name), "user.cachefs.state") != b"durable":
                return
            self.open(name, os.O_RDWR)
        at, length = self.sizes[file], 1 << 20
        if at > LARGE or self.rng.random() < 0.1:
            at, length = self.rng.randrange(self.sizes[file] + 1), 70_000
        self.write(file, at, length)
        if self.rng.random() < 0.15:
            self.sync(file)
        if self.sizes[file] > LARGE and self.rng.random() < 0.2:
            self.close(file, 0.7)
            self.fd = -1

    def step(self) -> None:
        """One of them, at random."""
        kinds = [self.do_save, self.do_overwrite, self.do_edit, self.do_remove, self.do_move]
        self.rng.choices(kinds, [8, 4, 4, 1, 3])[0]()


def main() -> None:
    top, log, seed, *large = sys.argv[1:]
    os.mkdir(top)
    writer = Writer(top, log, int(seed))
    step = writer.do_grow if large else writer.step
    while not select.select([sys.stdin], [], [], 0)[0]:
        step()
        time.sleep(writer.rng.choice([0.0, 0.0, 0.01, 0.1]))
    if large and writer.fd >= 0:  # The end of the process would close it, and nobody write it down.
        writer.close(writer.files["big.bin"], 0.7)


if __name__ == "__main__":
    main()
