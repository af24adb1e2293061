"""A disk that failed to write a file once: nobody says later that it is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache import doubt
from cachefs.cache.system import sync_filesystem
from tests.support.lossydisk import LossyDisk

DATA = os.urandom(1 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LossyDisk]:
    made = LossyDisk(tmp_path)
    yield made
    made.end()


def write(path: Path) -> int:
    """Into memory; returns a descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, DATA, 0)
    return fd


def refused(fd: int) -> bool:
    """Whether it does not count as being there."""
    try:
        doubt.sync(fd)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("marks", [True, False])
def test_once_failed_never_trusted(
    disk: LossyDisk, marks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubt, "_unmarked", set())
    if not marks:
        monkeypatch.setattr(os, "setxattr", lambda *_: (_ for _ in ()).throw(OSError()))
    disk.fail()
    fd = write(disk.top / "lost")
    assert refused(fd)
    os.fsync(fd)  # So the kernel says: it told of it before.
    disk.work()
    again = os.open(disk.top / "lost", os.O_RDONLY)
    assert refused(again)
    with pytest.raises(OSError, match="before"):
        doubt.check(again)
    new = write(disk.top / "new")
    assert not refused(new)
    doubt.check(new)
    for each in (fd, again, new):
        os.close(each)
    disk.lose_power()
    assert (disk.top / "lost").read_bytes() != DATA
    assert (disk.top / "new").read_bytes() == DATA


def test_what_a_sync_of_everything_does_not_tell(disk: LossyDisk) -> None:
    """Another program was told that something was lost."""
    disk.fail()
    os.close(write(disk.top / "lost"))
    with pytest.raises(OSError, match=r"space|Input"):
        sync_filesystem(disk.top)
    disk.work()
    sync_filesystem(disk.top)  # So the kernel says.
    fd = os.open(disk.top / "lost", os.O_RDONLY)
    with pytest.raises(OSError, match=r"space|Input"):
        doubt.check(fd)
    assert refused(fd)
    os.close(fd)
