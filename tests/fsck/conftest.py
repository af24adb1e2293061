"""A sound cache to be spoiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fsck.cache import Cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """See `Cache`."""
    return Cache(tmp_path / "cache")
