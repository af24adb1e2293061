"""Random programs on the mount and on a local directory: no difference may be seen.

`CACHEFS_TEST_SECONDS` sets the length of each of these tests (default: 12 s), `_SEED` where
they begin. Each runs at least one program, however slow the machine. A failure prints the shrunk
program, ready for `test_found.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.differential.conftest import MakePair, With
from tests.differential.pair import Pair
from tests.differential.programs import Maker, Program, random_program

pytestmark = pytest.mark.slow

KILLED: Program = [
    [0, "open", 0, "a", "RDWR|CREAT", 0o644],
    [0, "!kill"],
    [0, "write", 0, 1, 100],
    [0, "stat", "a"],
]
SHORT = 6.0
"""Seconds that programs are tried for by default."""
SHRINKING = 60.0
"""Most seconds spent on making a failing program shorter."""


def _seconds(default: float) -> float:
    return float(os.environ.get("CACHEFS_TEST_SECONDS", default))


def _first_seed() -> int:
    return int(os.environ.get("CACHEFS_TEST_SEED", random.randrange(10**9)))


@st.composite
def small_programs(draw: Any) -> Program:
    """Programs that Hypothesis chooses, and shrinks."""
    maker = Maker(lambda options: draw(st.sampled_from(options)), actors=2)
    return [maker.step() for _ in range(draw(st.integers(1, 40)))]


def _with_hypothesis(pair: Pair, seconds: float) -> None:
    """Rounds of 50 examples until the time is over."""
    deadline = time.monotonic() + seconds
    first = _first_seed()
    count, failed = 0, False

    @settings(
        max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(small_programs())
    def check(program: Program) -> None:
        nonlocal count, failed
        if count and not failed and time.monotonic() > deadline:
            return
        count += 1
        told = pair.fails(program)
        failed = failed or bool(told)  # shrunk then, however long it takes
        assert not told, told

    while time.monotonic() < deadline:
        seed(first + count)(check)()


def _with_random(pair: Pair, seconds: float, length: int, specials: tuple[str, ...] = ()) -> None:
    """Long programs, seed after seed, until the time is over."""
    deadline = time.monotonic() + seconds
    for number in itertools.count(_first_seed()):
        program = random_program(random.Random(number), length, 2, specials)
        if told := pair.fails(program):
            pytest.fail(pair.shrunk(program, told, SHRINKING), pytrace=False)
        if time.monotonic() >= deadline:
            return


@pytest.mark.timeout(500)
def test_small_programs(pair_with: MakePair) -> None:
    """Many short programs with much reuse of few names."""
    _with_hypothesis(pair_with(), _seconds(SHORT))


@pytest.mark.timeout(500)
def test_long_programs(pair_with: MakePair) -> None:
    """Programs of 150 steps while uploads go on in the background."""
    _with_random(pair_with(**{"flush.settle": "1ms"}), _seconds(SHORT), 150, ("!pause",))


@pytest.mark.timeout(500)
def test_the_bucket_follows(pair_with: MakePair) -> None:
    """After each program the bucket has exactly the tree: content, attributes, links."""
    pair = pair_with(check_bucket=True, **{"flush.settle": "5ms"})
    _with_random(pair, _seconds(SHORT), 30, ("!pause",))


@pytest.mark.timeout(500)
def test_remounts_and_crashes(pair_with: MakePair) -> None:
    """Neither unmounting nor the death of daemon and supervisor loses what a write returned for."""
    pair = pair_with(**{"flush.settle": "5ms", "mount.takeover": "off"})
    _with_random(pair, _seconds(SHORT), 60, ("!remount", "!crash", "!pause"))


@pytest.mark.timeout(500)
def test_kills(pair_with: MakePair) -> None:
    """The daemon is killed at any moment and taken over: no step fails, nothing is lost."""
    pair = pair_with(**{"flush.settle": "5ms"})
    if pair.started().status()["lanes"].get("takeover") is False:
        pytest.skip("this kernel has no takeover")
    pair.run(KILLED)
    _with_random(pair, _seconds(SHORT), 100, ("!kill", "!pause"))


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_half_an_hour(pairs_until: With) -> None:
    """Thirty minutes of all of it (`-m soak`); tells how much that was."""
    seconds, whole = _seconds(1800) / 5, Counter[str]()

    def some(length: int, specials: tuple[str, ...], **options: Any) -> None:
        with contextlib.ExitStack() as stack:
            pair = pairs_until(stack)(**options)
            try:
                _with_random(pair, seconds, length, ("!pause", *specials))
            finally:
                whole.update(pair.done)
                print(dict(whole), flush=True)

    some(200, (), **{"flush.settle": "1ms"})
    some(40, (), check_bucket=True)
    some(80, ("!remount", "!crash"), **{"mount.takeover": "off"})
    some(100, ("!kill",), **{"flush.settle": "5ms"})
    some(60, ("!kill", "!remount"), check_bucket=True)
