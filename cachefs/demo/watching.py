"""The metrics worth watching, read from a real endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

WATCH: dict[str, tuple[str, str]] = {
    "cachefs_dirty_bytes": ("", "lost with this machine now; alert when it only grows"),
    "cachefs_oldest_dirty_seconds": ("", "how far the store is behind; alert by your needs"),
    "cachefs_stalled_files": ("", "refused by the store, kept here; alert above 0"),
    "cachefs_effects_blocked": ("", "changes behind a refused one; alert above 0"),
    "cachefs_write_bytes_total": ("lane", "what programs wrote"),
    "cachefs_upload_bytes_total": ("", "its rate is the speed of the upload"),
    "cachefs_store_requests_total": ("outcome", "what the store objects to, if not ok"),
    "cachefs_throttled_total": ("", "the store asked for fewer requests"),
    "cachefs_cache_used_bytes": ("", "near cachefs_cache_size_bytes writers must wait"),
    "cachefs_takeovers_total": ("", "daemons that were replaced; the log says why"),
}
"""Metric -> the one label that is shown (values are summed over all others), why to look at it."""


def worth_watching(page: str) -> Iterator[tuple[str, str, str]]:
    """Rows of name, value and why, in the order of `WATCH`, from a Prometheus text page."""
    samples = _samples(page)
    for name, (label, why) in WATCH.items():
        sums: dict[str, float] = {}
        for sample in samples:
            if sample.name == name:
                shown = f"{name}{{{label}={sample.labels[label]}}}" if label else name
                sums[shown] = sums.get(shown, 0) + sample.value
        yield from ((shown, _number(value), why) for shown, value in sums.items())


def _samples(page: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
