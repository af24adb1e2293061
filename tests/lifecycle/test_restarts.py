"""When the next daemon starts, without processes and without waiting."""

from __future__ import annotations

from cachefs.supervised import MAX_DELAY, MAX_DELAY_KILLED, STEADY, Restarts


def delays(restarts: Restarts, count: int) -> list[float]:
    """Pauses before each of `count` restarts in a row, none of which gets ready."""
    now = 0.0
    found = []
    for _ in range(count):
        delay = restarts.died(now)
        assert delay is not None
        found.append(delay)
        now += delay
    return found


def test_first_restart_is_immediate_then_pauses_grow() -> None:
    found = delays(Restarts(timeout=1e9), 5000)
    assert found[:5] == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert found == sorted(found)
    assert found[-1] == MAX_DELAY


def test_each_kill_of_a_steady_daemon_is_a_first_failure() -> None:
    restarts = Restarts(timeout=600)
    for number in range(50):
        now = number * 10.0
        restarts.started_ready(now)
        assert restarts.is_new_outage()
        assert restarts.died(now + STEADY) == 0.0


def test_daemon_that_dies_right_after_ready_is_slowed_down() -> None:
    restarts = Restarts(timeout=600)
    found = []
    for number in range(4):
        restarts.started_ready(float(number))
        found.append(restarts.died(number + STEADY / 2))
    assert found == [0.0, 0.1, 0.2, 0.4]


def test_daemon_that_is_killed_while_it_serves_comes_back_soon() -> None:
    restarts = Restarts(timeout=600)
    for number in range(20):
        restarts.started_ready(float(number))
        delay = restarts.died(number + STEADY / 2, killed=True)
        assert delay is not None
        assert delay <= MAX_DELAY_KILLED


def test_gives_up_after_the_timeout_counted_from_the_first_failure() -> None:
    restarts = Restarts(timeout=10)
    assert restarts.died(100.0) == 0.0
    assert restarts.give_up_at(105.0) == 110.0
    assert restarts.died(109.0) == 0.1
    assert not restarts.is_new_outage()
    assert restarts.died(109.9) is None


def test_ready_daemon_ends_the_outage() -> None:
    restarts = Restarts(timeout=10)
    restarts.died(100.0)
    restarts.started_ready(105.0)
    assert restarts.give_up_at(200.0) == 210.0


def test_no_patience_at_all() -> None:
    assert Restarts(timeout=0).died(1.0) is None
