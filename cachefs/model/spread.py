"""Spreading the upload of a checkpoint over the time until the next one.

A save is a burst of files that are closed one after the other; then nothing comes until the next.
The time from the beginning of one burst to the beginning of the next is learned, and what is to be
uploaded is given a rate at which it is done in time. Where nothing was learned yet, or the time is
up, there is no limit: bytes that only this machine has are better sent too soon than too late.

Times are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_REMEMBERED = 5
"""Intervals whose median counts: one odd pause does not mislead."""
_QUIET = 10.0
"""Seconds without a file that end a burst,"""
_QUIET_SHARE = 0.25
"""or this part of the interval, when it is known and longer."""
_LAST_MOMENT = 2.0
"""Seconds before the time is up from which on there is no limit."""


class Bursts:
    """Learns how often checkpoints come."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: float | None = None
        self.began: float | None = None
        """When the latest burst began."""

    def sealed(self, now: float) -> bool:
        """Count a file of some size that was closed; True when it begins a burst."""
        begins = self._last is None or now - self._last > self._quiet()
        if begins:
            if self.began is not None:
                self._intervals.append(now - self.began)
            self.began = now
        self._last = now
        return begins

    @property
    def interval(self) -> float | None:
        """Seconds from burst to burst; None before there were two."""
        return median(self._intervals) if self._intervals else None

    def _quiet(self) -> float:
        interval = self.interval
        return _QUIET if interval is None else max(_QUIET, _QUIET_SHARE * interval)

    def rate(self, backlog: int, fraction: float, now: float) -> float | None:
        """Bytes per second at which `backlog` bytes are uploaded within `fraction` of the interval.

        None: as fast as possible.
        """
        interval = self.interval
        if interval is None or self.began is None:
            return None
        left = self.began + fraction * interval - now
        return max(backlog, 1) / left if left > _LAST_MOMENT else None
