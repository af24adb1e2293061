"""Survival levels and watermarks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.model.survival import Level, of_files, of_placements
from cachefs.model.watermark import Watermarks, passthrough_need


def test_levels_are_ordered_and_parse_what_they_print() -> None:
    names = ["none", "process", "reboot", "instance", "site"]
    assert [str(level) for level in sorted(Level)] == names
    for level in Level:
        assert Level.parse(f" {str(level).title()} ") is level


def test_an_unknown_level_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="none, process, reboot, instance, site"):
        Level.parse("forever")


def test_best_copy_and_worst_file() -> None:
    assert of_placements([Level.PROCESS, Level.SITE]) is Level.SITE
    assert of_placements([]) is Level.NONE
    assert of_files([Level.PROCESS, Level.SITE]) is Level.PROCESS
    assert of_files([]) is Level.SITE


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.booleans())
def test_eviction_goes_from_the_high_mark_to_the_low(size: int, used: int, under_way: bool) -> None:
    marks = Watermarks(size)
    excess = marks.excess(used, evicting=under_way)
    assert 0 <= excess <= used
    if excess:
        assert used - excess == marks.low_bytes
        assert under_way or used > marks.high_bytes
    else:
        assert used <= (marks.low_bytes if under_way else marks.high_bytes)


def test_room() -> None:
    marks = Watermarks(100)
    assert marks.room(30) == 70
    assert marks.room(30, reserved=50) == 20
    assert marks.room(90, reserved=50) == 0


@pytest.mark.parametrize(("high", "low"), [(0.8, 0.8), (1.1, 0.5), (0.5, 0.0)])
def test_senseless_marks_are_refused(high: float, low: float) -> None:
    with pytest.raises(ValueError, match="low < high"):
        Watermarks(100, high, low)


def test_headroom_grows_with_the_files_seen() -> None:
    assert passthrough_need(1000, 0.1, 30) == 100
    assert passthrough_need(1000, 0.1, 300) == 600
