"""A file is complete when its last writer is gone, not before and not after.

Closing a descriptor says little: a fork's exit closes what its parent writes to, a duplicate may be
open still, and a mapping outlives all of them. And a file that somebody has open all day must keep
nobody waiting.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lanes.place import Place
from tests.support.actor import pattern
from tests.support.bucket import DirectoryStore
from tests.support.client import Actor
from tests.support.mounts import Failed, poll

PART = 300_000


def fork(actor: Actor) -> None:
    """A child that shares the descriptor exits."""
    actor("fork_exit", 0)


def duplicate(actor: Actor) -> None:
    """The descriptor that was opened is closed, its duplicate is not."""
    actor("dup", 0, 7)
    actor("close", 0)
    actor("dup", 7, 0)
    actor("close", 7)


def second_handle(actor: Actor) -> None:
    """Another open of the same file is closed."""
    actor("open", 7, "shard.bin", "RDWR")
    actor("close", 7)


def reader(actor: Actor) -> None:
    """A reader comes and goes."""
    actor("open", 7, "shard.bin", "RDONLY")
    actor("pread", 7, 1000, 0)
    actor("close", 7)


def nothing(actor: Actor) -> None:
    """It is simply open all day."""


def mark(place: Place, number: int) -> None:
    """A marker written by somebody else is shown although the file is open; the file is not."""
    (place / "latest").write_text(f"{number}\n")
    place.mount.wait(place / "latest", timeout=20)
    assert place.store.get("latest") == f"{number}\n".encode()
    assert not (place.store.path / "shard.bin").exists()
    assert place.state_of("shard.bin") == "open"


@pytest.mark.parametrize("event", [fork, duplicate, second_handle, reader, nothing])
def test_still_open(place: Place, event: Callable[[Actor], None]) -> None:
    actor, watch = place.actor(), place.watch()
    actor("open", 0, "shard.bin", "RDWR|CREAT")
    for number in range(3):
        actor("write", 0, number, PART)
        event(actor)
        mark(place, number)
    assert place.lane_of("shard.bin") == place.lane
    with pytest.raises(Failed) as caught:
        place.mount.wait(place / "shard.bin", timeout=0.2)
    assert caught.value.exit_code == 4
    actor("write", 0, 3, PART)
    assert "WRITE" not in watch.data() or place.lane == "tracked"
    actor("close", 0)
    place.durable()
    assert place.store.get("shard.bin") == b"".join(pattern(n, PART) for n in range(4))


def test_a_mapping_outlives_its_descriptor(place: Place) -> None:
    """What is stored after close() belongs to the file; it is complete when it is unmapped."""
    actor = place.actor()
    actor("open", 0, "shard.bin", "RDWR|CREAT")
    actor("ftruncate", 0, PART)
    actor("map", 1, 0, PART)
    actor("store", 1, 1, 5000, 0)
    actor("close", 0)
    for number in range(3):
        actor("store", 1, 10 + number, 5000, 50_000 * (number + 1))
        mark(place, number)
    actor("unmap", 1)
    place.durable()
    expected = bytearray(PART)
    expected[:5000] = pattern(1, 5000)
    for number in range(3):
        at = 50_000 * (number + 1)
        expected[at : at + 5000] = pattern(10 + number, 5000)
    assert place.store.get("shard.bin") == expected


def test_a_killed_writer_has_finished(place: Place) -> None:
    """The kernel closes its files; what it wrote is all there is."""
    actor = place.actor()
    actor("open", 0, "shard.bin", "WRONLY|CREAT")
    actor("write", 0, 1, PART)
    actor.kill()
    place.durable()
    assert place.store.get("shard.bin") == pattern(1, PART)


def test_created_by_a_reader(place: Place) -> None:
    """open(O_CREAT | O_RDONLY), as flock(1) does: an empty file, published at its close."""
    actor = place.actor()
    actor("open", 0, "lock", "RDONLY|CREAT")
    actor("open", 1, "written", "RDONLY|CREAT")
    actor("open", 2, "written", "WRONLY")
    actor("write", 2, 1, 1000)
    for slot in range(3):
        actor("close", slot)
    place.durable()
    assert place.store.get("lock") == b""
    assert place.store.get("written") == pattern(1, 1000)


# ---- closed just before the marker ---------------------------------------------------------------


def _save_rounds(folder: str, rounds: int) -> int:
    """Shard and marker at once, in two processes that hand over by a pipe; children exit all the
    time with the shard's descriptor."""
    asked, ask = os.pipe()
    marker = os.fork()
    if marker == 0:
        os.close(ask)
        while step := os.read(asked, 4):
            with open(f"{folder}/latest", "wb") as latest:
                latest.write(step)
        os._exit(0)
    for number in range(rounds):
        fd = os.open(f"{folder}/shard{number:04}.bin", os.O_RDWR | os.O_CREAT)
        os.write(fd, bytes(100_000))
        other = os.dup(fd)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.write(fd, bytes(1_000_000))
        os.close(fd)
        os.waitpid(child, 0)
        os.close(other)
        os.write(ask, f"{number:04}".encode())
    os.close(ask)
    os.waitpid(marker, 0)
    return rounds


class Reader(threading.Thread):
    """Somebody who trusts the marker."""

    def __init__(self, store: DirectoryStore) -> None:
        super().__init__(daemon=True)
        self._store = store
        self.ended = False
        self.torn: list[str] = []
        self.read = 0

    def run(self) -> None:
        while not self.ended:
            self._look(self._store.path)
            time.sleep(0.001)

    def _look(self, path: Path) -> None:
        try:
            number = (path / "latest").read_text()
        except FileNotFoundError:
            return
        self.read += 1
        shard = path / f"shard{number}.bin"
        if not shard.exists() or shard.stat().st_size != 1_100_000:
            self.torn.append(number)


def test_a_marker_never_overtakes(place: Place) -> None:
    """Closed an instant before `latest` is written: there when that is."""
    someone = Reader(place.store)
    someone.start()
    rounds = place.client.run(_save_rounds, place.path, 40, timeout=50)
    place.durable()
    someone.ended = True
    someone.join(5)
    assert someone.read > 0
    assert someone.torn == []
    shards = list(place.store.path.glob("shard*"))
    assert len(shards) == rounds
    poll(lambda: place.mount.status()["dirty_files"] == 0)
