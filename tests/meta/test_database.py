"""Transactions: all or nothing, nested ones join, hooks run when it is over."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from cachefs.meta import Meta
from cachefs.meta.database import Database, SchemaTooNew


class Trouble(Exception):
    """Something went wrong in between."""


def settings(meta: Meta) -> set[str]:
    return {row[0] for row in meta.db.all("SELECT key FROM setting")} - {"schema_version"}


def test_all_of_a_transaction_is_kept(meta: Meta) -> None:
    with meta.transaction():
        meta.set_setting("one", "1")
        meta.set_setting("two", "2")
    assert settings(meta) == {"one", "two"}


def test_nothing_of_one_that_fails_is_kept(meta: Meta) -> None:
    with pytest.raises(Trouble), meta.transaction():
        meta.set_setting("one", "1")
        raise Trouble
    assert settings(meta) == set()


def test_a_failure_outside_takes_the_inner_ones_along(meta: Meta) -> None:
    with pytest.raises(Trouble), meta.transaction():
        with meta.transaction():
            meta.set_setting("inner", "1")
        raise Trouble
    assert settings(meta) == set()


def test_a_failure_inside_that_is_caught_outside_keeps_the_rest(meta: Meta) -> None:
    """There are no savepoints: who catches one inside has to know what was done."""
    with meta.transaction():
        meta.set_setting("outer", "1")
        with pytest.raises(Trouble), meta.transaction():
            meta.set_setting("inner", "1")
            raise Trouble
    assert settings(meta) == {"outer", "inner"}


def test_a_transaction_works_after_one_that_failed(meta: Meta) -> None:
    with pytest.raises(Trouble), meta.transaction():
        raise Trouble
    with meta.transaction():
        meta.set_setting("one", "1")
    assert settings(meta) == {"one"}


def test_hooks_run_after_the_commit_in_order(meta: Meta) -> None:
    ran: list[str] = []
    with meta.transaction():
        meta.db.after_commit(lambda: ran.append("first"))
        with meta.transaction():
            meta.db.after_commit(lambda: ran.append("second"))
        assert ran == []
    assert ran == ["first", "second"]


def test_a_hook_may_begin_a_transaction_with_hooks(meta: Meta) -> None:
    ran: list[str] = []

    def again() -> None:
        with meta.transaction():
            meta.set_setting("hook", "1")
            meta.db.after_commit(lambda: ran.append("inner"))

    with meta.transaction():
        meta.db.after_commit(again)
    assert settings(meta) == {"hook"}
    assert ran == ["inner"]


def test_hooks_of_one_that_fails_never_run(meta: Meta) -> None:
    ran: list[str] = []
    with pytest.raises(Trouble), meta.transaction():
        meta.db.after_commit(lambda: ran.append("no"))
        raise Trouble
    with meta.transaction():
        pass
    assert ran == []


def test_a_hook_outside_of_a_transaction_runs_at_once(meta: Meta) -> None:
    ran: list[str] = []
    meta.db.after_commit(lambda: ran.append("now"))
    assert ran == ["now"]


def test_a_rollback_is_told_to_those_who_mirror_tables(meta: Meta) -> None:
    seen: list[set[str]] = []
    meta.db.on_rollback.append(lambda: seen.append(settings(meta)))
    with pytest.raises(Trouble), meta.transaction():
        meta.set_setting("one", "1")
        raise Trouble
    assert seen == [set()]


def test_what_is_done_before_the_commit_is_part_of_it(meta: Meta) -> None:
    def refuse() -> None:
        meta.set_setting("late", "1")
        raise Trouble

    meta.db.before_commit = refuse
    with pytest.raises(Trouble), meta.transaction():
        meta.set_setting("one", "1")
    assert settings(meta) == set()


def test_a_full_disk_is_told_and_nothing_is_kept(meta: Meta) -> None:
    told: list[str] = []
    meta.db.on_full = lambda: told.append("full")
    (pages,) = meta.db.one("PRAGMA page_count") or (0,)
    meta.db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError), meta.transaction():
        for number in range(10_000):
            meta.set_setting(f"key {number}", "x" * 100)
    assert told == ["full"]
    assert settings(meta) == set()
    meta.db.execute(f"PRAGMA max_page_count={pages + 10_000}")
    meta.set_setting("one", "1")
    assert settings(meta) == {"one"}


def test_commits_survive_the_process(tmp_path: Path) -> None:
    meta = Meta(tmp_path / "db")
    meta.set_setting("one", "1")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tmp_path.glob("db*"):
        shutil.copy(file, copy)  # As the page cache has them; nothing was closed or checkpointed.
    meta.close()
    after = Meta(copy / "db")
    assert settings(after) == {"one"}
    after.close()


def test_a_checkpoint_keeps_everything_and_needs_no_pause(meta: Meta) -> None:
    with meta.transaction():
        meta.set_setting("before", "1")
    meta.db.sync()
    meta.db.checkpoint()
    with meta.transaction():
        meta.set_setting("after", "1")
    assert settings(meta) == {"before", "after"}


def test_a_column_that_came_later_is_added(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.execute("ALTER TABLE upload DROP COLUMN meta")
    database.close()
    meta = Meta(tmp_path / "db")
    assert meta.uploads.all() == []
    meta.close()


def test_an_index_that_came_later_is_added(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.execute("DROP INDEX dentry_parent")
    database.close()
    meta = Meta(tmp_path / "db")
    assert meta.db.one("SELECT 1 FROM sqlite_master WHERE name='dentry_parent'") == (1,)
    meta.close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.execute("UPDATE setting SET value='99' WHERE key='schema_version'")
    database.close()
    with pytest.raises(SchemaTooNew, match="99"):
        Database(tmp_path / "db")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        Database(tmp_path / "db")
