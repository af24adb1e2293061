"""How long a request that failed waits before it is made again."""

from __future__ import annotations

from cachefs.errors import Throttled, Transient
from cachefs.flush.client import MAX_DELAY, MAX_THROTTLED_DELAY, delay


def longest(attempt: int, error: Throttled | Transient) -> float:
    return max(delay(attempt, error) for _ in range(300))


def test_waits_grow_up_to_a_bound() -> None:
    error = Transient("500")
    assert longest(0, error) <= 0.1
    assert 0.4 < longest(3, error) <= 0.8
    assert 15 < longest(100, error) <= MAX_DELAY


def test_who_was_throttled_leaves_the_rest_to_the_pacer() -> None:
    assert longest(100, Throttled("slow down")) <= MAX_THROTTLED_DELAY
    asked = delay(100, Throttled("slow down", retry_after=20.0))
    assert 20 <= asked <= 20 + MAX_THROTTLED_DELAY
