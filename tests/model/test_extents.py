from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.model.extents import Extent, ExtentSet

SPACE = 40
bounds = st.integers(0, SPACE)
extents = st.tuples(bounds, bounds).map(lambda pair: (min(pair), max(pair)))
edits = st.lists(st.tuples(st.booleans(), extents), max_size=25)


def build(steps: list[tuple[bool, Extent]]) -> tuple[ExtentSet, set[int]]:
    """The same edits on an ExtentSet and on a plain set of positions."""
    subject, model = ExtentSet(), set[int]()
    for adds, (start, end) in steps:
        if adds:
            subject.add(start, end)
            model |= set(range(start, end))
        else:
            subject.remove(start, end)
            model -= set(range(start, end))
    return subject, model


def positions(pieces: object) -> set[int]:
    return {p for start, end in pieces for p in range(start, end)}  # type: ignore[attr-defined]


def assert_canonical(subject: ExtentSet) -> None:
    last = -1
    for start, end in subject:
        assert last < start < end, "extents are sorted, apart and not empty"
        last = end


@given(edits)
def test_edits_equal_a_set_of_positions(steps: list[tuple[bool, Extent]]) -> None:
    subject, model = build(steps)
    assert_canonical(subject)
    assert positions(subject) == model
    assert subject.total == len(model)
    assert bool(subject) == bool(model)


@given(edits, extents)
def test_questions_equal_a_set_of_positions(
    steps: list[tuple[bool, Extent]], asked: Extent
) -> None:
    subject, model = build(steps)
    inside = set(range(*asked))
    assert subject.covers(*asked) == (inside <= model)
    assert (range(*asked) in subject) == (inside <= model)
    assert subject.overlaps(*asked) == bool(inside & model)
    assert positions(subject.within(*asked)) == inside & model
    assert positions(subject.gaps(*asked)) == inside - model
    assert (asked[0] in subject) == (asked[0] in model)


@given(edits, edits)
def test_set_operations(one: list[tuple[bool, Extent]], two: list[tuple[bool, Extent]]) -> None:
    (a, in_a), (b, in_b) = build(one), build(two)
    for result, expected in (
        (a.intersect(b), in_a & in_b),
        (a.union(b), in_a | in_b),
        (a.difference(b), in_a - in_b),
    ):
        assert_canonical(result)
        assert positions(result) == expected
    assert (a == b) == (in_a == in_b)


@given(edits, bounds)
def test_clip_is_truncation(steps: list[tuple[bool, Extent]], size: int) -> None:
    subject, model = build(steps)
    twin = subject.copy()
    subject.clip(size)
    assert positions(subject) == {p for p in model if p < size}
    assert positions(twin) == model, "a copy is independent"


@given(edits, st.integers(0, 1 << 60))
def test_pack_round_trip(steps: list[tuple[bool, Extent]], far: int) -> None:
    subject, _ = build(steps)
    subject.add(far, far + 5)
    assert ExtentSet.unpack(subject.pack()) == subject


@given(st.binary(max_size=12))
def test_unpack_takes_only_what_pack_makes(packed: bytes) -> None:
    try:
        extents_found = ExtentSet.unpack(packed)
    except ValueError:
        return
    assert_canonical(extents_found)


def test_a_day_of_sequential_writes_packs_into_a_few_bytes() -> None:
    subject = ExtentSet()
    for start in range(0, 1 << 30, 1 << 20):
        subject.add(start, start + (1 << 20))
    assert len(subject) == 1
    assert len(subject.pack()) < 8


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (5, 4)])
def test_improper_extents_are_refused(start: int, end: int) -> None:
    subject = ExtentSet([(0, 10)])
    for operation in (subject.add, subject.remove, subject.covers, subject.overlaps):
        with pytest.raises(ValueError, match="not an extent"):
            operation(start, end)


def test_ranges_with_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="step 1"):
        range(0, 10, 2) in ExtentSet([(0, 10)])  # noqa: B015


def test_appending_takes_less_than_a_microsecond() -> None:
    subject = ExtentSet((i * 10, i * 10 + 5) for i in range(1000))
    count = 100_000

    def append() -> None:
        for start in range(20_000, 20_000 + count * 4096, 4096):
            subject.add(start, start + 4096)

    best = min(timeit.repeat(append, number=1, repeat=3)) / count
    assert best < 3e-6, "generous: the machine may be busy"
