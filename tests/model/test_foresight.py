"""Whether the next checkpoint will fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachefs.model.foresight import Forecast, Save, foresee

S = 10**9
NOW = 10**18


def saves(*sizes: int, every: int = 100, ago: int = 90) -> list[Save]:
    """The last one was complete `ago` seconds ago."""
    count = len(sizes)
    return [
        Save(size, NOW - (ago + (count - 1 - n) * every) * S, True) for n, size in enumerate(sizes)
    ]


def look(known: list[Save], room: int, capacity: int = 1000) -> Forecast:
    found = foresee(known, room=room, capacity=capacity, now_ns=NOW)
    assert found is not None
    return found


def test_nothing_is_known_before_there_was_one() -> None:
    assert foresee([], room=1, capacity=1, now_ns=NOW) is None
    assert foresee([Save(10, NOW, False)], room=1, capacity=1, now_ns=NOW) is None


def test_the_largest_of_the_last_counts() -> None:
    assert look(saves(900, 10, 30, 20), 1000).nbytes == 30


def test_what_is_still_to_be_uploaded_has_half_of_the_time() -> None:
    assert look(saves(10, 10, ago=49), room=5) == Forecast(10, 5, True, NOW + S)
    assert look(saves(10, 10, ago=50), room=5) == Forecast(10, 5, False, NOW)
    assert look(saves(10, 10, ago=50), room=10).fits


def test_one_that_is_larger_than_the_cache_never_fits() -> None:
    assert not look(saves(10, ago=0), room=5, capacity=9).fits
    assert look(saves(10, ago=0), room=5, capacity=10).fits, "when the next comes is not known"


def test_what_is_written_of_it_already_is_not_needed_again() -> None:
    assert look([*saves(10, 10), Save(6, NOW, False)], room=4).fits
    assert not look([*saves(10, 10), Save(6, NOW, False)], room=3).fits
    assert not look([*saves(10, 10), Save(6, NOW - 500 * S, False)], room=4).fits, "an old one"


@given(
    st.lists(
        st.builds(Save, st.integers(0, 99), st.integers(NOW - 1000, NOW), st.booleans()), max_size=9
    ),
    st.integers(0, 99),
)
def test_more_room_never_hurts(known: list[Save], room: int) -> None:
    now = foresee(known, room=room, capacity=100, now_ns=NOW)
    more = foresee(known, room=room + 1, capacity=100, now_ns=NOW)
    assert (now is None) == (more is None)
    if now is not None and more is not None:
        assert more.fits or not now.fits
        assert now.look_again_ns >= NOW
