"""How fast a device is: the best of some tries, whatever else goes on there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache import speed
from cachefs.cache.system import write_all


def throttled(seconds: Iterator[float]) -> tuple[list[float], object]:
    """(time, a write that takes as long as the next number says)."""
    now = [0.0]

    def write(fd: int, body: bytes, start: int) -> None:
        write_all(fd, body, start)
        now[0] += next(seconds)

    return now, write


def test_a_noisy_disk(tmp_path: Path) -> None:
    """Single writes that take long tell of others, not of the disk."""
    now, write = throttled(iter([0.1, 5.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 9.0]))
    found = speed.measure(tmp_path, write=write, clock=lambda: now[0])  # type: ignore[arg-type]
    assert found == pytest.approx(speed.BYTES / 0.4)
    assert list(tmp_path.iterdir()) == []


def test_a_real_one(tmp_path: Path) -> None:
    assert speed.measure(tmp_path) > 1e6


def test_one_that_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        speed.measure(tmp_path / "gone")
