"""Metrics: every name, unit and meaning in one table, and the Prometheus endpoint.

Counters and histograms are bumped where things happen, through children bound once
(`metrics.counter("cachefs_write_bytes_total", "tracked").inc(n)`, kept by the caller in hot
paths). Gauges are read at scrape time from one `Snapshot`, so nothing has to keep them current.
Each `Metrics` has a registry of its own: two in one process do not meet.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cachefs.errors import MountError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["counter", "histogram", "gauge", "total"]
"""`gauge` and `total` come from the snapshot; a `total` only grows, also across daemons."""

_Kind = TypeVar("_Kind", Counter, Histogram)

_REQUEST_BUCKETS = (
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3,
    0.1, 0.2, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip
_COMMIT_BUCKETS = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 20e-3, 0.1, 0.5, 2.0)
_STORE_BUCKETS = (5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
_LAG_BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)


class Spec(NamedTuple):
    """One row of the table. Units are base units and part of the name."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE: tuple[Spec, ...] = (
    # Data at risk: what the store does not hold yet.
    Spec("cachefs_dirty_bytes", "gauge", "Bytes of closed files that the store lacks."),
    Spec("cachefs_dirty_files", "gauge", "Closed files that the store lacks, in whole or part."),
    Spec("cachefs_oldest_dirty_seconds", "gauge", "Age of the oldest dirty file; 0: none."),
    Spec("cachefs_uploading_bytes", "gauge", "Dirty bytes whose upload has begun."),
    Spec("cachefs_stalled_files", "gauge", "Files the store refuses; kept and retried slowly."),
    Spec(
        "cachefs_effects_pending",
        "gauge",
        "Changes the bucket does not show yet, by order class (data, small, barrier).",
        ("class",),
    ),
    Spec("cachefs_effects_blocked", "gauge", "Changes behind a refused or conflicted one."),
    # The filesystem.
    Spec(
        "cachefs_fuse_request_seconds",
        "histogram",
        "Time that handlers take to answer a kernel request, by operation.",
        ("op",),
        _REQUEST_BUCKETS,
    ),
    Spec(
        "cachefs_fuse_errors_total",
        "counter",
        "Kernel requests answered with an error, by operation and errno name.",
        ("op", "errno"),
    ),
    Spec("cachefs_fuse_bugs_total", "counter", "Requests that hit an error nobody foresaw."),
    Spec(
        "cachefs_write_bytes_total",
        "counter",
        "Bytes written by applications; where no handler sees a write (passthrough, the first bytes"
        " of new files): growth of the file, counted at release.",
        ("lane",),
    ),
    Spec("cachefs_read_bytes_total", "counter", "Bytes that handlers read for applications."),
    Spec(
        "cachefs_db_commit_seconds",
        "histogram",
        "Time of a metadata transaction; mode full: synced to disk for an fsync.",
        ("mode",),
        _COMMIT_BUCKETS,
    ),
    Spec(
        "cachefs_metadata_pending_bytes",
        "gauge",
        "Metadata changes that wait in memory for a disk that does not take them.",
    ),
    Spec("cachefs_metadata_lag_seconds", "gauge", "Since when some do; 0: none does."),
    # Uploads and the store.
    Spec("cachefs_upload_bytes_total", "counter", "Bytes uploaded and confirmed by the store."),
    Spec("cachefs_upload_retries_total", "counter", "Uploads and parts sent again after errors."),
    Spec("cachefs_download_bytes_total", "counter", "Bytes fetched from the store."),
    Spec(
        "cachefs_unkept_bytes_total",
        "counter",
        "Bytes fetched for readers and not kept: the cache had no room for them.",
    ),
    Spec(
        "cachefs_damaged_reads_total",
        "counter",
        "Times that what was fetched had not the checksum that it was stored with.",
    ),
    Spec(
        "cachefs_durable_lag_seconds",
        "histogram",
        "From the close of a file to the store showing it.",
        (),
        _LAG_BUCKETS,
    ),
    Spec(
        "cachefs_store_requests_total",
        "counter",
        "Store requests by operation and outcome (ok, throttled, transient, refused, ...).",
        ("op", "outcome"),
    ),
    Spec(
        "cachefs_store_request_seconds",
        "histogram",
        "Time of a store request, by operation.",
        ("op",),
        _STORE_BUCKETS,
    ),
    Spec("cachefs_throttled_total", "counter", "Times the store asked for fewer requests."),
    Spec("cachefs_pacer_rate", "gauge", "Requests per second the pacer allows now."),
    Spec("cachefs_upload_slots", "gauge", "Uploads that may go on at a time now."),
    Spec(
        "cachefs_bandwidth_limit_bytes",
        "gauge",
        "Bytes per second that uploads may take now (limit, spread); 0: no limit.",
    ),
    Spec(
        "cachefs_pressure_ratio",
        "gauge",
        "Share of the last second in which tasks waited for io or cpu, where flush.pressure looks.",
        ("resource",),
    ),
    Spec(
        "cachefs_listings_refreshed_total",
        "counter",
        "Directories listed again to see what others did, by outcome (ok, failed).",
        ("outcome",),
    ),
    Spec(
        "cachefs_foreign_changes_total",
        "counter",
        "Entries that others changed in the bucket, by kind (appeared, replaced, vanished).",
        ("kind",),
    ),
    # Cache and life.
    Spec("cachefs_cache_used_bytes", "gauge", "Bytes used on a cache device.", ("device",)),
    Spec("cachefs_cache_size_bytes", "gauge", "Bytes a cache device may use.", ("device",)),
    Spec("cachefs_cache_healthy", "gauge", "1 while a cache device works, else 0.", ("device",)),
    Spec(
        "cachefs_overruns_total",
        "counter",
        "Passthrough writers that outgrew what was reserved for them.",
    ),
    Spec("cachefs_waiting_writers", "gauge", "Writers that wait for room in the cache."),
    Spec(
        "cachefs_next_checkpoint_bytes",
        "gauge",
        "Size of the next checkpoint, as the last ones were; 0: there was none yet.",
    ),
    Spec(
        "cachefs_next_checkpoint_room_bytes",
        "gauge",
        "Bytes that can be written now without waiting for uploads; 0 before the first checkpoint.",
    ),
    Spec(
        "cachefs_next_checkpoint_fits",
        "gauge",
        "0 when the next checkpoint will not fit: it is larger than the cache, or what is still to"
        " be uploaded when half of the time until then is over leaves it no room.",
    ),
    Spec("cachefs_evicted_bytes_total", "counter", "Bytes of durable data freed for new data."),
    Spec(
        "cachefs_offloaded_bytes_total",
        "counter",
        "Bytes of files larger than the cache moved to the store while they were written.",
    ),
    Spec("cachefs_spilled_bytes_total", "counter", "Bytes moved from a cache device in RAM."),
    Spec("cachefs_warm_bytes_total", "counter", "Bytes copied to the warm tier."),
    Spec(
        "cachefs_warm_usable", "gauge", "1 while the warm tier takes copies, 0 while it does not."
    ),
    Spec(
        "cachefs_warm_obstructed_files",
        "gauge",
        "Files that wait because something else is in their place in the warm tier, or that"
        " cannot be removed from it.",
    ),
    Spec("cachefs_takeovers_total", "total", "Daemons that took over the mount from another."),
    Spec("cachefs_degraded", "gauge", "1 while the store is out of reach, else 0."),
    Spec("cachefs_uptime_seconds", "gauge", "Age of this daemon."),
)

