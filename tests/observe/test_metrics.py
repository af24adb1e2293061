"""The table of metrics, and the endpoint."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import cachefs
from cachefs.errors import MountError
from cachefs.observe.metrics import SPECS, TABLE, Metrics, Snapshot, Spec


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    metrics = Metrics()
    yield metrics
    metrics.close()


def _samples(text: str) -> dict[str, float]:
    """`name{label=value}` -> value."""
    return {
        sample.name
        + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


# ---- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)
def test_names_follow_the_conventions(spec: Spec) -> None:
    assert re.fullmatch(r"cachefs_[a-z_]+", spec.name)
    assert spec.name.endswith("_total") == (spec.kind in ("counter", "total"))
    assert spec.meaning.endswith(".")
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))
    if spec.kind == "histogram":
        assert spec.name.endswith("_seconds")


def test_names_are_unique() -> None:
    assert len(SPECS) == len(TABLE)


def test_the_snapshot_has_a_field_for_every_gauge_and_no_other() -> None:
    wanted = {spec.name for spec in TABLE if spec.kind in ("gauge", "total")}
    assert {f"cachefs_{field.name}" for field in fields(Snapshot)} == wanted


def test_something_moves_every_counter_and_histogram() -> None:
    """The gauges come from the snapshot; all else must be asked for somewhere in the product."""
    package = Path(cachefs.__file__).parent
    files = [path for path in package.rglob("*.py") if path.name != "metrics.py"]
    code = "".join(path.read_text() for path in files)
    moved = {spec.name for spec in TABLE if spec.kind in ("counter", "histogram")}
    assert {name for name in moved if f'"{name}"' not in code} == set()


def test_every_metric_is_on_the_page_from_the_start(metrics: Metrics) -> None:
    page = metrics.render()
    for spec in TABLE:
        assert f"# HELP {spec.name} {spec.meaning}\n" in page


# ---- values ------------------------------------------------------------------------------------


def test_counters_and_histograms(metrics: Metrics) -> None:
    metrics.counter("cachefs_write_bytes_total", "tracked").inc(5)
    metrics.counter("cachefs_write_bytes_total", "tracked").inc(2)
    metrics.counter("cachefs_store_requests_total", "put", "ok").inc()
    metrics.counter("cachefs_throttled_total").inc()
    metrics.histogram("cachefs_fuse_request_seconds", "write").observe(3e-4)
    metrics.histogram("cachefs_durable_lag_seconds").observe(2)
    found = _samples(metrics.render())
    assert found["cachefs_write_bytes_total{lane=tracked}"] == 7
    assert found["cachefs_store_requests_total{op=put}{outcome=ok}"] == 1
    assert found["cachefs_throttled_total"] == 1
    assert found["cachefs_fuse_request_seconds_count{op=write}"] == 1
    assert found["cachefs_fuse_request_seconds_bucket{le=0.0005}{op=write}"] == 1
    assert found["cachefs_durable_lag_seconds_sum"] == 2


def test_children_are_bound_once(metrics: Metrics) -> None:
    first = metrics.counter("cachefs_fuse_errors_total", "open", "ENOENT")
    assert metrics.counter("cachefs_fuse_errors_total", "open", "ENOENT") is first


def test_a_name_outside_the_table_is_refused(metrics: Metrics) -> None:
    with pytest.raises(KeyError):
        metrics.counter("cachefs_surprises_total")
    with pytest.raises(KeyError):
        metrics.counter("cachefs_dirty_bytes")
    with pytest.raises(ValueError, match="label"):
        metrics.counter("cachefs_write_bytes_total", "tracked", "more")


def test_gauges_are_taken_at_every_scrape(metrics: Metrics) -> None:
    snapshots = iter(
        [
            Snapshot(dirty_bytes=10, effects_pending={"data": 2, "barrier": 1}),
            Snapshot(takeovers_total=3, degraded=True, cache_used_bytes={'/a"b': 7}),
        ]
    )
    metrics.set_snapshot(lambda: next(snapshots))
    first, second = _samples(metrics.render()), _samples(metrics.render())
    assert first["cachefs_dirty_bytes"] == 10
    assert first["cachefs_effects_pending{class=barrier}"] == 1
    assert first["cachefs_degraded"] == 0
    assert second["cachefs_dirty_bytes"] == 0
    assert second["cachefs_takeovers_total"] == 3
    assert second["cachefs_degraded"] == 1
    assert second['cachefs_cache_used_bytes{device=/a"b}'] == 7


def test_a_snapshot_that_fails_costs_only_the_gauges(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Snapshot:
        raise RuntimeError("database closed")

    metrics.set_snapshot(fail)
    found = _samples(metrics.render())
    assert "cachefs_dirty_bytes" not in found
    assert found["cachefs_throttled_total"] == 0
    assert "no snapshot" in caplog.text


def test_two_in_one_process_do_not_meet(metrics: Metrics) -> None:
    other = Metrics()
    other.counter("cachefs_throttled_total").inc()
    assert _samples(metrics.render())["cachefs_throttled_total"] == 0


def test_bumping_from_many_threads_loses_nothing(metrics: Metrics) -> None:
    def bump() -> None:
        for _ in range(2000):
            metrics.counter("cachefs_upload_bytes_total").inc(3)

    threads = [threading.Thread(target=bump) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _samples(metrics.render())["cachefs_upload_bytes_total"] == 24_000


# ---- the endpoint ------------------------------------------------------------------------------


def test_a_free_port_is_taken_and_told(metrics: Metrics) -> None:
    address = metrics.serve(("127.0.0.1", 0))
    assert address is not None
    assert not address.endswith(":0")
    metrics.counter("cachefs_throttled_total").inc()
    assert _samples(_get(address))["cachefs_throttled_total"] == 1


def test_off(metrics: Metrics) -> None:
    assert metrics.serve(None) is None


def test_a_closed_endpoint_frees_its_port(metrics: Metrics) -> None:
    address = metrics.serve(("127.0.0.1", 0))
    assert address is not None
    _get(address)
    metrics.close()
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        _get(address)
    assert metrics.serve(("127.0.0.1", int(address.rpartition(":")[2]))) == address


def test_an_address_in_use_is_a_clear_error(metrics: Metrics) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MountError, match=f"127.0.0.1:{port}: Address already in use") as caught:
            metrics.serve(("127.0.0.1", port))
    assert "metrics.listen" in str(caught.value)
    assert "port 0" in caught.value.hint


def test_a_host_that_is_none_is_a_clear_error(metrics: Metrics) -> None:
    with pytest.raises(MountError, match=r"metrics\.listen: cannot listen on"):
        metrics.serve(("host.invalid", 0))
