"""Counters of the metrics, for those who do what is counted."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from cachefs.observe.metrics import Metrics
from cachefs.vfs.opened import Lane

log = structlog.get_logger("cachefs.daemon")


def damage_reporter(metrics: Metrics) -> Callable[[str], None]:
    """For each object that was damaged: its key."""
    damaged = metrics.counter("cachefs_damaged_reads_total")

    def report(key: str) -> None:
        damaged.inc()
        log.error("what was read has not the checksum that it was stored with", key=key)

    return report


def write_observer(metrics: Metrics) -> Callable[[Lane, int], None]:
    """For what programs wrote: lane and bytes."""
    counters = {lane: metrics.counter("cachefs_write_bytes_total", lane) for lane in Lane}

    def written(lane: Lane, nbytes: int) -> None:
        counters[lane].inc(nbytes)

    return written


def store_observer(metrics: Metrics) -> Callable[[str, str, float, int], None]:
    """For each request to the store: method, outcome, seconds and bytes sent."""
    uploaded = metrics.counter("cachefs_upload_bytes_total")
    throttled = metrics.counter("cachefs_throttled_total")

    def observe(op: str, outcome: str, seconds: float, sent: int) -> None:
        metrics.counter("cachefs_store_requests_total", op, outcome).inc()
        metrics.histogram("cachefs_store_request_seconds", op).observe(seconds)
        if sent:
            uploaded.inc(sent)
        if outcome == "throttled":
            throttled.inc()

    return observe