SPECS: Mapping[str, Spec] = {spec.name: spec for spec in TABLE}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The gauges at one instant; each field is the metric `cachefs_<field>`."""

    dirty_bytes: int = 0
    dirty_files: int = 0
    oldest_dirty_seconds: float = 0.0
    uploading_bytes: int = 0
    stalled_files: int = 0
    effects_pending: Mapping[str, int] = field(default_factory=dict)
    """Order class -> count."""
    effects_blocked: int = 0
    pacer_rate: float = 0.0
    upload_slots: int = 0
    bandwidth_limit_bytes: float = 0.0
    pressure_ratio: Mapping[str, float] = field(default_factory=dict)
    """Resource -> share."""
    cache_used_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device path -> bytes."""
    cache_size_bytes: Mapping[str, int] = field(default_factory=dict)
    cache_healthy: Mapping[str, int] = field(default_factory=dict)
    metadata_pending_bytes: int = 0
    metadata_lag_seconds: float = 0.0
    waiting_writers: int = 0
    next_checkpoint_bytes: int = 0
    next_checkpoint_room_bytes: int = 0
    next_checkpoint_fits: bool = True
    takeovers_total: int = 0
    warm_usable: bool = False
    warm_obstructed_files: int = 0
    degraded: bool = False
    uptime_seconds: float = 0.0


