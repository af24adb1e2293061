"""Times of changes, beside those that the kernel gives to writes."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from cachefs.vfs import clock

FINE = tuple(map(int, platform.release().split(".")[:2])) >= (6, 13)


@pytest.mark.parametrize("looked", [False, True])
def test_a_change_lies_between_two_writes(tmp_path: Path, looked: bool) -> None:
    """Whether or not somebody looks at the file in between."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for _ in range(2000):
        os.pwrite(fd, b"x", 0)
        before = os.fstat(fd).st_mtime_ns if looked else 0
        changed = clock.now_ns()
        before = before or os.fstat(fd).st_mtime_ns
        os.pwrite(fd, b"y", 0)
        after = os.fstat(fd).st_mtime_ns
        assert before < changed < after if FINE else before <= changed <= after
    os.close(fd)


def test_a_write_is_later_than_the_time_that_was_set(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    clock.begin(fd, 10**18)
    assert os.fstat(fd).st_mtime_ns == 10**18
    os.pwrite(fd, b"x", 0)
    assert os.fstat(fd).st_mtime_ns > 10**18
    os.close(fd)
