"""Training does not feel a flush; the figures are printed (`pytest -m bench -s`)."""

from __future__ import annotations

import json

import pytest

from tests.bench import kindness
from tests.support import lanes

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]


def test_writes_during_a_flush() -> None:
    """The 99th percentile of local writes stays within 1.5 times the quiet one."""
    told = kindness.summary(list(kindness.run(1.0, 3, lanes.to_test())))
    print(json.dumps(told, indent=2))
    ratios = {name: figures["ratio"] for name, figures in told["writes"].items()}
    assert {name: ratio for name, ratio in ratios.items() if ratio > 1.5} == {}
