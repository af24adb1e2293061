"""What the numbers mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PERCENTILES = (50.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Latency:
    """How long one kind of call took, in seconds."""

    count: int
    p50: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """None when there were no calls."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        p50, p99, p999 = (percentile(ordered, share) for share in PERCENTILES)
        return cls(len(ordered), p50, p99, p999, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` percent of the values do not exceed (nearest rank)."""
    rank = math.ceil(round(share * len(ordered) / 100, 6))  # 99.9 % of 1,000 is 999, not a bit more
    return ordered[max(rank, 1) - 1]


def ratio_of_medians(subject: Sequence[float], against: Sequence[float]) -> float:
    """How the subject's median compares; above 1 it is larger."""
    return median(subject) / median(against)
