"""The result of a run as a document of stable keys (`bench --json`).

All rates are bytes per second, all times seconds. Keys are only ever added; `version` changes if
one of them changes its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from cachefs.bench.runner import Measurement
from cachefs.bench.stats import Latency, ratio_of_medians
from cachefs.bench.workload import OPERATIONS, Style, Workload

VERSION = 1


def document(
    workload: Workload, rounds: int, measurements: Sequence[Measurement], against: str | None
) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "version": VERSION,
        "workload": {**asdict(workload), "rounds": rounds, "bytes": workload.total},
        "results": [_result(each, workload, against) for each in measurements],
        "ratios": ratios(measurements, against),
    }


def _result(measurement: Measurement, workload: Workload, against: str | None) -> dict[str, Any]:
    return {
        "directory": measurement.directory,
        "role": "against" if measurement.directory == against else "subject",
        "style": measurement.style.value,
        "write": _rates(measurement.write_rates),
        "read": _rates(measurement.read_rates),
        "latency": {name: _latency(getattr(measurement.timings, name)) for name in OPERATIONS},
        "verified": not measurement.bad if workload.verify else None,
        "damaged_files": sorted(set(measurement.bad)),
    }


def _rates(rates: Sequence[float]) -> dict[str, Any] | None:
    if not rates:
        return None
    return {"median": median(rates), "min": min(rates), "max": max(rates), "rounds": list(rates)}


def _latency(seconds: Sequence[float]) -> dict[str, float] | None:
    latency = Latency.of(seconds)
    return None if latency is None else asdict(latency)


def ratios(measurements: Sequence[Measurement], against: str | None) -> dict[str, Any]:
    """For each style: the directory's median rates by those of the directory it is held against."""
    found: dict[str, Any] = {}
    for style in Style:
        mine = [m for m in measurements if m.style is style and m.directory != against]
        other = [m for m in measurements if m.style is style and m.directory == against]
        if mine and other:
            found[style.value] = {
                "write": ratio_of_medians(mine[0].write_rates, other[0].write_rates),
                "read": _read_ratio(mine[0], other[0]),
            }
    return found


def _read_ratio(mine: Measurement, other: Measurement) -> float | None:
    if not mine.read_rates or not other.read_rates:
        return None
    return ratio_of_medians(mine.read_rates, other.read_rates)
