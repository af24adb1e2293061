"""The picture of a simulation: time, refusals and fairness by the number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from cachefs.bench.crowd.outcome import POLICIES, Outcome, Scene

_DOTS_PER_INCH = 120
_LABELS = {
    "cachefs": "cachefs",
    "standard": "boto3, retry mode standard",
    "adaptive": "boto3, retry mode adaptive",
}
_PANELS = (
    ("Until the last node is done", "drain_seconds", "seconds"),
    ("Requests refused (503)", "refused_share", "share of all requests"),
    ("Fairness at half time", "jain", "Jain's index"),
)


def save(path: Path, scene: Scene, outcomes: Sequence[Outcome]) -> None:
    """Write a PNG. Raises ImportError without matplotlib, and OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (title, field, label) in zip(panels, _PANELS, strict=True):
        _draw(axes, outcomes, field)
        axes.set_title(title)
        axes.set_ylabel(label)
    _draw_ideal(panels[0], scene, outcomes)
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)
    figure.suptitle(
        f"Nodes that save {scene.calls} parts each at the same second; "
        f"the store serves {scene.budget:g} requests/s"
    )
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")


def _draw(axes: Any, outcomes: Sequence[Outcome], field: str) -> None:
    for place, policy in enumerate(POLICIES):
        points = [(o.nodes, getattr(o, field)) for o in outcomes if o.policy == policy]
        known = [(nodes, value) for nodes, value in points if isfinite(value)]
        axes.plot(*zip(*known, strict=True), "o-", color=f"C{place}", label=_LABELS[policy])
        never = [nodes for nodes, value in points if not isfinite(value)]
        axes.plot(never, [axes.get_ylim()[1]] * len(never), "x", color=f"C{place}")
    axes.set_xscale("log")
    axes.set_xlabel("nodes")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_ideal(axes: Any, scene: Scene, outcomes: Sequence[Outcome]) -> None:
    """What the store's budget alone allows."""
    counts = sorted({outcome.nodes for outcome in outcomes})
    ideal = [scene.ideal(nodes, scene.calls) for nodes in counts]
    axes.plot(counts, ideal, "--", color="gray", label="the store's budget")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
