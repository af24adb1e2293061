"""A database of one cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.meta import Meta


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[Meta]:
    meta = Meta(tmp_path / "db")
    yield meta
    meta.close()
