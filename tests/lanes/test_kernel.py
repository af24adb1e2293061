"""The kernel's rules for pinned inodes: nothing that a local directory does may fail or differ.

Each program runs on the mount and in a local directory (on the filesystem that the cache is on);
every answer must be the same, and so must the bytes, at the end and in the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import pytest

from tests.lanes.place import Place, without
from tests.support.actor import pattern
from tests.support.client import Actor
from tests.support.mounts import poll

MIB = 1 << 20
BODY = 300_000
Step = tuple[Any, ...]


class Both:
    """Does everything twice and compares."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.actors: dict[int, tuple[Actor, Actor]] = {}

    def __call__(self, *step: Any, who: int = 0) -> Any:
        """One step in both places, in the client process of that number."""
        if who not in self.actors:
            self.actors[who] = self.place.actor(), self.place.twin()
        told = [without(actor.ask(*step), "ino", "mtime", "ctime", "atime", "blocks")
                for actor in self.actors[who]]  # fmt: skip
        assert told[0] == told[1], f"{step}: mount {told[0]}, local {told[1]}"
        return told[0]

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self(*step)

    def same(self, name: str) -> None:
        """Content as a fresh reader sees it, here and in the store."""
        expected = (self.place.local / name).read_bytes()
        assert (self.place / name).read_bytes() == expected, f"{name} differs"
        self.place.durable()
        assert self.place.store.get(name) == expected, f"{name} differs in the store"


@pytest.fixture
def both(place: Place) -> Both:
    """In the tracked and in the passthrough lane."""
    return Both(place)


def pin(both: Both, how: str) -> None:
    """Slot 0 holds `f` (BODY bytes) open so that its inode is pinned in one of the ways."""
    if how == "new writer":
        both.run([("open", 0, "f", "RDWR|CREAT"), ("write", 0, 1, BODY)])
        return
    both.run([("open", 1, "f", "RDWR|CREAT"), ("write", 1, 1, BODY), ("close", 1)])
    if how == "reader of a durable file":
        both.place.durable()
    if how == "editor":  # of a file whose release has come
        poll(lambda: both.place.state_of("f") != "open", 10)
    both("open", 0, "f", "RDONLY" if "reader" in how else "RDWR")


PINS = ["new writer", "reader", "reader of a durable file", "editor"]
SECONDS = [
    "RDONLY", "WRONLY", "RDWR", "WRONLY|TRUNC", "RDWR|TRUNC", "WRONLY|APPEND", "RDWR|APPEND|CREAT",
    "RDWR|SYNC", "WRONLY|DSYNC|TRUNC", "RDONLY|NOATIME",
]  # fmt: skip


@pytest.mark.parametrize("how", PINS)
def test_second_opens(both: Both, how: str) -> None:
    """Every kind of second open while the inode is pinned: no EIO, and the bytes are right."""
    for number, flags in enumerate(SECONDS):
        both.run([("open", 9, f"spacer{number}", "WRONLY|CREAT"), ("close", 9)])
        pin(both, how)
        both.run([("open", 2, "f", flags), ("fstat", 2), ("pread", 0, BODY, 0)])
        if "WR" in flags:
            both.run(
                [
                    ("write", 2, 50 + number, 7000),
                    ("pwrite", 2, 70 + number, 4096, 100_000),
                    ("fstat", 0),
                    ("stat", "f"),
                    ("mmap_read", 0, 5000, 1000),
                ]
            )
        both.run([("pread", 0, 2 * BODY, 0), ("open", 3, "f", "RDONLY"), ("pread", 3, 2 * BODY, 0)])
        both.run([("close", 3), ("close", 2), ("pread", 0, 2 * BODY, 0), ("close", 0)])
        both.same("f")
        both("unlink", "f")


def test_passthrough_pins_say_so(fast_place: Place) -> None:
    """The pins above are what they are meant to be."""
    lanes = {}
    for how in PINS:
        both = Both(fast_place)
        pin(both, how)
        lanes[how] = fast_place.lane_of("f")
        both.run([("close", 0), ("unlink", "f")])
    assert lanes == {
        "new writer": "passthrough",
        "reader": "passthrough",
        "reader of a durable file": "passthrough",
        "editor": "tracked",
    }


