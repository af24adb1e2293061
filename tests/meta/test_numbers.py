"""Numbers are never used twice, whatever ends in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachefs.meta import Meta
from cachefs.meta.database import Database
from cachefs.meta.numbers import Numbers


def test_they_count_from_the_first(meta: Meta) -> None:
    numbers = Numbers(meta.db, "sequence", first=7)
    assert [numbers.take() for _ in range(3)] == [7, 8, 9]


def test_more_than_a_block(meta: Meta) -> None:
    numbers = Numbers(meta.db, "sequence")
    assert [numbers.take() for _ in range(10_000)] == list(range(1, 10_001))


def test_a_crash_skips_what_was_reserved(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    before = Numbers(database, "sequence")
    taken = {before.take() for _ in range(5000)}
    database.close()
    database = Database(tmp_path / "db")
    after = Numbers(database, "sequence")
    assert not taken & {after.take() for _ in range(5000)}
    database.close()


def test_a_rollback_of_the_reservation(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    numbers = Numbers(database, "sequence")
    taken = []
    with pytest.raises(KeyError), database.transaction():
        taken.append(numbers.take())
        raise KeyError
    with database.transaction():
        taken.append(numbers.take())
    database.close()
    database = Database(tmp_path / "db")
    taken.append(Numbers(database, "sequence").take())
    assert len(set(taken)) == 3
    database.close()


def test_sequences_do_not_meet(meta: Meta) -> None:
    one, other = Numbers(meta.db, "one"), Numbers(meta.db, "other")
    assert [one.take(), other.take(), one.take()] == [1, 1, 2]
