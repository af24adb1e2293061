"""Upload plans: every size and edit within S3's rules, and the least bytes sent that they allow."""

from __future__ import annotations

import errno
import math
import time
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cachefs.model.extents import ExtentSet
from cachefs.model.plan import (
    GIB,
    MIB,
    S3_LIMITS,
    BaseObject,
    Limits,
    PartSource,
    UploadPlan,
    plan_upload,
)

UPLOAD, COPY = PartSource.UPLOAD, PartSource.COPY
TIB = 1 << 40


def assert_legal(
    plan: UploadPlan, dirty: ExtentSet | None, base: BaseObject | None, limits: Limits = S3_LIMITS
) -> None:
    parts = plan.parts
    assert [p.number for p in parts] == list(range(1, len(parts) + 1))
    assert 1 <= len(parts) <= limits.parts_max
    assert parts[0].start == 0
    assert parts[-1].end == plan.size
    assert all(a.end == b.start for a, b in pairwise(parts)), "parts tile the file"
    assert all(p.size >= limits.part_min for p in parts[:-1])
    assert all(p.size <= limits.part_max for p in parts)
    assert all(p.size > 0 for p in parts) or plan.size == 0
    for part in parts:
        if part.source is COPY:
            assert dirty is not None
            assert base is not None
            assert not dirty.overlaps(part.start, part.end), "changed bytes are sent"
            assert part.end <= base.size
            whole = plan.single and plan.size == base.size
            assert whole or base.size > limits.part_min, "S3 copies ranges of larger objects only"
    assert plan.upload_bytes + plan.copy_bytes == plan.size
    if plan.single:
        assert len(parts) == 1


def least_bytes(size: int, dirty: ExtentSet, base: BaseObject, limits: Limits) -> float:
    """The optimum, by trying every tiling. With the limit on parts."""
    best: dict[int, float] = {0: 0.0}
    answer = math.inf
    for _ in range(limits.parts_max):
        after: dict[int, float] = {}
        for at, sent in best.items():
            for end in range(at + 1, min(size, at + limits.part_max) + 1):
                if end - at < limits.part_min and end != size:
                    continue
                copied = end <= base.size and not dirty.overlaps(at, end)
                copied = copied and base.size > limits.part_min
                cost = sent + (0 if copied else end - at)
                after[end] = min(after.get(end, math.inf), cost)
        answer = min(answer, after.get(size, math.inf))
        best = after
    return answer


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[int, ExtentSet, BaseObject]:
    size = draw(st.integers(1, 50))
    base = BaseObject(draw(st.integers(max(0, size - 12), size + 8)), "etag")
    at = st.integers(0, size)
    edits = draw(st.lists(st.tuples(at, st.integers(1, 5)), max_size=6))
    return size, ExtentSet((start, start + length) for start, length in edits), base


@given(small_cases(), st.integers(2, 5), st.integers(2, 4))
def test_least_bytes(case: tuple[int, ExtentSet, BaseObject], least: int, factor: int) -> None:
    size, dirty, base = case
    limits = Limits(part_min=least, part_max=least * factor, parts_max=60)
    plan = plan_upload(size, dirty, base, limits, preferred_part=least, single_put_max=0)
    assert_legal(plan, dirty, base, limits)
    unchanged = size == base.size and not dirty.overlaps(0, size)
    best = 0 if unchanged and size <= limits.part_max else least_bytes(size, dirty, base, limits)
    assert plan.upload_bytes == best


@given(small_cases(), st.integers(2, 5), st.integers(2, 4), st.integers(3, 12))
def test_few_parts(
    case: tuple[int, ExtentSet, BaseObject], least: int, factor: int, parts: int
) -> None:
    size, dirty, base = case
    limits = Limits(part_min=least, part_max=least * factor, parts_max=parts)
    assume(size <= limits.object_max)
    plan = plan_upload(size, dirty, base, limits, preferred_part=least, single_put_max=0)
    assert_legal(plan, dirty, base, limits)


sizes = st.one_of(
    st.integers(0, 64 * MIB),
    st.integers(0, 64 * GIB),
    st.integers(0, S3_LIMITS.object_max),
    st.integers(0, 20 * GIB).map(lambda less: S3_LIMITS.object_max - less),
)


