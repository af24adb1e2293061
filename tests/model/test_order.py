"""EffectOrder against a naive reading of the law, over arbitrary sets of effects and changes."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.model.order import EffectClass, EffectKind, EffectOrder, Pending
from tests.model.law import Law

K, C = EffectKind, EffectClass
KEYS = ["a", "a/", "a/b", "a/b/", "a/b/c", "a/d", "e", "e/f", "ab"]


SEEDS = 400

effect_sets = st.builds(
    lambda seed, count: [any_pending(Random(seed + i * 7919), i) for i in range(count)],
    st.integers(0, 1 << 32),
    st.integers(0, 9),
)


def any_pending(random: Random, number: int, low: int = 0, top: int = 30) -> Pending:
    """Any effect whatsoever on a few keys, many of them above or below each other."""
    kind = random.choice(list(K))
    end = random.randint(low, top)
    key = random.choice(KEYS)
    moves = kind is K.RELOCATE
    return Pending(
        id=number,
        kind=kind,
        klass=random.choice(list(C)) if kind is K.PUBLISH else C.BARRIER,
        since=random.randint(low, end),
        end=end,
        key=key.rstrip("/") if moves else key,
        old_key=random.choice(KEYS).rstrip("/") if moves else None,
        is_dir=key.endswith("/"),
        unordered=random.random() < 0.15,
        held=random.random() < 0.15,
        blocked=random.random() < 0.12,
        size=random.choice([0, 1 << 30]),
    )


def change_once(random: Random, order: EffectOrder, law: Law, fresh_id: int) -> None:
    what = random.choice(["add", "add", "remove", "update", "begin", "retry"])
    some = random.choice(sorted(law.pending)) if law.pending else None
    if what == "add" or some is None:
        law.pending[fresh_id] = any_pending(random, fresh_id)
        order.add(law.pending[fresh_id])
    elif what == "remove":
        assert order.remove(some) == law.pending.pop(some)
        law.begun.discard(some)
    elif what == "update":
        law.pending[some] = any_pending(random, some, top=60)
        order.update(law.pending[some])
    elif what == "begin":
        order.begin(some)
        law.begun.add(some)
    else:
        order.retry(some)
        law.begun.discard(some)


def assert_same(order: EffectOrder, law: Law) -> None:
    blockers = {number: law.blockers(number) for number in law.pending}
    expected = law.committable(blockers)
    assert order.committable() == expected
    assert order.committable(2) == expected[:2]
    assert {e.id for e in order} == set(law.pending)
    for number in law.pending:
        assert order.is_committable(number) == (number in expected)
        assert set(order.blockers(number)) == blockers[number]
        assert len(order.blockers(number, 1)) == min(1, len(blockers[number]))
        assert set(order.culprits(number)) == law.culprits(number, blockers)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_changes_leave_the_line_as_the_law_says(seed: int) -> None:
    random = Random(seed)
    order, law = EffectOrder(), Law()
    for step in range(random.randint(1, 25)):
        change_once(random, order, law, step)
        assert_same(order, law)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_may_supersede_is_what_the_rule_promises(seed: int) -> None:
    random = Random(seed)
    effects = [any_pending(random, number) for number in range(random.randint(1, 6))]
    order, law = EffectOrder(effects), Law({e.id: e for e in effects})
    for old in random.sample(effects, len(effects) // 3):
        order.begin(old.id)
        law.begun.add(old.id)
    for old in effects:
        new = any_pending(random, 99, low=old.end, top=40)
        if random.random() < 0.9:
            new = replace(new, key=old.key, is_dir=old.is_dir)
        assert order.may_supersede(old.id, new) == law.may_supersede(old.id, new)


@given(effect_sets)
def test_no_deadlock(effects: list[Pending]) -> None:
    """All of it goes out unless it is held, blocked or behind a blocked one."""
    order = EffectOrder(effects)
    while ready := order.committable(1):
        order.remove(ready[0])
    for effect in order:
        assert effect.held or effect.blocked or order.culprits(effect.id)


@given(effect_sets)
def test_recovery_order_does_not_matter(effects: list[Pending]) -> None:
    one, two = EffectOrder(effects), EffectOrder()
    for effect in effects:
        two.add(effect)
    assert one.committable() == two.committable()


@given(effect_sets)
def test_waiting_is_never_circular(effects: list[Pending]) -> None:
    law = Law({e.id: e for e in effects})
    left = {e.id: law.blockers(e.id) for e in effects}
    while free := [number for number, blockers in left.items() if not blockers]:
        for number in free:
            del left[number]
        left = {number: blockers - set(free) for number, blockers in left.items()}
    assert not left


def publish(number: int, klass: EffectClass, key: str, **more: object) -> Pending:
    fields = {"kind": K.PUBLISH, "since": number, "end": number} | more
    return Pending(id=number, klass=klass, key=key, **fields)  # type: ignore[arg-type]


def unpublish(number: int, key: str) -> Pending:
    return publish(number, C.BARRIER, key, kind=K.UNPUBLISH)


def drain(order: EffectOrder) -> list[list[int]]:
    """Commit all that may go, again and again; returns the waves."""
    waves = []
    while ready := order.committable():
        waves.append(ready)
        for number in ready:
            order.remove(number)
    return waves


def test_shards_then_index_then_latest() -> None:
    order = EffectOrder(
        [
            publish(1, C.DATA, "s/a.bin"),
            publish(2, C.SMALL, "s/config.json"),
            publish(3, C.DATA, "s/b.bin"),
            publish(4, C.BARRIER, "s/x.index.json"),
            publish(5, C.DATA, "t/a.bin"),
            publish(6, C.BARRIER, "latest"),
        ]
    )
    assert order.committable() == [1, 3, 5]
    order.remove(1)
    assert order.committable() == [2, 3, 5], "a small file waits for data before it only"
    assert order.blockers(6) == [2, 3, 4, 5]
    assert drain(order) == [[2, 3, 5], [4], [6]]


def test_deletes_at_the_head_are_one_batch() -> None:
    order = EffectOrder(
        [
            unpublish(1, "old/a"),
            unpublish(2, "old/b"),
            unpublish(3, "old/"),
            publish(4, C.BARRIER, "latest"),
            unpublish(5, "old2/a"),
        ]
    )
    assert drain(order) == [[1, 2, 3], [4], [5]]


def test_a_file_becomes_a_directory() -> None:
    order = EffectOrder([unpublish(1, "foo"), publish(2, C.DATA, "foo/bar.bin")])
    assert drain(order) == [[1], [2]]


def test_a_directory_becomes_a_file() -> None:
    order = EffectOrder([unpublish(1, "foo/bar"), publish(2, C.DATA, "foo")])
    assert drain(order) == [[1], [2]]


def test_a_directory_marker_does_not_hold_up_data_below_it() -> None:
    order = EffectOrder(
        [
            publish(1, C.DATA, "other.bin"),
            publish(2, C.SMALL, "d/", is_dir=True),
            publish(3, C.DATA, "d/a.bin"),
        ]
    )
    assert order.committable() == [1, 3]


def test_new_data_below_a_moving_directory_waits_for_the_move() -> None:
    move = publish(1, C.BARRIER, "new", kind=K.RELOCATE, old_key="old", is_dir=True)
    order = EffectOrder([move, publish(2, C.DATA, "new/x.bin"), publish(3, C.DATA, "old/x.bin")])
    assert drain(order) == [[1], [2, 3]]


def test_what_one_rename_moved_keeps_its_order() -> None:
    order = EffectOrder([publish(1, C.BARRIER, "t/x.index.json"), publish(2, C.DATA, "t/a.bin")])
    for number, key in ((1, "s/x.index.json"), (2, "s/a.bin")):
        order.update(replace(order.get(number), key=key, since=9, end=9))
    assert drain(order) == [[2], [1]], "data first when all bear the rename's number"


def test_held_effects_are_out_of_the_line() -> None:
    order = EffectOrder([publish(1, C.DATA, "x.tmp", held=True), publish(2, C.BARRIER, "latest")])
    assert order.committable() == [2]
    assert order.blockers(1) == order.blockers(2) == []
    order.update(replace(order.get(1), held=False))
    assert order.committable() == [1]
    assert not order.is_committable(2)


def test_logs_take_no_part_but_keep_their_own_order() -> None:
    order = EffectOrder(
        [
            publish(1, C.SMALL, "logs/a", unordered=True),
            publish(2, C.SMALL, "logs/a", unordered=True),
            publish(3, C.DATA, "x.bin"),
            publish(4, C.BARRIER, "latest"),
            publish(5, C.BARRIER, "logs/b", unordered=True),
        ]
    )
    assert drain(order) == [[1, 3, 5], [2, 4]]


def test_a_refused_effect_blocks_barriers_and_is_named() -> None:
    order = EffectOrder(
        [
            publish(1, C.DATA, "a.bin", blocked=True),
            publish(2, C.BARRIER, "latest"),
            publish(3, C.DATA, "b.bin"),
            publish(4, C.BARRIER, "b.index.json"),
        ]
    )
    assert drain(order) == [[3]]
    assert order.culprits(2) == order.culprits(4) == [1]
    assert order.culprits(1) == []
    order.update(replace(order.get(1), blocked=False))
    assert drain(order) == [[1], [2], [4]]


def test_what_is_being_committed_is_not_offered_again() -> None:
    order = EffectOrder([publish(1, C.DATA, "a"), publish(2, C.BARRIER, "latest")])
    order.begin(1)
    assert order.committable() == [], "still blocking"
    order.update(replace(order.get(1), key="b"))
    assert order.committable() == [], "a rename does not make it idle"
    order.retry(1)
    assert order.committable() == [1]


class TestSuperseding:
    def test_rewritten_data_keeps_its_waiters(self) -> None:
        order = EffectOrder([publish(1, C.DATA, "a.bin"), publish(2, C.BARRIER, "latest")])
        order.supersede(1, publish(3, C.DATA, "a.bin"))
        assert drain(order) == [[3], [2]]

    def test_not_when_that_would_be_a_circle(self) -> None:
        order = EffectOrder([publish(1, C.DATA, "a.bin"), publish(2, C.BARRIER, "latest")])
        rewritten = publish(3, C.BARRIER, "a.bin")
        assert not order.may_supersede(1, rewritten)
        with pytest.raises(ValueError, match="may not supersede"):
            order.supersede(1, rewritten)
        order.add(rewritten)
        assert drain(order) == [[1], [2], [3]]

    def test_a_pointer_rewritten_all_the_time_gets_out(self) -> None:
        order = EffectOrder([publish(1, C.BARRIER, "latest")])
        shown = []
        for number in range(2, 50):
            fresh = publish(number, C.BARRIER, "latest")
            stale = [e.id for e in order if order.may_supersede(e.id, fresh)]
            for old in stale:
                order.supersede(old, fresh)
            if not stale:
                order.add(fresh)
            assert len(order) <= 2, "the first is kept, those after it replace each other"
            if number % 7 == 0:
                shown += order.committable()
                order.remove(shown[-1])
        assert shown[0] == 1
        assert len(shown) == len(set(shown)) == 7

    def test_large_rewritten_files_are_superseded(self) -> None:
        order = EffectOrder([publish(1, C.BARRIER, "big", size=1 << 30)])
        assert order.may_supersede(1, publish(2, C.BARRIER, "big", size=1 << 30))

    def test_a_refused_pointer_is_superseded(self) -> None:
        order = EffectOrder([publish(1, C.BARRIER, "latest", blocked=True)])
        assert order.may_supersede(1, publish(2, C.BARRIER, "latest"))

    def test_only_on_the_same_key(self) -> None:
        order = EffectOrder([publish(1, C.DATA, "a.bin")])
        assert not order.may_supersede(1, publish(2, C.DATA, "b.bin"))


@pytest.mark.slow
def test_a_hundred_thousand_effects() -> None:
    """Shards below a pending directory move, a marker behind every hundred: all stays quick."""
    count = 100_000
    classes = [C.DATA] * 80 + [C.SMALL] * 19 + [C.BARRIER]
    began = time.process_time()
    order = EffectOrder([publish(0, C.BARRIER, "run", kind=K.RELOCATE, old_key="old", is_dir=True)])
    for number in range(1, count):
        order.add(publish(number, classes[number % 100], f"run/s{number // 100}/f{number}"))
    assert order.committable(16) == [0]
    done = 0
    while ready := order.committable(16):
        done += len(ready)
        for number in ready:
            order.remove(number)
    assert done == count
    took = time.process_time() - began
    assert took < 20, f"{took:.1f} s; usually 4"
