"""What the control handlers need of a running daemon, gathered in one place."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.config import Settings
from cachefs.daemon.keeping import HotTier
from cachefs.daemon.resolving import Resolver
from cachefs.daemon.tiering import Tiering
from cachefs.flush.commits import Commits
from cachefs.flush.flusher import Flusher
from cachefs.flush.hidden import HiddenSpans
from cachefs.flush.pressure import Restraint
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.model.foresight import Forecast
from cachefs.observe.metrics import Metrics
from cachefs.vfs.contents import Contents
from cachefs.vfs.eviction import Eviction
from cachefs.vfs.files import Files
from cachefs.vfs.namespace import Namespace
from cachefs.vfs.offloading import Offloader
from cachefs.vfs.opened import OpenTable
from cachefs.vfs.spilling import Spiller
from cachefs.vfs.virtual import Inspector


@dataclass(frozen=True, slots=True)
class Lanes:
    """Whether files can take the passthrough lane here, and if not, why."""

    passthrough: bool
    reason: str = ""


async def _no_objection() -> str:
    """Nobody asks."""
    return ""


async def nobody_told(directory: int, names: Sequence[bytes]) -> None:
    """Nobody else remembers names."""


@dataclass(slots=True)
class Services:
    """The parts of one daemon that answer for its state. Used on the trio thread only."""

    settings: Settings
    mountpoint: str
    """Absolute and resolved, as requests name it."""
    meta: Meta
    queue: EffectQueue
    table: OpenTable
    namespace: Namespace
    files: Files
    contents: Contents
    inspector: Inspector
    devices: Sequence[CacheDevice]
    home: CacheDevice
    """The device that the database is on."""
    ledgers: Sequence[SpaceLedger]
    """One per device, in the same order."""
    flusher: Flusher
    resolver: Resolver
    eviction: Eviction
    spiller: Spiller
    hot: HotTier
    offloader: Offloader
    commits: Commits
    hidden: HiddenSpans
    metrics: Metrics
    started_at: float
    """`time.monotonic()` when the daemon started."""
    lanes: Callable[[], Lanes]
    """Known for good once the kernel has answered the first request."""
    takeovers: Callable[[], int]
    """How many daemons have taken this mount over from another so far."""
    degraded: Callable[[], bool]
    """True while the store is out of reach."""
    metrics_address: str | None
    """`host:port` of the metrics endpoint, None without one."""
    sync_meta: Callable[[], Awaitable[None]]
    """Makes every commit so far survive a power cut."""
    requests: Callable[[], dict[str, int]] = dict
    """Kernel requests by name since this daemon started; empty where nobody counts them."""
    can_upgrade: Callable[[], bool] = lambda: True
    """Whether another daemon could go on with the connection."""
    parent: int = field(default_factory=os.getppid)
    """Who started this daemon, and would start another."""
    objection: Callable[[], Awaitable[str]] = _no_objection
    """Why the code that is installed now could not go on with it; empty if it could."""
    pacer_rate: Callable[[], float] = lambda: 0.0
    """Requests per second that the pacer allows now, for the metrics."""
    on_names: Callable[[int, Sequence[bytes]], Awaitable[None]] = nobody_told
    """Awaited with a directory and names in it that lead elsewhere than the kernel thinks."""
    hold: Callable[[int], AbstractContextManager[object]] = nullcontext
    """Around changes of names in a directory that no request of the kernel asks for."""
    forecast: Forecast | None = None
    """What is known of the next checkpoint."""
    tiering: Tiering | None = None
    """The warm tier, if there is one."""
    restraint: Restraint | None = None
    """What holds uploads back, for the metrics."""