@given(sizes, st.data())
def test_every_size_and_edit_is_legal(size: int, data: st.DataObject) -> None:
    known = data.draw(st.booleans())
    edit = st.tuples(st.integers(0, size), st.integers(1, max(1, size // 4)))
    near = st.tuples(st.integers(0, size), st.integers(1, 3 * MIB))
    edits = data.draw(st.lists(st.one_of(edit, near), max_size=8))
    dirty = ExtentSet((start, start + length) for start, length in edits) if known else None
    change = data.draw(st.sampled_from([0, 1, -1, -6 * MIB, 6 * MIB, -GIB, GIB]))
    base = BaseObject(max(0, size + change), "etag") if data.draw(st.booleans()) else None
    preferred = data.draw(st.sampled_from([MIB, 5 * MIB, 8 * MIB, 16 * MIB, GIB, 9 * GIB]))
    plan = plan_upload(size, dirty, base, preferred_part=preferred)
    assert_legal(plan, dirty, base)


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        5 * MIB,
        16 * MIB,
        16 * MIB + 1,
        10_000 * 16 * MIB,
        10_000 * 16 * MIB + 1,
        5 * GIB + 1,
        S3_LIMITS.object_max - 1,
        S3_LIMITS.object_max,
    ],
)
def test_fresh_files_of_every_size(size: int) -> None:
    plan = plan_upload(size)
    assert_legal(plan, None, None)
    assert plan.upload_bytes == size
    assert plan.single == (size <= 16 * MIB)
    lengths = {p.size for p in plan.parts[:-1]}
    assert len(lengths) <= 1, "equal parts, so that versions compare part by part"


def test_a_file_beyond_the_limit() -> None:
    with pytest.raises(OSError, match="exceeds") as caught:
        plan_upload(S3_LIMITS.object_max + 1)
    assert caught.value.errno == errno.EFBIG


def test_one_byte_appended_to_512_mib() -> None:
    base = BaseObject(512 * MIB, "etag")
    plan = plan_upload(512 * MIB + 1, ExtentSet(), base)
    assert_legal(plan, ExtentSet(), base)
    assert plan.upload_bytes == 1


@pytest.mark.parametrize("start", [0, 4096, 256 * MIB, 512 * MIB - 4096])
def test_4_kib_changed_in_512_mib(start: int) -> None:
    base, dirty = BaseObject(512 * MIB, "etag"), ExtentSet([(start, start + 4096)])
    plan = plan_upload(512 * MIB, dirty, base)
    assert_legal(plan, dirty, base)
    assert plan.upload_bytes <= 5 * MIB


def test_truncation_sends_nothing() -> None:
    base = BaseObject(GIB, "etag")
    plan = plan_upload(100 * MIB, ExtentSet(), base)
    assert_legal(plan, ExtentSet(), base)
    assert plan.upload_bytes == 0
    assert not plan.single


@pytest.mark.parametrize("size", [1, 5 * MIB, 5 * GIB])
def test_changed_metadata_alone_is_one_copy(size: int) -> None:
    plan = plan_upload(size, ExtentSet([(size, size + 9)]), BaseObject(size, "etag"))
    assert plan.single
    assert [p.source for p in plan.parts] == [COPY]


def test_an_unknown_session_sends_everything() -> None:
    plan = plan_upload(GIB, None, BaseObject(GIB, "etag"))
    assert plan.upload_bytes == GIB


def test_one_edit_in_the_largest_object_sends_one_part() -> None:
    size = S3_LIMITS.object_max
    base, dirty = BaseObject(size, "etag"), ExtentSet([(size // 3, size // 3 + 1)])
    plan = plan_upload(size, dirty, base)
    assert_legal(plan, dirty, base)
    assert plan.upload_bytes == 5 * GIB, "no room for more parts than whole ones"


def test_more_scattered_edits_than_parts() -> None:
    """The 5,000 largest gaps are copied; planning stays quick."""
    random = Random(1)
    starts = sorted(random.sample(range(0, TIB, MIB), 20_000))
    dirty, base = ExtentSet((s, s + 4096) for s in starts), BaseObject(TIB, "etag")
    began = time.process_time()
    plan = plan_upload(TIB, dirty, base)
    assert time.process_time() - began < 5
    assert_legal(plan, dirty, base)
    gaps = sorted(end - start for start, end in dirty.gaps(0, TIB))
    assert plan.copy_bytes > 0.98 * sum(gaps[-5000:])
