"""Several nodes save under one prefix of a store that takes only so many requests a second."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.faults import slow_down
from tests.support.mounts import Mount, MountFactory

pytestmark = pytest.mark.either_lane

NODES = 4
BUDGET = 100.0
"""Requests per second."""


def _save(folder: str, node: int, count: int) -> None:
    for number in range(count):
        with open(f"{folder}/node{node}-{number:04d}.distcp", "wb") as out:
            out.write(os.urandom(2048))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("files", [500, pytest.param(1000, marks=pytest.mark.soak)])
def test_four_nodes_share_a_small_budget(
    mounted: MountFactory, bucket: Any, faults: Any, client: Client, files: int
) -> None:
    """2,000 small objects: the budget is used, few requests are refused, nobody starves."""
    hold = {"flush.settle": "1min", "flush.settle_max": "1min"}
    mounts = [mounted(bucket, endpoint=faults.endpoint, options=hold) for _ in range(NODES)]
    folder = mounts[0].path / "step-1"
    folder.mkdir()
    mounts[0].wait()
    for node, mount in enumerate(mounts):
        client.run(_save, mount.path / "step-1", node, files)
    faults.set(slow_down(BUDGET))
    faults.forget()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda mount: mount.wait(timeout=120), mounts))
    assert len(bucket.keys()) == NODES * files
    judge(faults.log(), mounts)


def judge(log: list[dict[str, Any]], mounts: list[Mount]) -> None:
    """Use of the budget, share of refusals, and fairness while all had something to send."""
    refused = sum(entry["status"] == 503 for entry in log)
    served = [entry for entry in log if entry["status"] == 200]
    seconds = served[-1]["time"] - log[0]["time"]
    use = len(served) / (BUDGET * seconds)
    done: dict[str, list[float]] = {}
    for entry in served:
        if entry["op"] == "put" and ".cachefs/" not in entry["key"]:
            node = entry["key"].rpartition("/")[2].split("-")[0]
            done.setdefault(node, []).append(entry["time"])
    first = min(times[-1] for times in done.values())
    contended = [sum(time <= first for time in times) for times in done.values()]
    fair = sum(contended) / len(mounts)
    least = min(contended) / fair
    share = refused / len(log)
    print(
        f"use {use:.1%}, refused {share:.1%}, least {least:.2f} of the fair share, {seconds:.1f} s"
    )
    assert use >= 0.85
    assert share <= 0.08
    assert len(contended) == len(mounts)
    assert least >= 0.5