@pytest.mark.parametrize("how", PINS)
def test_truncation_with_handles_open(both: Both, how: str) -> None:
    """By path and by descriptor, to less, more and nothing, also by another process."""
    pin(both, how)
    both("open", 5, "f", "RDWR", who=1)
    for number, size in enumerate((200_000, 250_001, 0, 4096, 100_000, 0)):
        both("truncate", "f", size)
        both.run([("fstat", 0), ("stat", "f"), ("pread", 0, BODY, 0)])
        both("pwrite", 5, 20 + number, 5000, 30_000, who=1)
        both("fstat", 5, who=1)
        both("ftruncate", 5, 90_000 + number, who=1)
        both.run([("fstat", 0), ("stat", "f"), ("pread", 0, BODY, 0)])
    both("write", 5, 7, 1234, who=1)
    both("close", 5, who=1)
    both.run([("fstat", 0), ("close", 0)])
    both.same("f")


def test_truncation_of_what_was_written_behind_the_daemons_back(both: Both) -> None:
    """The daemon has never asked for the size that it is to cut off."""
    both.run([("open", 0, "f", "RDWR|CREAT"), ("write", 0, 1, BODY)])
    both("truncate", "f", 0, who=1)
    both.run([("fstat", 0), ("write", 0, 2, 5000)])
    both("open", 1, "f", "RDWR|TRUNC", who=1)
    both.run([("fstat", 0), ("write", 0, 3, 5000), ("close", 0)])
    both("close", 1, who=1)
    both.same("f")


MODES = {"plain": 0, "keep size": 1, "punch hole": 3, "zero range": 16, "collapse": 8}


@pytest.mark.parametrize("flags", ["WRONLY|CREAT", "RDWR|CREAT", "existing WRONLY"])
def test_fallocate(both: Both, flags: str) -> None:
    """In each mode, on writers that may not read; errors are those of the disk."""
    both.run([("open", 0, "f", "WRONLY|CREAT"), ("write", 0, 1, BODY)])
    if flags.startswith("existing"):
        both("close", 0)
    else:
        both.run([("unlink", "f"), ("close", 0)])
    both("open", 0, "f", flags.removeprefix("existing "))
    both("pwrite", 0, 1, 1000, 10_000)
    for mode in MODES.values():
        both.run(
            [
                ("fallocate", 0, mode, 50_000, 100_000),
                ("fstat", 0),
                ("fallocate", 0, mode, 250_000, 100_000),
                ("fstat", 0),
                ("stat", "f"),
                ("pwrite", 0, 40 + mode, 1000, 60_000),
            ]
        )
    both.run([("fallocate", 0, 0, 0, 0), ("fallocate", 0, 0, -1, 10), ("close", 0)])
    both("open", 0, "f", "RDONLY")
    both.run([("fallocate", 0, 0, 0, 10), ("pread", 0, 2 * BODY, 0), ("close", 0)])
    both.same("f")


def _preallocate(path: str, flags: int) -> list[int]:
    """As glibc does it, which writes where the filesystem cannot allocate."""
    fd = os.open(path, flags)
    sizes = []
    for offset, length in ((0, 100), (5000, 20_000), (100, 10_000)):
        os.posix_fallocate(fd, offset, length)
        sizes.append(os.fstat(fd).st_size)
    os.pwrite(fd, b"end", 24_000)
    os.close(fd)
    return [*sizes, os.stat(path).st_size]


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR], ids=["WRONLY", "RDWR"])
def test_posix_fallocate(place: Place, flags: int, existing: bool) -> None:
    body = b"abc" * 1000 if existing else b""
    if existing:
        (place / "f").write_bytes(body)
    told = place.client.run(_preallocate, place / "f", flags | os.O_CREAT)
    assert told == [max(100, len(body)), 25_000, 25_000, 25_000]
    expected = body.ljust(24_000, b"\0") + b"end" + bytes(997)
    assert (place / "f").read_bytes() == expected
    place.durable()
    assert place.store.get("f") == expected


def test_holes_give_space_back(place: Place) -> None:
    actor = place.actor()
    actor("open", 0, "f", "WRONLY|CREAT")
    for number in range(4):
        actor("write", 0, number, MIB)
    before = (place / "f").stat().st_blocks * 512
    actor("fallocate", 0, 3, 0, 3 * MIB)
    after = (place / "f").stat().st_blocks * 512
    assert before >= 4 * MIB > 2 * MIB > after
    actor("close", 0)
    assert (place / "f").read_bytes() == bytes(3 * MIB) + pattern(3, MIB)