class Metrics:
    """All metrics of one daemon."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # doubles the page for nothing
        self.registry = CollectorRegistry()
        self._counters = {
            spec.name: Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)
            for spec in TABLE
            if spec.kind == "counter"
        }
        self._histograms = {
            spec.name: Histogram(
                spec.name, spec.meaning, spec.labels, registry=self.registry, buckets=spec.buckets
            )
            for spec in TABLE
            if spec.kind == "histogram"
        }
        self._bound_counters: dict[tuple[str, ...], Counter] = {}
        self._bound_histograms: dict[tuple[str, ...], Histogram] = {}
        self._gauges = _Gauges()
        self.registry.register(self._gauges)
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def counter(self, name: str, *labels: str) -> Counter:
        """The child of a counter for these label values, in the table's order.

        Raises KeyError for a name that is no counter of the table.
        """
        return _child(self._counters, self._bound_counters, name, labels)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The child of a histogram (of seconds) for these label values."""
        return _child(self._histograms, self._bound_histograms, name, labels)

    def set_snapshot(self, take: Callable[[], Snapshot]) -> None:
        """`take` is called at every scrape, on the endpoint's thread: it must be safe there."""
        self._gauges.take = take

    def render(self) -> str:
        """The page, as Prometheus text."""
        return generate_latest(self.registry).decode()

    def serve(self, address: tuple[str, int] | None) -> str | None:
        """Start the endpoint on a daemon thread; None: no endpoint.

        Returns `host:port` with the real port. Raises MountError when it cannot listen there.
        """
        if address is None:
            return None
        host, port = address
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except (OSError, OverflowError) as exc:
            reason = getattr(exc, "strerror", None) or str(exc)
            raise MountError(
                f"metrics.listen: cannot listen on {host}:{port}: {reason}",
                hint="choose another address, port 0 for any free one, or `-o metrics.listen=off`",
            ) from None
        self._server = server, thread
        return f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"

    def close(self) -> None:
        """Stop the endpoint, if any."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.socket.shutdown(socket.SHUT_RDWR)  # or its thread looks up after half a second
            server.shutdown()
            server.server_close()
            thread.join()


def _child(
    parents: Mapping[str, _Kind],
    bound: dict[tuple[str, ...], _Kind],
    name: str,
    labels: tuple[str, ...],
) -> _Kind:
    key = (name, *labels)
    child = bound.get(key)
    if child is None:
        parent = parents[name]
        child = bound[key] = parent.labels(*labels) if labels else parent
    return child


class _Gauges(Collector):
    """Turns a snapshot into samples. A snapshot that fails costs the gauges, not the page."""

    def __init__(self) -> None:
        self.take: Callable[[], Snapshot] = Snapshot

    def describe(self) -> Iterator[Metric]:
        """Names without values, so that registering takes no snapshot."""
        return (_family(spec) for spec in TABLE if spec.kind in ("gauge", "total"))

    def collect(self) -> Iterator[Metric]:
        try:
            snapshot = self.take()
        except Exception:
            log.exception("no snapshot for the metrics")
            return
        for spec in TABLE:
            if spec.kind in ("gauge", "total"):
                yield _filled(spec, getattr(snapshot, spec.name.removeprefix("cachefs_")))


def _family(spec: Spec) -> GaugeMetricFamily | CounterMetricFamily:
    family = CounterMetricFamily if spec.kind == "total" else GaugeMetricFamily
    return family(spec.name, spec.meaning, labels=spec.labels)


def _filled(spec: Spec, value: float | Mapping[str, float]) -> Metric:
    family = _family(spec)
    values = value if isinstance(value, Mapping) else {None: value}
    for label, number in values.items():
        family.add_metric([] if label is None else [label], number)
    return family
