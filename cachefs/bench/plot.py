"""The picture of a run (`bench --plot`): throughput by round, and how long writes took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cachefs.bench.runner import BenchError, Measurement
from cachefs.bench.workload import Workload

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_DOTS_PER_INCH = 120
_POINTS = 400
"""Of a latency curve; calls are many."""


def check() -> None:
    """Raises BenchError at once if there is nothing to draw with, not after an hour of writing."""
    try:
        import matplotlib  # noqa: F401 (only here: it is large, and an extra)
    except ImportError:
        raise BenchError(
            "--plot needs matplotlib, which is not installed",
            hint="pip install 'cachefs[bench]'",
        ) from None


def save(path: Path, workload: Workload, measurements: Sequence[Measurement]) -> None:
    """Write a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rates, latencies = figure.subplots(1, 2)
    labels = [f"{m.directory}\n{m.style.value}" for m in measurements]
    _draw_rates(rates, labels, measurements)
    _draw_latencies(latencies, labels, measurements)
    shards = f"{workload.ranks} ranks x {workload.files} files of {workload.size / _MIB:,.4g} MiB"
    figure.suptitle(f"{shards} in writes of {workload.block / _KIB:,.4g} KiB")
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None


def _draw_rates(axes: Any, labels: Sequence[str], measurements: Sequence[Measurement]) -> None:
    for place, measurement in enumerate(measurements):
        values = [rate / _GIB for rate in measurement.write_rates]
        axes.bar(place, median(values), color=f"C{place}", alpha=0.5)
        axes.plot([place] * len(values), values, "o", color=f"C{place}", markersize=4)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("GiB/s (bar: median, dots: rounds)")
    axes.set_title("Writing")


def _draw_latencies(axes: Any, labels: Sequence[str], measurements: Sequence[Measurement]) -> None:
    for place, measurement in enumerate(measurements):
        ordered = sorted(measurement.timings.write)
        # From 50 % to the slowest call, each nine as wide as the last.
        shares = [1 - 0.5 * 10 ** (-4 * i / _POINTS) for i in range(_POINTS + 1)]
        picked = [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in shares]
        label = labels[place].replace("\n", ", ")
        axes.plot([1 / (1 - s) for s in shares], [t * 1e3 for t in picked], label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([2, 10, 100, 1000, 10_000], ["p50", "p90", "p99", "p99.9", "p99.99"])
    axes.minorticks_off()
    axes.set_ylabel("ms")
    axes.set_title("One write")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
