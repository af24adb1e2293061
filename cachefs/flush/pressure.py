"""Kind to training: holds uploads back under pressure, by the time of day, and until there is time.

Once a second, what the models make of the kernel's pressure files, of the clock and of the times at
which files were closed is passed on to the pacing. Nothing here delays anything by itself, and
whatever cannot be found out counts as no reason to hold back: the only copy of a checkpoint must
not stay on this machine for the lack of a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
import trio

from cachefs.model.bandwidth import BandwidthPlan
from cachefs.model.pressure import Valve, stalled_seconds
from cachefs.model.spread import Bursts

log = structlog.get_logger("cachefs.flush")

INTERVAL = 1.0
"""Seconds between two decisions."""
PRESSURE_FILES = Path("/proc/pressure")


class Restrainable(Protocol):
    """What is told the decisions: `pacing.Pacing`."""

    def restrain(self, slots: int, bandwidth: float | None) -> None:
        """At most so many uploads at a time, and so many bytes per second (None: any)."""


@dataclass(frozen=True, slots=True)
class Kindness:
    """What was configured."""

    concurrency: int
    """Uploads at a time when nothing speaks against it."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """`io`, `cpu` -> share of the time in which some task waits for it, above which is pressure."""
    bandwidth: BandwidthPlan = field(default_factory=BandwidthPlan)
    spread: float = 0.0
    """Part of the time between two checkpoints; 0: no spreading."""
    significant: int = 1 << 20
    """Bytes from which on a closed file tells of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Haste:
    """What is more important than training at this moment."""

    leaving: bool = False
    """The mount drains, or its cache is full: hold nothing back but what the plan of bandwidth
    says, which is there for others on the network."""
    awaited: bool = False
    """Somebody waits for uploads: do not spread them."""


class Pressure:
    """Share of the time in which some task of the machine waits for a resource."""

    def __init__(self, resource: str, folder: Path = PRESSURE_FILES) -> None:
        """Raises OSError or ValueError when the kernel does not tell."""
        self.resource = resource
        self._path = folder / resource
        self._stalled = self._read()
        self._read_at: float | None = None
        self.share = 0.0

    def _read(self) -> float:
        return stalled_seconds(self._path.read_text())

    def measure(self, now: float) -> float:
        """The share since the last call, 0.0 at the first; it stays when it cannot be read."""
        try:
            stalled = self._read()
        except (OSError, ValueError):
            return self.share
        if self._read_at is not None and now > self._read_at:
            self.share = min(1.0, max(0.0, (stalled - self._stalled) / (now - self._read_at)))
        self._stalled, self._read_at = stalled, now
        return self.share


class Restraint:
    """Decides how many uploads may go on, and how fast. `run` it as one task."""

    def __init__(
        self,
        kindness: Kindness,
        pacing: Restrainable,
        *,
        backlog: Callable[[], int] = lambda: 0,
        haste: Callable[[], Haste] = Haste,
        minute: Callable[[], int] | None = None,
        folder: Path = PRESSURE_FILES,
    ) -> None:
        """`backlog`: bytes that the store lacks; `minute`: of the day, local time."""
        self._kindness = kindness
        self._pacing = pacing
        self._backlog = backlog
        self._haste = haste
        self._minute = minute or _local_minute
        self._valve = Valve(kindness.concurrency)
        self._bursts = Bursts()
        self._pressures = _open(kindness.thresholds, folder)
        self.slots = kindness.concurrency
        """Uploads that may go on at a time."""
        self.bandwidth: float | None = kindness.bandwidth.rate_at(self._minute())
        """Bytes per second that they may take; None: no limit."""

    @property
    def pressures(self) -> dict[str, float]:
        """Resource -> share of the last interval in which some task waited for it."""
        return {each.resource: each.share for each in self._pressures}

    def sealed(self, size: int) -> None:
        """A file of `size` bytes was closed. On the trio thread."""
        now = trio.current_time()
        if size >= self._kindness.significant and self._bursts.sealed(now):
            self._pass_on(now, self._haste())  # A second is long for what is sent at full speed.

    async def run(self) -> None:
        """Decide once, and again for as long as things may change."""
        kindness = self._kindness
        changes = self._pressures or kindness.spread or not kindness.bandwidth.is_constant
        self.decide(trio.current_time())
        while changes:
            await trio.sleep(INTERVAL)
            self.decide(trio.current_time())

    def decide(self, now: float) -> None:
        """Look at everything and pass it on."""
        haste, load = self._haste(), self._load(now)
        self.slots = self._valve.open() if haste.leaving else self._valve.update(load)
        self._pass_on(now, haste)

    def _pass_on(self, now: float, haste: Haste) -> None:
        planned = self._kindness.bandwidth.rate_at(self._minute())
        spread = None if haste.leaving or haste.awaited else self._spread(now)
        limits = [limit for limit in (planned, spread) if limit is not None]
        self.bandwidth = min(limits, default=None)
        self._pacing.restrain(self.slots, self.bandwidth)

    def _load(self, now: float) -> float:
        thresholds = self._kindness.thresholds
        loads = [each.measure(now) / thresholds[each.resource] for each in self._pressures]
        return max(loads, default=0.0)

    def _spread(self, now: float) -> float | None:
        if not self._kindness.spread or self._bursts.interval is None:
            return None
        return self._bursts.rate(self._backlog(), self._kindness.spread, now)


def _open(thresholds: Mapping[str, float], folder: Path) -> list[Pressure]:
    """The pressure files that can be read. Where one cannot, say so once and go on without."""
    found = []
    for resource in thresholds:
        try:
            found.append(Pressure(resource, folder))
        except (OSError, ValueError) as error:
            log.warning(
                "flush.pressure has no effect: the kernel does not tell",
                resource=resource,
                reason=str(error),
            )
    return found


def _local_minute() -> int:
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min
