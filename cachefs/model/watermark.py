"""Watermarks: when a filling cache evicts, how much, and who may write unthrottled. In bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Fill levels of a cache of ``size`` bytes; ``high`` and ``low`` are fractions of it."""

    size: int
    high: float = 0.9
    low: float = 0.8

    def __post_init__(self) -> None:
        if self.size < 0 or not 0 < self.low < self.high <= 1:
            raise ValueError(f"watermarks must satisfy 0 < low < high <= 1: {self}")

    @property
    def high_bytes(self) -> int:
        """Above this, eviction begins."""
        return int(self.size * self.high)

    @property
    def low_bytes(self) -> int:
        """At this, eviction ends."""
        return int(self.size * self.low)

    def excess(self, used: int, *, evicting: bool = False) -> int:
        """Return how much to evict now: down to the low mark, once the high one was crossed.

        ``evicting``: an eviction is under way and goes on to its end.
        """
        if evicting or used > self.high_bytes:
            return max(0, used - self.low_bytes)
        return 0

    def room(self, used: int, reserved: int = 0) -> int:
        """Return how many bytes may still be written, those reserved for others not counted."""
        return max(0, self.size - used - reserved)


def passthrough_need(size: int, headroom: float, largest_seen: int) -> int:
    """Return how much room a writer that cannot be throttled must reserve.

    ``size`` of the cache, ``headroom`` as a fraction of it, ``largest_seen``: the largest file
    seen in the same directory, of which the new one may well be twice the size.
    """
    return max(int(size * headroom), 2 * largest_seen)
