"""Many nodes that save at the same second: cachefs' pacer against botocore's retry modes."""

from __future__ import annotations

import json
from math import inf, isfinite
from pathlib import Path
from random import Random
from typing import Any

import pytest
from botocore.config import Config
from botocore.retries import standard
from botocore.session import Session

from cachefs.bench.crowd.__main__ import main
from cachefs.bench.crowd.outcome import POLICIES, Scene, jain, simulate
from cachefs.bench.crowd.policies import Adaptive, Habits, Standard
from cachefs.bench.crowd.simulation import Again, Call, Crowd, Store

SMALL = Scene(calls=24, processes=4, budget=140)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_thousand_nodes_are_done_in_nearly_the_shortest_time(seed: int) -> None:
    found = simulate("cachefs", 1000, Scene(seed=seed))
    assert found.drain_by_ideal <= 1.3
    assert found.refused_share <= 0.3
    assert found.sent_by_needed == 1
    assert found.jain >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [300, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_nodes_are_done_well_before_those_with_boto3(nodes: int) -> None:
    ours, *theirs = (simulate(policy, nodes, Scene()) for policy in POLICIES)
    for other in theirs:
        assert other.drain_seconds >= 1.25 * ours.drain_seconds
        assert other.refused_share >= 2 * ours.refused_share


def test_with_boto3s_own_number_of_attempts_a_crowd_never_gets_done() -> None:
    """The uploads that fail and begin anew keep the store busy for ever."""
    found = simulate("standard", 20, Scene(calls=40, budget=70, habits=Habits(max_attempts=3)))
    assert found.drain_seconds == found.slowest_by_fastest == inf
    assert found.errors > 500
    assert found.sent_by_needed > 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_is_a_function_of_its_arguments(policy: str) -> None:
    assert simulate(policy, 20, SMALL) == simulate(policy, 20, SMALL)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_node_alone_is_limited_by_its_own_slots(policy: str) -> None:
    found = simulate(policy, 1, Scene())
    assert found.refused_share == found.errors == 0
    assert found.drain_seconds < 1


def test_everything_is_sent_once_and_no_more_than_the_store_bears() -> None:
    for policy in POLICIES:
        found = simulate(policy, 30, SMALL)
        assert found.sent_by_needed == 1
        assert found.drain_by_ideal >= 1


def test_the_retry_handler_is_put_together_as_botocore_does() -> None:
    config = Config(retries={"mode": "standard", "total_max_attempts": 5})
    session = Session()
    session.set_credentials("key", "secret")
    client = session.create_client("s3", "us-east-1", config=config)
    theirs: Any = standard.register_retry_handler(client, 5)
    ours = Standard(Random(1), lambda: 0.0, Habits(max_attempts=5))._client.handler
    for part in ("_retry_policy", "_retry_quota", "_retry_event_adapter", "_service_name"):
        assert type(getattr(ours, part)) is type(getattr(theirs, part))
    backoffs = [each._retry_policy._retry_backoff for each in (ours, theirs)]
    assert backoffs[0]._max_backoff == backoffs[1]._max_backoff == 20


def test_standard_mode_backs_off_with_full_jitter_and_gives_up() -> None:
    policy, call = Standard(Random(1), lambda: 0.0, Habits(max_attempts=4)), Call()
    pauses = []
    for attempt in (1, 2, 3):
        call.attempts = attempt
        pauses.append(policy.refused(call, 0.0))
    assert all(0 <= each.pause <= 2.0**i for i, each in enumerate(pauses))
    call.attempts = 4
    assert policy.refused(call, 0.0) == Again(1.0, failed=True)


def test_standard_mode_stops_retrying_when_its_quota_is_used_up() -> None:
    policy = Standard(Random(1), lambda: 0.0)
    verdicts = [policy.refused(Call(attempts=1), 0.0).failed for _ in range(101)]
    assert verdicts == [False] * 100 + [True]
    call = Call(attempts=2, context={"retry_quota_capacity": 5})
    policy.succeeded(call, 0.0)
    assert not policy.refused(Call(attempts=1), 0.0).failed


def test_adaptive_mode_slows_down_when_it_was_throttled() -> None:
    now = 0.0
    policy = Adaptive(Random(1), lambda: now)
    assert policy.delay(now) == 0
    policy.start(now)
    policy.refused(Call(attempts=1), now)
    assert policy.delay(now) == pytest.approx(2.0), "half a request per second, the least it has"
    now = 2.0
    assert policy.delay(now) <= 1e-9
    policy.start(now)
    assert policy.delay(now) > 1


def test_an_upload_begins_anew_when_a_part_fails() -> None:
    class Hopeless(Standard):
        def refused(self, call: Call, now: float) -> Again:
            return Again(0.5, failed=True)

    crowd = Crowd(Store(10.0, burst=0.5), skew=0)
    crowd.join(Hopeless, 6)
    (client,) = crowd.run(until=0.4)
    assert (client.served, client.refused, client.failed) == (5, 1, 1)
    assert client.fresh == 6
    (client,) = crowd.run(until=100)
    assert client.failed > 1
    assert client.done_at == inf


def test_jain() -> None:
    assert jain([2, 2, 2]) == 1
    assert jain([1, 0, 0, 0]) == 0.25
    assert jain([0, 0]) == 0


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "1,2", "--policies", "cachefs,adaptive", "--calls", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["cachefs", "1"], ["adaptive", "1"], ["cachefs", "2"], ["adaptive", "2"],
    ]  # fmt: skip


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--nodes 10 --policies standard --attempts 1 --budget 25 --calls 16 --json"
    assert main(words.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scene"]["habits"] == {"max_attempts": 1, "pause": 1.0}
    (result,) = told["results"]
    assert result["drain_seconds"] is None, "never done"
    assert isfinite(result["refused_share"])


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "crowd.png"
    quick = ["--nodes", "1,3", "--calls", "4", "--plot"]
    assert main([*quick, str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*quick, str(tmp_path / "nowhere" / "crowd.png")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--nodes", "0"], ["--nodes", "x"], ["--policies", "legacy"]])
def test_the_command_refuses_nonsense(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(bad)
    assert caught.value.code == 2
    assert bad[1] in capsys.readouterr().err
