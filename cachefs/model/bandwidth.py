"""A limit on bytes per second that may depend on the time of day.

Times are minutes since midnight, as the caller's clock and time zone have them.
"""

from __future__ import annotations

from dataclasses import dataclass

DAY = 24 * 60


@dataclass(frozen=True, slots=True)
class Window:
    """From minute `start` up to `end` of every day, past midnight if `end` comes first."""

    start: int
    end: int
    rate: int | None
    """Bytes per second; None: no limit."""

    def covers(self, minute: int) -> bool:
        """Whether a minute of the day lies within."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def meets(self, other: Window) -> bool:
        """Whether the two have a minute in common."""
        return self.covers(other.start) or other.covers(self.start)

    def __str__(self) -> str:
        return f"{_clock(self.start)}-{_clock(self.end)}={_rate(self.rate)}"


@dataclass(frozen=True, slots=True)
class BandwidthPlan:
    """Windows that do not meet, and what holds at all other times."""

    windows: tuple[Window, ...] = ()
    otherwise: int | None = None

    @property
    def is_constant(self) -> bool:
        """True when the time of day makes no difference."""
        return not self.windows

    def rate_at(self, minute: int) -> int | None:
        """Bytes per second allowed at a minute of the day; None: no limit."""
        for window in self.windows:
            if window.covers(minute):
                return window.rate
        return self.otherwise

    def __str__(self) -> str:
        """As it is written in the configuration."""
        if self.is_constant:
            return _rate(self.otherwise)
        return ",".join([*map(str, self.windows), f"otherwise={_rate(self.otherwise)}"])


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def _rate(rate: int | None) -> str:
    return "off" if rate is None else str(rate)
