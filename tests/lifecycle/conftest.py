"""A place to mount in, and a guarantee that nothing mounted or started there is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.lab import Lab
from tests.support import scratch

TIMEOUT = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A time limit for every test of this directory, and root for those that mount."""
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))
        if "lab" in getattr(item, "fixturenames", ()) and not os.access("/dev/fuse", os.W_OK):
            item.add_marker(pytest.mark.skip(reason="needs /dev/fuse (run as root)"))


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A mountpoint, a cache directory and a way to start supervisors of toy daemons."""
    root = scratch.make("/var/tmp", "lab")
    made = Lab(root)
    try:
        yield made
    finally:
        made.close()
        scratch.remove(root)