def test_appends_from_two_handles(both: Both) -> None:
    """O_APPEND writes of two processes never overwrite each other, in either lane."""
    for name, existing in (("new", False), ("old", True)):
        if existing:
            both.run([("open", 0, name, "WRONLY|CREAT"), ("write", 0, 1, 50_000), ("close", 0)])
        both("open", 0, name, "WRONLY|APPEND|CREAT")
        both("open", 1, name, "RDWR|APPEND", who=1)
        for number in range(20):
            both("write", 0, number, 3000 + number)
            both("write", 1, 100 + number, 2000 + number, who=1)
            both("fstat", 0)
        both("close", 0)
        both("pread", 1, 200_000, 0, who=1)
        both("close", 1, who=1)
        both.same(name)


def test_mapped_stores(both: Both) -> None:
    """A shared mapping and plain writes of another process see each other at once."""
    both.run([("open", 0, "f", "RDWR|CREAT"), ("ftruncate", 0, BODY), ("map", 1, 0, BODY)])
    both("open", 5, "f", "RDWR", who=1)
    for number in range(10):
        at = 20_000 * number
        both("store", 1, number, 5000, at)
        both("pread", 5, 5000, at, who=1)
        both("pwrite", 5, 60 + number, 5000, at + 7000, who=1)
        both("load", 1, 5000, at + 7000)
    both("close", 5, who=1)
    both.run([("close", 0), ("store", 1, 99, 1000, 200_000), ("unmap", 1)])
    both.same("f")


def test_sendfile_and_copy_file_range(both: Both) -> None:
    """From a file that is being written, one that is cached and one that is edited."""
    both.run(
        [
            ("open", 0, "new", "RDWR|CREAT"), ("write", 0, 1, BODY),
            ("open", 1, "old", "WRONLY|CREAT"), ("write", 1, 2, BODY), ("close", 1),
            ("open", 1, "old", "RDONLY"),
            ("open", 2, "edited", "WRONLY|CREAT"), ("write", 2, 3, BODY), ("close", 2),
            ("open", 2, "edited", "RDWR"), ("pwrite", 2, 4, 5000, 10_000),
            ("open", 3, "target", "RDWR|CREAT"),
        ]
    )  # fmt: skip
    for number, source in enumerate((0, 1, 2)):
        both("sendfile", 3, source, 5000, 60_000)
        both("copy_file_range", source, 1000, 3, 200_000 + 30_000 * number, 20_000)
        both("fstat", 3)
    both("sendfile", 2, 0, 0, 50_000)
    both("copy_file_range", 0, 0, 0, 250_000, 40_000)
    for slot in range(4):
        both("close", slot)
    for name in ("new", "old", "edited", "target"):
        both.same(name)


def _directly(path: str) -> list[Any]:
    import mmap

    buffer, into = mmap.mmap(-1, 8192), mmap.mmap(-1, 4096)
    buffer.write(b"D" * 8192)
    direct = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    plain = os.open(path, os.O_RDWR)
    told: list[Any] = [os.pwritev(direct, [buffer], 4096), os.pwrite(plain, b"plain", 5000)]
    told += [os.preadv(direct, [into], 4096), bytes(into[900:912])]
    told += [os.pwritev(direct, [buffer], 8192), os.pread(plain, 10, 4999)]
    told.append(os.getxattr(path, "user.cachefs.lane"))
    os.close(direct)
    os.close(plain)
    return told


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_direct_io(place: Place, existing: bool) -> None:
    if existing:
        (place / "f").write_bytes(b"o" * 20_000)
    watch = place.watch()
    told = place.client.run(_directly, place / "f")
    lane = "tracked" if existing else place.lane
    assert told.pop() == lane.encode()
    assert told == [8192, 5, 4096, b"D" * 4 + b"plain" + b"D" * 3, 8192, b"DplainDDDD"]
    assert (watch.data() == {}) == (lane == "passthrough")
    expected = (b"o" if existing else b"\0") * 4096 + b"D" * 904 + b"plain" + b"D" * 11_379
    expected += b"o" * (20_000 - len(expected)) if existing else b""
    assert (place / "f").read_bytes() == expected
    place.durable()
    assert place.store.get("f") == expected


