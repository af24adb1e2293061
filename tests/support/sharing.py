"""How the tests are shared out to several processes: what stays together, and what comes first.

xdist's own `--dist loadgroup` writes the group of a test into its node id, which pytest 9.2 does
not take any more: every test went anywhere, and each process made each mount that the tests of a
module share. Here the group is read from the node id.
"""

from __future__ import annotations

import re

import pytest
from xdist.scheduler import LoadScopeScheduling

APART = ("tests/cuts/", "tests/e2e/", "tests/lifecycle/")
"""Tests that share nothing: each has mounts of its own."""
LONG = {
    "tests/crash/test_kills.py": 45,
    "tests/tap/test_takeover.py": 45,
    "tests/e2e/test_larger_than_cache.py::test_a_log_that_is_open": 30,
    "tests/e2e/test_kindness.py::test_an_upload_is_spread": 30,
    "tests/e2e/test_shared_budget.py": 30,
    "tests/tap/test_model.py": 30,
    "tests/cuts/test_power_cuts.py::test_power_cuts_of_a_file": 25,
    "tests/lanes/test_kills.py": 25,
    "tests/lanes/test_small_kills.py": 25,
    "tests/store/test_contract_listing.py": 20,
    "tests/lanes/test_inflight.py": 20,
    "tests/store/test_seaweedfs.py": 20,
    "tests/e2e/test_slow_store.py::test_saving_never": 15,
    "tests/lanes/test_generations.py": 15,
    "tests/posix/test_names.py": 15,
    "tests/store/test_contract": 15,
}
"""Seconds of the groups that take longest, by the beginning of their tests' node ids."""
_LANE = re.compile(r"[\[-](tracked|passthrough)[]-]")


class Sharing(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process one group after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """What a test stays with: those of its module that use the same lane."""
    if nodeid.startswith(APART):
        return nodeid
    lane = _LANE.search(nodeid)
    return f"{nodeid.partition('::')[0]} {lane[1] if lane else ''}"


def longest_first(items: list[pytest.Item]) -> None:
    """Then come other groups, and in the end single tests, so that all processes end together."""
    slow = {group(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> float:
        known = next((LONG[name] for name in LONG if item.nodeid.startswith(name)), 0)
        alone = item.nodeid.startswith(APART)
        return -max(known, 10 if group(item.nodeid) in slow else 0 if alone else 5)

    items.sort(key=rank)
