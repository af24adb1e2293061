"""The time of changes, by the clock that the kernel stamps files with.

An inode's times come from two sides: its cache file's, where the kernel stamps each write, and what
is recorded here for a chmod, a link or a rename. The kernel's clock is one of ticks and lags behind
time(2) by up to 10 ms; with times from there a write could seem older than the chmod before it, and
rsync, make or git would miss it. So the kernel is asked for every time, by changes of a file in
memory, which never waits for a disk.

From Linux 6.13 on a stamp that somebody has read is never given twice, and none that is given later
on any file is older, so that each change is seen as one. Before that, two changes within a tick
look like one, as on any local disk.
"""

from __future__ import annotations

import functools
import os

_MODE = 0o600


@functools.cache
def _stamped() -> int:
    return os.memfd_create("cachefs-clock", os.MFD_CLOEXEC)


def now_ns() -> int:
    """A time later than any that a file bears, and earlier than that of any write from now on."""
    fd = _stamped()
    _stamp(fd)  # This may be one that another file bears,
    now = _stamp(fd)
    _stamp(fd)  # and this one that the next write gets.
    return now


def begin(fd: int, mtime_ns: int) -> None:
    """Give the file behind `fd`, ours from now on, the mtime `mtime_ns`; the next write's is later.
    Waits for the disk. OSError."""
    os.utime(fd, ns=(mtime_ns, mtime_ns))
    os.fstat(fd)  # The time of that has been read: the next write gets another one.


def _stamp(fd: int) -> int:
    os.fchmod(fd, _MODE)
    return os.fstat(fd).st_ctime_ns


def bounded(ns: int) -> int:
    """A time in nanoseconds that somebody sets, cut to those that can be stored (64 bits: the years
    1677 to 2262), as every filesystem cuts them to what it can (utimensat(2))."""
    return max(-(1 << 63), min(ns, (1 << 63) - 1))
