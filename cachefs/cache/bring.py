"""A cache file on another device, made equal to one that is open."""

from __future__ import annotations

import os

from cachefs.cache.clone import make_equal
from cachefs.cache.device import CacheDevice
from cachefs.failpoints import Point, reach


def bring(reader: int, device: CacheDevice, copy: int) -> tuple[int, int]:
    """Make one cache file equal to another, on the disk; returns its size, and the
    bytes that it takes. Waits for the disk. OSError."""
    writer = device.open(copy, os.O_RDWR)
    try:
        size = make_equal(reader, writer)
        found = os.fstat(reader)
        os.utime(writer, ns=(found.st_atime_ns, found.st_mtime_ns))
        os.fsync(writer)
    finally:
        os.close(writer)
    device.sync_dir(copy)
    reach(Point.COPY_AFTER_FSYNC)
    return size, device.allocated(copy)
