"""Which requests were applied, for a daemon that gets them again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cachefs.meta import Meta
from cachefs.meta.applied import current_request


@pytest.fixture(autouse=True)
def no_request() -> Iterator[None]:
    token = current_request.set(0)
    yield
    current_request.reset(token)


def mutate(meta: Meta, request: int) -> None:
    current_request.set(request)
    with meta.transaction():
        meta.set_setting("mutation", str(request))


def test_a_request_is_noted_with_its_mutation(meta: Meta) -> None:
    mutate(meta, 8)
    mutate(meta, 10)
    assert meta.applied.all() == {8, 10}


def test_without_a_request_nothing_is_noted(meta: Meta) -> None:
    with meta.transaction():
        meta.set_setting("mutation", "1")
    assert meta.applied.all() == set()


def test_only_its_first_transaction_counts(meta: Meta) -> None:
    mutate(meta, 8)
    assert current_request.get() == 0


def test_one_that_was_rolled_back_was_not_applied(meta: Meta) -> None:
    current_request.set(8)
    with pytest.raises(KeyError), meta.transaction():
        raise KeyError
    assert meta.applied.all() == set()


def test_one_that_succeeds_at_the_second_try_is_noted(meta: Meta) -> None:
    """As when the disk was full, and room was made."""
    current_request.set(8)
    tries: list[int] = []
    note = meta.db.before_commit

    def fail_once() -> None:
        note()
        tries.append(1)
        if len(tries) == 1:
            raise KeyError

    meta.db.before_commit = fail_once
    with pytest.raises(KeyError), meta.transaction():
        meta.set_setting("mutation", "1")
    with meta.transaction():
        meta.set_setting("mutation", "1")
    assert meta.applied.all() == {8}


def test_the_ring_keeps_as_many_as_can_be_in_flight(meta: Meta) -> None:
    with meta.transaction():
        pass
    for request in range(2, 2 * 2100 + 2, 2):
        mutate(meta, request)
    kept = meta.applied.all()
    assert len(kept) == 2048
    assert kept == set(range(2 * 2100 - 2 * 2047, 2 * 2100 + 2, 2))


def test_numbers_are_as_the_kernel_counts_them(meta: Meta) -> None:
    mutate(meta, (1 << 62) + 2)
    assert meta.applied.all() == {(1 << 62) + 2}


def test_a_new_connection_starts_anew(meta: Meta) -> None:
    mutate(meta, 8)
    meta.applied.clear()
    assert meta.applied.all() == set()
