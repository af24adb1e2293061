"""Metadata and flushing against rclone, JuiceFS and s5cmd, with what is promised.

Smaller than the commands `python -m tests.bench.metadata` and `python -m tests.bench.flushing`
measure by themselves; the figures are printed (`pytest -m bench -s`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from tests.bench import flushing, metadata

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

MIB = 1 << 20


def _behind(ratios: dict[str, float], names: Iterable[str]) -> list[str]:
    """The measures in which another program took less time."""
    found = {name: ratio for name, ratio in ratios.items() if name.split("_")[0] in names}
    assert found
    return [f"{name}: {ratio:.2f}" for name, ratio in found.items() if ratio < 1]


def test_metadata() -> None:
    """Creating, stat and listing are ahead of both mounts."""
    turns = list(metadata.run(rounds=3, files=5_000, entries=20_000, tools=list(metadata.TOOLS)))
    told = metadata.summary(turns)
    print(metadata.table(told["microseconds"]), json.dumps(told), sep="\n")
    assert _behind(told["ratios"], ("create", "stat", "list")) == []


def test_flushing() -> None:
    """Faster than both copiers for half of rclone's CPU time, in bounded memory."""
    turns = list(flushing.run(1.0, 3, {}, flushing.TOOLS))
    told = flushing.summary(turns, 1.0)
    print(json.dumps(told))
    assert told["ratios"]["mib_per_second_by_rclone"] >= 1.2
    assert told["ratios"]["mib_per_second_by_s5cmd"] >= 1.0
    assert told["ratios"]["cpu_seconds_per_gib_by_rclone"] <= 0.5
    assert max(turn.daemon_peak_bytes for turn in turns) < 400 * MIB
