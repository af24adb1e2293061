"""How fast a cache device takes what is written to it: measured once, by a little of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cachefs.cache.system import write_all

BYTES = 16 << 20
"""Bytes that a measurement has on the device at a time."""
_ROUNDS = 3
_PIECE = 4 << 20


def measure(
    directory: Path,
    *,
    write: Callable[[int, bytes, int], None] = write_all,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Bytes a second that reach the device, the best of some tries: others who use it make single
    ones slow, and nothing makes one too fast. Blocks for as long as it takes. OSError."""
    name = directory / "speed"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(name)
        return max(_once(fd, write, clock) for _ in range(_ROUNDS))
    finally:
        os.close(fd)


def _once(fd: int, write: Callable[[int, bytes, int], None], clock: Callable[[], float]) -> float:
    os.ftruncate(fd, 0)
    body = os.urandom(_PIECE)  # Some devices write zeros faster than anything else.
    began = clock()
    for start in range(0, BYTES, _PIECE):
        write(fd, body, start)
    os.fdatasync(fd)
    return BYTES / max(1e-6, clock() - began)