def test_sizes_and_times_while_it_is_written(place: Place) -> None:
    """stat from another process tells how far the writer has come; utimens holds until a write."""
    actor, watch = place.actor(), place.watch()
    actor("open", 0, "f", "WRONLY|CREAT")
    last = 0
    for number in range(1, 6):
        time.sleep(0.02)
        now = time.time_ns()
        actor("write", 0, number, 70_000)
        told = (place / "f").stat()
        assert told.st_size == 70_000 * number
        assert told.st_blocks * 512 >= told.st_size
        assert last < told.st_mtime_ns
        assert now - 20_000_000 <= told.st_mtime_ns <= time.time_ns()
        assert told.st_ctime_ns >= told.st_mtime_ns
        last = told.st_mtime_ns
    os.utime(place / "f", ns=(10**18, 10**18 + 5))
    told = (place / "f").stat()
    assert (told.st_atime_ns, told.st_mtime_ns) == (10**18, 10**18 + 5)
    assert actor("fstat", 0)["mtime"] == 10**18 + 5
    actor("write", 0, 9, 100)
    assert (place / "f").stat().st_mtime_ns > last
    actor("futimens", 0, 2 * 10**18, 3 * 10**18 // 2)
    actor("close", 0)
    assert (place / "f").stat().st_mtime_ns == 3 * 10**18 // 2
    place.durable()
    assert (place / "f").stat().st_mtime_ns == 3 * 10**18 // 2
    assert (watch.data() == {}) == (place.lane == "passthrough")


def test_opening_for_writing_changes_no_time(place: Place) -> None:
    """The cache file's own time is that of a copy or a download."""
    (place / "f").write_bytes(b"x" * 5000)
    os.utime(place / "f", ns=(10**18, 10**18))
    for durable in (False, True):
        if durable:
            place.durable()
        actor = place.actor()
        actor("open", 0, "f", "RDONLY")
        actor("open", 1, "f", "RDWR")
        assert (place / "f").stat().st_mtime_ns == 10**18
        actor("close", 1)
        actor("close", 0)
        assert (place / "f").stat().st_mtime_ns == 10**18


def test_no_stale_byte_between_lanes(place: Place) -> None:
    """Written in one lane, read in the other, by read and through mappings, again and again."""
    both = Both(place)
    both.run([("open", 0, "f", "RDWR|CREAT"), ("write", 0, 1, BODY), ("close", 0)])
    for number in range(12):
        edits = [("pwrite", 0, 100 + number, 4096 * 3 + 17, 4096 * (5 * number % 60) + 5)]
        edits.append(("mmap_write", 0, 200 + number, 3000, 4096 * (7 * number % 60)))
        looks: list[Step] = [("pread", 0, BODY, 0), ("mmap_read", 0, 200_000, 0)]
        both.run([("open", 0, "f", "RDWR"), *looks, *edits, *looks, ("close", 0)])
        both("open", 1, "f", "RDONLY", who=1)
        both("pread", 1, BODY, 0, who=1)
        both("mmap_read", 1, 200_000, 0, who=1)
        both("close", 1, who=1)
        if number % 3 == 2:
            both.run([("open", 0, "f", "RDWR|TRUNC"), ("write", 0, number, BODY)])
            both.run([*looks, ("close", 0)])
        if number % 4 == 3:
            place.durable()
        both.run([("open", 0, "f", "RDONLY"), *looks, ("close", 0)])
    both.same("f")


def test_a_reader_keeps_its_lane_and_sees_the_writer(place: Place) -> None:
    """A reader pins the inode; who edits it afterwards is seen through that reader's mapping."""
    both = Both(place)
    both.run([("open", 0, "f", "RDWR|CREAT"), ("write", 0, 1, BODY), ("close", 0)])
    both.run([("open", 0, "f", "RDONLY"), ("pread", 0, BODY, 0)])
    for number in range(5):
        both("open", 1, "f", "RDWR", who=1)
        both("pwrite", 1, 30 + number, 9000, 40_000 * number + 11, who=1)
        both.run([("pread", 0, BODY, 0), ("mmap_read", 0, BODY, 0)])
        both("close", 1, who=1)
        both.run([("pread", 0, BODY, 0), ("mmap_read", 0, BODY, 0)])
    both("close", 0)
    both.same("f")
