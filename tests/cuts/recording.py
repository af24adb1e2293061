"""A filesystem on a disk that remembers every write, and what a power cut would have left of it."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.support.mounts import poll

SOURCE = Path(__file__).with_name("recorder.c")
SECTOR = 512
"""What a disk writes whole or not at all."""
SIZES = {"ext4": 256 << 20, "xfs": 320 << 20}
# What XFS sets aside behind the end of a file that grows can be as much as this small cache has.
_OPTIONS = {"ext4": "loop", "xfs": "loop,allocsize=1m"}
MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", "-J",
             "size=8"],
    "xfs": ["mkfs.xfs", "-q", "-K"],
}  # fmt: skip
_HEAD = struct.Struct("<IIQQ")
_WRITE, _FLUSH = 1, 2


def run(*words: str | Path) -> str:
    return subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def build(folder: Path) -> Path:
    """The recorder, compiled."""
    flags = run("pkg-config", "--cflags", "--libs", "fuse3").split()
    run("gcc", "-O2", "-Wall", "-Wextra", "-Werror", SOURCE, "-o", folder / "recorder", *flags)
    return folder / "recorder"


def unmount(top: Path) -> None:
    """A thread of a daemon that has ended may hold it for a moment."""
    for _ in range(100):
        if not subprocess.run(["umount", str(top)], capture_output=True).returncode:
            return
        time.sleep(0.1)
    raise AssertionError(f"{top} cannot be unmounted: {_users(top)}")


def _users(top: Path) -> list[str]:
    """Who has something open there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith(f"{top}/"):
            found.append(f"{path} -> {target}")
    return found


class Disks:
    """Mounted filesystems whose disks are recorded, in one log; `folder` should be in RAM."""

    def __init__(self, folder: Path, *kinds: str, times: int = 1) -> None:
        """`times`: larger than usual."""
        self.log = folder / "log"
        self.tops = [folder / f"top{number}" for number in range(len(kinds))]
        self.bases = [folder / f"base{number}" for number in range(len(kinds))]
        images = [folder / f"image{number}" for number in range(len(kinds))]
        self._disks = folder / "disks"
        for each in (*self.tops, self._disks):
            each.mkdir()
        for kind, image, base in zip(kinds, images, self.bases, strict=True):
            with open(image, "wb") as file:
                file.truncate(SIZES[kind] * times)
            run(*MAKE[kind], image)
            sparsely_copy(image, base)
        self._recorder = subprocess.Popen([build(folder), self._disks, self.log, *images])
        poll(lambda: (self._disks / "0").exists(), what="the recorder")
        for number, (kind, top) in enumerate(zip(kinds, self.tops, strict=True)):
            run("mount", "-o", _OPTIONS[kind], self._disks / str(number), top)

    @property
    def position(self) -> int:
        """Bytes of the log so far: an instant."""
        return os.stat(self.log).st_size

    def close(self) -> None:
        for each in (*self.tops, self._disks):
            if os.path.ismount(each):
                unmount(each)
        self._recorder.terminate()
        self._recorder.wait(10)


def sparsely_copy(source: Path, target: Path) -> None:
    """A copy whose holes are holes."""
    run("cp", "--sparse=always", source, target)


@dataclass(frozen=True, slots=True)
class Entry:
    """One write or flush: `end` is the position at which it was in the log; `at` where its bytes
    are there."""

    kind: int
    disk: int
    offset: int
    length: int
    at: int
    end: int


def entries(log: Path) -> Iterator[Entry]:
    """What the disks were asked to do, in order."""
    with open(log, "rb") as file:
        position = 0
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, disk, offset, length = _HEAD.unpack(head)
            at = position + _HEAD.size
            position = at + (length if kind == _WRITE else 0)
            file.seek(position)
            yield Entry(kind, disk, offset, length, at, position)


class Past:
    """Makes images of the disks as power cuts would have left them, at ever later instants."""

    def __init__(self, disks: Disks, scratch: Path) -> None:
        self._entries = list(entries(disks.log))
        self._log = os.open(disks.log, os.O_RDONLY)
        self._sure = [scratch / f"sure{number}" for number in range(len(disks.bases))]
        for base, sure in zip(disks.bases, self._sure, strict=True):
            sparsely_copy(base, sure)
        self._images = [os.open(sure, os.O_RDWR) for sure in self._sure]
        self._next = 0
        self._doubtful: list[list[Entry]] = [[] for _ in self._sure]

    def instants(self, count: int, after: int, rng: random.Random) -> list[int]:
        """Where to cut: at random, just before a flush of the first disk (when most is in doubt)
        and just after one."""
        ends = [entry.end for entry in self._entries if entry.end > after]
        flushes = [
            (before.end, entry.end)
            for before, entry in pairwise(self._entries)
            if entry.kind == _FLUSH and entry.disk == 0 and before.end > after
        ]
        chosen = [
            rng.choice([rng.choice(ends), *rng.choice(flushes)]) if flushes else rng.choice(ends)
            for _ in range(count)
        ]
        return sorted(chosen)

    def cut(self, position: int, targets: Sequence[Path], rng: random.Random) -> int:
        """The disks after a cut at `position`, not before that of the last call: all that was
        written before a disk's last flush, and of the rest any part. How many writes were in
        doubt."""
        while self._next < len(self._entries) and self._entries[self._next].end <= position:
            self._take(self._entries[self._next])
            self._next += 1
        for sure, target, doubtful in zip(self._sure, targets, self._doubtful, strict=True):
            sparsely_copy(sure, target)
            share = rng.choice([0.0, 0.3, 0.5, 0.7, 0.95, 1.0])
            image = os.open(target, os.O_RDWR)
            for entry in doubtful:
                if rng.random() < share:
                    self._apply(image, entry, rng if rng.random() < 0.3 else None)
            os.close(image)
        return sum(map(len, self._doubtful))

    def _take(self, entry: Entry) -> None:
        doubtful = self._doubtful[entry.disk]
        if entry.kind != _FLUSH:
            doubtful.append(entry)
            return
        for each in doubtful:
            self._apply(self._images[entry.disk], each, None)
        doubtful.clear()

    def _apply(self, image: int, entry: Entry, torn: random.Random | None) -> None:
        data = bytes(entry.length)
        if entry.kind == _WRITE:
            data = os.pread(self._log, entry.length, entry.at)
        if torn is None:
            os.pwrite(image, data, entry.offset)
            return
        unit = torn.choice([SECTOR, 8 * SECTOR])
        for start in range(0, entry.length, unit):
            if torn.random() < 0.5:
                os.pwrite(image, data[start : start + unit], entry.offset + start)

    def close(self) -> None:
        for each in (*self._images, self._log):
            os.close(each)
