"""Hands snapshots of the gauges from the trio thread to the metrics endpoint's thread."""

from __future__ import annotations

import threading
import time

import structlog
import trio

from cachefs.daemon import census
from cachefs.daemon.services import Services
from cachefs.daemon.trouble import Troubles
from cachefs.observe.metrics import Snapshot

log = structlog.get_logger("cachefs.daemon")

INTERVAL = 1.0
"""Seconds between two snapshots nobody asked for."""
PATIENCE = 0.5
"""Seconds for which a scrape waits for a fresh one before it takes the last."""
_DUTY = 50.0


class _Snapshots:
    """`latest` is replaced as a whole, so that any thread may read it."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._troubles = Troubles(services.meta, services.queue)
        self._token = trio.lowlevel.current_trio_token()
        self.latest = Snapshot()

    def refresh(self) -> float:
        """Take one; returns how many seconds that took. On the trio thread.

        A failure is logged and leaves the last one: numbers must never cost the mount.
        """
        began = time.monotonic()
        try:
            self.latest = census.snapshot(self._services, self._troubles)
        except Exception:
            log.exception("no snapshot for the metrics")
        return time.monotonic() - began

    def take(self) -> Snapshot:
        """A fresh snapshot, or the last one while the trio thread is busy. Any other thread."""
        done = threading.Event()

        def answer() -> None:
            self.refresh()
            done.set()

        try:
            self._token.run_sync_soon(answer)
        except trio.RunFinishedError:
            return self.latest
        done.wait(PATIENCE)
        return self.latest


async def refresh_snapshot(services: Services) -> None:
    """Feed the metrics with snapshots; never returns."""
    snapshots = _Snapshots(services)
    services.metrics.set_snapshot(snapshots.take)
    while True:
        cost = snapshots.refresh()
        await trio.sleep(max(INTERVAL, _DUTY * cost))
