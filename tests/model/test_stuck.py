"""What is stuck behind refused and conflicted effects: against the order's own walk back."""

from __future__ import annotations

import time
from random import Random

import pytest

from cachefs.model.order import EffectClass, EffectKind, EffectOrder, Pending
from cachefs.model.stuck import behind
from tests.model.test_order import any_pending


@pytest.mark.parametrize("seed", range(300))
def test_the_same_as_walking_back_from_each(seed: int) -> None:
    random = Random(seed)
    effects = [any_pending(random, number) for number in range(random.randint(1, 12))]
    order = EffectOrder(effects)
    guilty = [e.id for e in effects if e.blocked]
    found = behind(order, guilty)
    for effect in effects:
        culprits = order.culprits(effect.id)
        if effect.id in guilty:
            assert effect.id not in found
        elif culprits:
            assert found[effect.id] in culprits
        else:
            assert effect.id not in found


def test_only_the_guilty_that_are_named_count() -> None:
    order = EffectOrder([_effect(1, "a", blocked=True), _effect(2, "b", EffectClass.BARRIER)])
    assert behind(order, [1]) == {2: 1}
    assert behind(order, []) == {}


def test_ten_thousand_take_no_time_to_speak_of() -> None:
    """Also when many of them wait for each other by their keys."""
    order = EffectOrder([_effect(1, "x", blocked=True)])
    for number in range(2, 10_000):
        order.add(_effect(number, f"d/f{number % 5000}"))
    order.add(_effect(10_000, "d/last", EffectClass.SMALL))
    began = time.perf_counter()
    assert behind(order, [1]) == {10_000: 1}
    assert time.perf_counter() - began < 1


def _effect(
    number: int, key: str, klass: EffectClass = EffectClass.DATA, *, blocked: bool = False
) -> Pending:
    return Pending(
        id=number, kind=EffectKind.PUBLISH, klass=klass, since=number, end=number, key=key,
        blocked=blocked,
    )  # fmt: skip
