"""What a tier keeps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cachefs.model.retention import Coming, Kept, Rules, judge, make_room

NOW = 10**18
checkpoints = st.lists(
    st.builds(
        Kept,
        root=st.uuids().map(str),
        step=st.none() | st.integers(0, 40),
        nbytes=st.integers(0, 100),
        changed_ns=st.integers(NOW - 1000, NOW),
        safe=st.booleans(),
        stays=st.sampled_from(["", "named by latest"]),
        below=st.booleans(),
        firm=st.booleans(),
    ),
    max_size=12,
)
coming = st.builds(
    Coming,
    root=st.just("step-new"),
    nbytes=st.integers(1, 300),
    changed_ns=st.integers(NOW - 1000, NOW),
    whole=st.booleans(),
    below=st.booleans(),
)
some = st.none() | st.integers(1, 10)
rules = st.builds(
    Rules,
    newest=some,
    every=st.none() | st.integers(1, 10),
    nbytes=st.none() | st.integers(0, 400),
    age_ns=st.none() | st.integers(0, 1000),
)


def made(count: int, *, safe: bool = True) -> list[Kept]:
    """Steps 0, 10, 20, ... of 100 bytes each, a second apart."""
    return [
        Kept(f"step-{n * 10}", n * 10, 100, NOW - (count - n) * 10**9, safe) for n in range(count)
    ]


def gone(given: Rules, kept: list[Kept]) -> list[str]:
    return sorted(v.checkpoint.root for v in judge(given, kept, NOW) if v.goes)


@given(rules, checkpoints)
def test_only_what_is_safe_goes_and_the_newest_safe_one_stays(
    given_rules: Rules, kept: list[Kept]
) -> None:
    verdicts = judge(given_rules, kept, NOW)
    assert {v.checkpoint for v in verdicts} == set(kept)
    assert len(verdicts) == len(kept)
    leaving = [v.checkpoint for v in verdicts if v.goes]
    assert all(each.safe and not each.stays for each in leaving)
    assert all(v.reason for v in verdicts if v.goes)
    safe = [each for each in kept if each.safe]
    if safe:
        assert [each for each in safe if each not in leaving], "nothing to start again from"


@given(rules, checkpoints)
def test_judging_again_changes_nothing(given_rules: Rules, kept: list[Kept]) -> None:
    first = judge(given_rules, kept, NOW)
    rest = [v.checkpoint for v in first if not v.goes]
    assert not any(v.goes for v in judge(given_rules, rest, NOW))


def test_no_rule_keeps_all() -> None:
    assert not Rules().any
    assert Rules(every=5).any is False
    assert gone(Rules(), made(5)) == []


def test_the_newest_are_kept() -> None:
    assert gone(Rules(newest=2), made(5)) == ["step-0", "step-10", "step-20"]


def test_every_so_many_steps_one_is_kept_for_ever() -> None:
    assert gone(Rules(newest=1, every=20), made(5)) == ["step-10"]


def test_as_many_as_fit() -> None:
    assert gone(Rules(nbytes=250), made(5)) == ["step-0", "step-10", "step-20"]
    assert gone(Rules(nbytes=10), made(3)) == ["step-0", "step-10"], "the newest stays"


def test_young_ones_are_kept() -> None:
    assert gone(Rules(age_ns=int(2.5e9)), made(4)) == ["step-0", "step-10"]


def test_what_a_pointer_names_stays_and_counts() -> None:
    kept = made(4)
    kept[0] = replace(kept[0], stays="named by latest")
    verdicts = judge(Rules(newest=2), kept, NOW)
    assert [v.checkpoint.root for v in verdicts if v.goes] == ["step-10"]
    assert verdicts[-1].reason == "named by latest"


def test_what_the_next_tier_lacks_is_kept_and_said() -> None:
    kept = [*made(3, safe=False), Kept("step-99", 99, 1, NOW, True)]
    verdicts = judge(Rules(newest=1), kept, NOW)
    assert not any(v.goes for v in verdicts)
    assert "the next tier lacks part of it" in verdicts[-1].reason


@given(rules, checkpoints, coming)
def test_what_gives_way_to_something_newer(
    given_rules: Rules, kept: list[Kept], newer: Coming
) -> None:
    before = judge(given_rules, kept, NOW)
    after = make_room(given_rules, before, newer)
    by_rule = {v.checkpoint.root for v in before if v.goes}
    gone = [v.checkpoint for v in after if v.goes and v.checkpoint.root != newer.root]
    more = [each for each in gone if each.root not in by_rule]
    assert by_rule <= {each.root for each in gone}
    assert all(each.below and each.changed_ns < newer.changed_ns for each in more)
    assert not any(each.stays and each.firm for each in more)
    assert sum(each.nbytes for each in gone) >= newer.nbytes or not more, "none in vain"
    safe = [v.checkpoint for v in before if v.checkpoint.safe and not v.goes]
    assert newer.whole or not safe or safe[0] not in more, "nothing to start again from"
    itself = [v for v in after if v.goes and v.checkpoint.root == newer.root]
    assert not itself or (
        newer.below and not more and any(s.changed_ns > newer.changed_ns for s in safe)
    )


def test_no_more_gives_way_than_is_needed() -> None:
    kept = [replace(each, below=True) for each in made(4)]
    after = make_room(Rules(newest=9), judge(Rules(newest=9), kept, NOW), Coming("new", 150, NOW))
    assert [v.checkpoint.root for v in after if v.goes] == ["step-10", "step-0"]
    assert {v.reason for v in after if v.goes} == {"there is no room for new"}
