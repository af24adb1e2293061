from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.bench.crowd.policies import Paced
from cachefs.bench.crowd.simulation import Client, Crowd, Store
from cachefs.model.pacer import Bucket, Pacer, PacerRules, accepted_share, backoff

RULES = PacerRules(initial_rate=100, min_rate=1, max_rate=1000, initial_window=64)


def send_one(pacer: Pacer, now: float) -> float:
    """Wait for leave, start a request and return when it started."""
    now += pacer.delay(now)
    assert pacer.delay(now) == 0
    pacer.start(now)
    return now


def crowd(nodes: int, calls: int, budget: float, latency: float = 0.05) -> Crowd:
    """Nodes without a limit of their own, all beginning at once."""
    made = Crowd(Store(budget), latency=latency, skew=0)
    for _ in range(nodes):
        made.join(lambda random, clock: Paced(random, clock, concurrency=256), calls)
    return made


def took(clients: Sequence[Client]) -> float:
    return max(client.done_at for client in clients)


def refused_share(clients: Sequence[Client]) -> float:
    refused = sum(client.refused for client in clients)
    return refused / (refused + sum(client.served for client in clients))


def test_four_nodes_share_a_hundred_requests_a_second() -> None:
    """4,000 small objects: the budget is used, few are refused, nobody starves."""
    done = crowd(4, 1000, 100).run()
    assert 4000 / took(done) >= 0.9 * 100
    assert refused_share(done) <= 0.08
    served = [client.served for client in crowd(4, 10_000, 100).run(until=40)]
    assert min(served) >= 0.75 * sum(served) / 4


@pytest.mark.parametrize("latency", [0.01, 0.3])
def test_fast_and_slow_stores(latency: float) -> None:
    done = crowd(4, 1000, 100, latency).run()
    assert 4000 / took(done) >= 0.85 * 100
    assert refused_share(done) <= 0.08


def test_alone_slow_start_reaches_the_highest_rate() -> None:
    done = crowd(1, 4000, 5000).run()
    assert took(done) < 4000 / 3500 + 1
    policy = done[0].policy
    assert isinstance(policy, Paced)
    assert policy.pacer.rate == 3500
    assert refused_share(done) == 0


def past_slow_start(now: float = 0.0) -> Pacer:
    """A pacer that was refused once, and has come up to 100 requests/s again."""
    pacer = Pacer(RULES, now)
    pacer.throttled(send_one(pacer, now), now)
    pacer._set_rate(100, now)
    pacer._window = 64.0
    return pacer


def test_the_first_refusal_takes_back_what_was_too_much() -> None:
    pacer = Pacer(RULES, 0.0)
    pacer.throttled(send_one(pacer, 0.0), 0.05)
    assert pacer.rate == 25


def test_a_round_of_refusals_cuts_once_by_the_configured_factor() -> None:
    pacer, now = past_slow_start(), 0.0
    started = []
    for _ in range(8):
        now = send_one(pacer, now)
        started.append(now)
    for when in started:
        pacer.throttled(when, now + 0.05)
    assert 0.4 * 100 <= pacer.rate <= 0.6 * 100
    assert pacer.window == 32, "all were sent before the first cut"


def test_a_lone_refusal_hardly_slows_down() -> None:
    pacer = past_slow_start()
    pacer.throttled(send_one(pacer, 0.0), 0.1)
    assert pacer.rate > 88


def test_rates_stay_within_bounds() -> None:
    pacer, now = Pacer(RULES, 0.0), 0.0
    for _ in range(400):
        now = send_one(pacer, now)
        pacer.throttled(now, now := now + 0.01)
    assert pacer.rate == 1
    assert pacer.window == 1
    for _ in range(60_000):
        now = send_one(pacer, now)
        pacer.succeeded(now, now := now + 0.001)
    assert pacer.rate == 1000


def test_an_idle_node_does_not_gain() -> None:
    pacer = Pacer(RULES, 0.0)
    for second in range(1, 50):
        started = send_one(pacer, float(second))
        pacer.succeeded(started, started + 0.05)
    assert pacer.rate == 100, "one request a second says nothing about a hundred"


def test_retry_after_is_honoured_with_jitter() -> None:
    one, two = Pacer(RULES, 0.0), Pacer(RULES, 0.0)
    one.throttled(send_one(one, 0.0), 1.0, retry_after=4.0)
    two.throttled(send_one(two, 0.0), 1.0, retry_after=4.0, chance=0.9)
    assert one.delay(1.0) == pytest.approx(4.0)
    assert 4.0 < two.delay(1.0) <= 5.0
    assert one.delay(5.1) == 0


def test_the_window_bounds_requests_in_flight() -> None:
    pacer = Pacer(PacerRules(initial_window=2), 0.0)
    first = send_one(pacer, 0.0)
    second = send_one(pacer, first)
    assert pacer.in_flight == 2
    assert pacer.delay(9.0) == inf
    pacer.failed(second, 9.0)
    assert pacer.delay(9.0) == 0


def test_overload_narrows_the_window_and_leaves_the_rate() -> None:
    pacer = Pacer(RULES, 0.0)
    pacer.failed(send_one(pacer, 0.0), 30.0, overload=True)
    assert pacer.window == 32
    assert pacer.rate == 100


def test_nodes_that_wake_together_start_apart() -> None:
    random = Random(1)
    first = {Pacer(RULES, 0.0, random.random()).delay(0.0) for _ in range(20)}
    assert len(first) == 20
    assert max(first) < 1 / 100


@pytest.mark.parametrize(
    "fields",
    [{"min_rate": 0}, {"initial_rate": 9000}, {"decrease": 1.0}, {"decrease": 0.0}],
)
def test_senseless_rules_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        PacerRules(**fields)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 100)), min_size=1, max_size=50))
def test_a_bucket_never_exceeds_its_rate(steps: list[tuple[float, float]]) -> None:
    rate, burst, largest = 10.0, 5.0, 100.0
    bucket, now, taken = Bucket(rate, burst, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause + bucket.delay(now + pause)
        bucket.take(amount, now)
        taken += amount
        assert taken <= rate * now + burst + largest + 1e-6


def test_a_bucket_changes_its_rate() -> None:
    bucket = Bucket(10.0, 0.0, 0.0)
    bucket.take(20.0, 0.0)
    assert bucket.delay(0.0) == pytest.approx(2.0)
    bucket.set_rate(5.0, 0.0, 1.0)
    assert bucket.delay(1.0) == pytest.approx(2.0)
    bucket.set_rate(0.0, 0.0, 1.0)
    assert bucket.delay(1.0) == inf
    assert bucket.rate == 0


def test_faster_nodes_accept_fewer_refusals() -> None:
    shares = [accepted_share(rate) for rate in (1, 3, 30, 300, 3000)]
    assert shares == sorted(shares, reverse=True)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_has_full_jitter_and_a_bound(attempt: int, chance: float) -> None:
    assert 0 <= backoff(attempt, chance) < 30
    assert backoff(attempt, 0.0) == 0
    assert backoff(1, chance) <= 0.1
