"""Holding uploads back: pressure, spreading, limits by the time of day."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.model.bandwidth import DAY, BandwidthPlan, Window
from cachefs.model.pressure import Valve, stalled_seconds
from cachefs.model.spread import Bursts

PSI = (
    "some avg10=27.84 avg60=24.45 avg300=62.13 total=2577602299\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=17\n"
)

# ---- pressure ----------------------------------------------------------------------------------


def test_the_kernels_text_is_understood() -> None:
    assert stalled_seconds(PSI) == pytest.approx(2577.602299)
    for text in ("", "full avg10=0.00 total=3\n", "some avg10=1.00\n"):
        with pytest.raises(ValueError, match="some"):
            stalled_seconds(text)


def test_pressure_halves_and_calm_adds_one() -> None:
    valve = Valve(16)
    assert [valve.update(2.0) for _ in range(5)] == [8, 4, 2, 1, 1], "one always goes on"
    assert [valve.update(0.9) for _ in range(2)] == [1, 1], "not clearly less than acceptable"
    assert [valve.update(0.1) for _ in range(3)] == [2, 3, 4]
    assert valve.open() == 16
    assert valve.update(0.0) == 16


@given(st.integers(1, 64), st.lists(st.floats(0, 10)))
def test_the_valve_stays_within_bounds(most: int, loads: list[float]) -> None:
    valve = Valve(most)
    for load in loads:
        assert 1 <= valve.update(load) <= most


# ---- spread ------------------------------------------------------------------------------------


def saves(bursts: Bursts, starts: list[float], files: int = 8, pause: float = 1.0) -> None:
    for start in starts:
        for number in range(files):
            bursts.sealed(start + number * pause)


def test_nothing_is_spread_before_two_checkpoints() -> None:
    bursts = Bursts()
    assert bursts.rate(1000, 0.5, 0.0) is None
    saves(bursts, [100.0])
    assert bursts.interval is None
    assert bursts.rate(1000, 0.5, 110.0) is None


def test_the_interval_is_from_beginning_to_beginning() -> None:
    bursts = Bursts()
    saves(bursts, [100.0, 400.0, 710.0])
    assert bursts.interval == pytest.approx(305.0)
    assert bursts.began == 710.0


def test_one_odd_pause_does_not_mislead() -> None:
    bursts = Bursts()
    saves(bursts, [0.0, 100.0, 200.0, 300.0, 4000.0])
    assert bursts.interval == 100.0


def test_a_slow_save_of_known_rhythm_is_one_burst() -> None:
    bursts = Bursts()
    saves(bursts, [0.0, 600.0, 1200.0])
    saves(bursts, [1800.0], files=4, pause=60.0)
    assert bursts.interval == 600.0
    assert bursts.began == 1800.0


def test_the_upload_is_done_when_the_time_is_up() -> None:
    bursts = Bursts()
    saves(bursts, [0.0, 100.0])
    assert bursts.rate(4000, 0.5, 110.0) == pytest.approx(100.0)
    assert bursts.rate(2000, 0.5, 140.0) == pytest.approx(200.0)
    assert bursts.rate(2000, 0.5, 149.0) is None, "the last moments know no limit"
    assert bursts.rate(2000, 0.5, 500.0) is None


# ---- bandwidth ---------------------------------------------------------------------------------

DAYTIME = Window(8 * 60, 18 * 60, 50)
NIGHT = Window(22 * 60, 6 * 60, None)


def test_windows_hold_from_their_beginning_up_to_their_end() -> None:
    plan = BandwidthPlan((DAYTIME, NIGHT), 7)
    wanted = {0: None, 359: None, 360: 7, 479: 7, 480: 50, 1079: 50, 1080: 7, 1319: 7, 1320: None}
    assert {minute: plan.rate_at(minute) for minute in wanted} == wanted


def test_a_plan_without_windows_is_constant() -> None:
    assert BandwidthPlan(otherwise=5).is_constant
    assert not BandwidthPlan((NIGHT,)).is_constant
    assert BandwidthPlan().rate_at(3) is None


def test_plans_read_as_they_are_written() -> None:
    assert str(BandwidthPlan()) == "off"
    assert str(BandwidthPlan(otherwise=1 << 20)) == "1048576"
    assert str(BandwidthPlan((DAYTIME, NIGHT), 7)) == "08:00-18:00=50,22:00-06:00=off,otherwise=7"


minutes = st.integers(0, DAY - 1)


@given(minutes, minutes, minutes, minutes)
def test_windows_meet_if_a_minute_is_in_both(a: int, b: int, c: int, d: int) -> None:
    if a == b or c == d:
        return
    one, other = Window(a, b, 1), Window(c, d, 2)
    both = any(one.covers(minute) and other.covers(minute) for minute in range(DAY))
    assert one.meets(other) == other.meets(one) == both
