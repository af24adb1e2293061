"""The connection: transactions, durability, schema versions.

Durability (https://sqlite.org/wal.html, https://sqlite.org/pragma.html#pragma_synchronous): the
database runs in WAL mode with ``synchronous=NORMAL``. A commit appends to the WAL file without
syncing it: it survives SIGKILL, since the page cache is the kernel's. `sync` makes every commit
so far survive a power cut by syncing the WAL file itself. That costs one fsync without taking a
database lock, so requests go on meanwhile; concurrent callers are expected to share one call.
Automatic checkpoints are off: `checkpoint` runs in another thread on a connection of its own, so
a slow disk never holds up a request. Neither does a commit, where memory is given that outlives the
process: what the disk does not take at once waits there (`meta.deferral`), survives SIGKILL too,
and is waited for by `sync`. What a disk that failed has not taken is written to it anew, before
`sync` says that it is there (`meta.logsync`).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from cachefs import failpoints
from cachefs.errors import CachefsError
from cachefs.failpoints import Point, reach
from cachefs.meta import ring, wal
from cachefs.meta.deferral import NO_LAG, PATIENCE, Deferral, Lag, defer
from cachefs.meta.fence import Fence, fenced_schema
from cachefs.meta.logsync import LogSync, PlainLog, settle_closed

SCHEMA_VERSION = 3
ADDED = (
    ("generation", "grows", "INTEGER NOT NULL DEFAULT 0"),
    ("generation", "copy_device", "INTEGER"),
    ("generation", "copy_file", "INTEGER"),
    ("generation", "copy_size", "INTEGER"),
    ("generation", "anchored", "INTEGER NOT NULL DEFAULT 0"),
    ("object", "intents", "TEXT"),
    ("upload", "meta", "TEXT"),
)
"""(table, column, type) of what came after the first databases were made."""
_COUNTED = (("inode", "ino"), ("dentry", "id"), ("generation", "gen"))
"""Tables whose numbers SQLite counted before they were reserved in blocks (`meta.numbers`)."""
_DROPPED = (("generation", "pinned"),)
CHECKPOINT_BYTES = 32 << 20
"""WAL size from which a checkpoint is worth its I/O."""
_LIVE_PATIENCE, _LIVE_PAUSE = 5.0, 0.05
"""Seconds."""
_CHECKED_BYTES = 16 << 20
"""Size up to which a database is checked page by page when it is opened: some 100 ms."""


_DISK = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_BUSY: errno.EIO,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def disk_error(error: Exception) -> int | None:
    """The errno of a database error that the disk or the machine is to blame for; None for
    others."""
    return _DISK.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)


def is_broken(error: Exception) -> bool:
    """Whether a database error says that the database itself is damaged."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN


class SchemaTooNew(CachefsError):
    """The database was written by a newer cachefs."""


class Damaged(CachefsError):
    """The database, or what was committed to it last, cannot be read."""


class Database:
    """One SQLite database in WAL mode. Not thread safe, but for `sync` and `checkpoint`."""

    def __init__(
        self,
        path: Path,
        *,
        may_create: bool = True,
        memory: Path | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Open the database at `path`, or create it if that may be. `memory`: a directory where
        commits may wait for a slow disk, after `patience` seconds; nobody else has the database
        open then.

        Raises OSError, SchemaTooNew, Damaged, or sqlite3.Error when the file is damaged; then
        nothing was changed.
        """
        self.path = path
        left = _bring_to_disk(path)
        self.note = left.note
        """What became of commits that a dead daemon left in memory; empty: all is well."""
        self.deferral: Deferral | None = None
        self.undeferred = "no memory is given to them"
        """Why commits wait for the disk, if they do."""
        try:
            log = self._look_first(path, may_create)
            if memory is not None:
                self._defer(left, memory, patience)
            self._open(path, log)
        except BaseException:
            self._give_up()
            raise
        finally:
            left.close()

    def _give_up(self) -> None:
        if hasattr(self, "_db"):
            self._db.close()
        if self.deferral is not None:
            self.deferral.close()

    def _look_first(self, path: Path, may_create: bool) -> wal.Wal:
        log = wal.examine(path)
        if log.damage is not None:
            raise Damaged(f"the write-ahead log {path}-wal is damaged: {log.damage}")
        if not path.exists() or not path.stat().st_size:
            _create(path, may_create and not log.size)
            reach(Point.DATABASE_AFTER_CREATE)
        else:
            _look(path, may_create)
        return log

    def _defer(self, left: ring.Left, memory: Path, patience: float) -> None:
        found = defer(self.path, left, memory, patience, SCHEMA_VERSION)
        if isinstance(found, str):
            self.undeferred = found
        else:
            self.deferral = found

    def _open(self, path: Path, log: wal.Wal) -> None:
        self._db = self._begin()
        self._depth = 0
        self._on_commit: list[Callable[[], None]] = []
        self.on_full: Callable[[], None] = lambda: None
        """Called when the disk had no room for a transaction, which was rolled back: make some."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called inside every transaction, last."""
        self.on_committed: Callable[[float], None] = lambda seconds: None
        """Called with the time that each transaction took."""
        self.on_rollback: list[Callable[[], None]] = []
        """Called after every rollback: memory that mirrors tables reads them anew."""
        self.execute = self._db.execute
        self.had_wal = log.size > 0
        """Whether commits lay in the WAL file, as they do unless the last daemon closed it."""
        self._index_fd = wal.open_index(path, self.deferral.index if self.deferral else None)
        self.lost_commits = wal.lost_commits(path, log, self._index_fd) if log.size else 0
        """Transactions that were written to the WAL file and cannot be read from there."""
        self._prepare()
        self._plain = PlainLog(path)
        self._sync = LogSync(path, self._index_fd, self.deferral or self._plain)
        _sync_directory(path.parent)
        reach(Point.DATABASE_AFTER_OPEN)

    def _begin(self) -> sqlite3.Connection:
        """The connection, once it has read. Without memory for the log's index it uses none."""
        if self.deferral is not None:
            try:
                db = self._read_once()
                self.deferral.reserve_index()
                return db
            except sqlite3.OperationalError as error:
                self.deferral.close()
                self.deferral, self.undeferred = None, f"no room in memory: {error}"
        return self._read_once()

    def _read_once(self) -> sqlite3.Connection:
        db = self._connect()
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self) -> None:
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            version = f"INSERT INTO setting VALUES('schema_version','{SCHEMA_VERSION}')"
            self._db.executescript(f"BEGIN;{_schema()};{version};COMMIT;")
            reach(Point.DATABASE_AFTER_SCHEMA)
        else:
            self._add_what_is_missing()
            # Any write makes SQLite create the WAL file that `sync` keeps open.
            sql = "UPDATE setting SET value=? WHERE key='schema_version'"
            self._db.execute(sql, (str(SCHEMA_VERSION),))

    def _add_what_is_missing(self) -> None:
        """Columns, tables and indexes that came or went since the schema's version was counted."""
        for table, column, kind in ADDED:
            known = {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}
            if column not in known:
                self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
        for table, column in _DROPPED:
            if any(row[1] == column for row in self._db.execute(f"PRAGMA table_info({table})")):
                self._db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        script = _schema()
        for kind in ("TABLE", "INDEX"):
            script = script.replace(f"CREATE {kind} ", f"CREATE {kind} IF NOT EXISTS ")
        self._db.executescript(script)
        if self._has_table("sqlite_sequence"):
            for table, number in _COUNTED:
                self._db.execute(
                    "INSERT OR IGNORE INTO setting SELECT ?,CAST(1+max("
                    f"(SELECT coalesce(max({number}),1) FROM {table}),"
                    "coalesce((SELECT seq FROM sqlite_sequence WHERE name=?),0)) AS TEXT)",
                    (f"next_{table}", table),
                )

    def _has_table(self, name: str) -> bool:
        sql = "SELECT 1 FROM sqlite_master WHERE type='table' AND name=?"
        return self._db.execute(sql, (name,)).fetchone() is not None

    @contextmanager
    def transaction(self, change: str = "") -> Iterator[None]:
        """All or nothing. Nested transactions join the outermost one, whose `change` (see
        `failpoints.Change`) is what counts.

        On an exception everything is rolled back: `after_commit` hooks are dropped, `on_rollback`
        hooks run.
        """
        if self._depth:
            yield
            return
        began = time.perf_counter()
        self.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
            self.before_commit()
            failpoints.before_commit(change)
            self.execute("COMMIT")
            failpoints.after_commit(change)
        except BaseException as error:
            self._on_commit.clear()
            if self._db.in_transaction:
                self._db.rollback()
            self._depth = 0
            for hook in self.on_rollback:
                hook()
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                self.on_full()
            raise
        self._depth = 0
        self.on_committed(time.perf_counter() - began)
        self._run_hooks()

    def after_commit(self, hook: Callable[[], None]) -> None:
        """Run `hook` once the current transaction is committed; at once outside of one. Given
        several times in a row it runs once."""
        if self._depth:
            if not self._on_commit or self._on_commit[-1] != hook:
                self._on_commit.append(hook)
        else:
            hook()

    def _run_hooks(self) -> None:
        while self._on_commit:
            hooks, self._on_commit = self._on_commit, []
            for hook in hooks:
                hook()

    def one(self, sql: str, args: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """First row or None."""
        row: tuple[Any, ...] | None = self.execute(sql, args).fetchone()
        return row

    def all(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows."""
        return self.execute(sql, args).fetchall()

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute a statement once for each of `rows`."""
        self._db.executemany(sql, rows)

    def insert(self, sql: str, args: Sequence[Any]) -> int:
        """Execute an INSERT, return the new row's number."""
        rowid = self.execute(sql, args).lastrowid
        assert rowid is not None
        return rowid

    def sync(self) -> None:
        """Make every commit so far survive a power cut. Blocks; any thread. Raises OSError."""
        reach(Point.DATABASE_BEFORE_SYNC)
        self._sync.sync()
        reach(Point.DATABASE_AFTER_SYNC)

    @property
    def lag(self) -> Lag:
        """How far the disk is behind with what is committed."""
        return NO_LAG if self.deferral is None else self.deferral.lag

    @property
    def crowded(self) -> bool:
        """Whether new work should wait until the disk has caught up. Cheap. (A commit always goes
        through; without any room left it waits in the middle of everything.)"""
        return self.deferral is not None and self.deferral.crowded

    @property
    def wal_bytes(self) -> int:
        """Size of the WAL file in bytes."""
        return self._plain.size

    def checkpoint(self) -> None:
        """Copy the WAL into the database file. Blocks; any thread; readers and writers go on.
        OSError: the disk has not taken the WAL."""
        side = self._connect()
        try:
            self._sync.sync()  # Of errors from now on its own descriptor is told.
            side.execute("PRAGMA wal_checkpoint(PASSIVE)")
            reach(Point.DATABASE_AFTER_CHECKPOINT)
        finally:
            side.close()

    def start_wal_anew(self) -> None:
        """Leave nothing in the WAL file, so that what cannot be read there is not met again.
        OSError."""
        self._sync.sync()
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        """Checkpoint and close."""
        with suppress(OSError):
            self._sync.settle()  # Else what is in doubt stays in the WAL.
        self._db.close()
        self._plain.close()
        os.close(self._index_fd)
        if self.deferral is not None:
            self.deferral.close()
        reach(Point.DATABASE_AFTER_CLOSE)

    def _connect(self) -> sqlite3.Connection:
        return _connect(self.path, self.deferral.vfs if self.deferral is not None else None)


def _bring_to_disk(path: Path) -> ring.Left:
    """What a dead daemon left is brought to the log, and that to the disk. OSError."""
    fence = Fence(path, SCHEMA_VERSION) if path.exists() else None
    try:
        left = ring.recover(path)
        try:
            settle_closed(path)
        except BaseException:
            left.close()
            raise
        return left
    finally:
        if fence is not None:
            fence.close()


def _create(path: Path, may_create: bool) -> None:
    if not may_create:
        # SQLite would take an empty database for a new one, and throw its WAL file away.
        what = "is empty" if path.exists() else "is missing"
        raise Damaged(f"the metadata database {path} {what}, and what it described is there")
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _look(path: Path, may_create: bool) -> None:
    """Is it a database of ours, and whole? Nothing is written: a connection that may write brings
    the WAL into the database when it ends, whatever state that is in."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
    try:
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables and not may_create:
            raise Damaged(f"the metadata database {path} is empty, what it described is there")
        if tables:
            _check_version(path, db)
        if path.stat().st_size <= _CHECKED_BYTES:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise Damaged(f"the metadata database {path} is damaged: {found.splitlines()[-1]}")
    finally:
        db.close()


def check_version(path: Path) -> None:
    """Raises SchemaTooNew for a database that this code must not open, sqlite3.Error for one that
    cannot be read; it may be in use. While its daemon writes, what is in the files may be of two
    minds for a moment."""
    deadline = time.monotonic() + _LIVE_PATIENCE
    while True:
        try:
            return _check_version_once(path)
        except sqlite3.Error:
            if not ring.pointer(path).exists() or time.monotonic() > deadline:
                raise
        time.sleep(_LIVE_PAUSE)


def _check_version_once(path: Path) -> None:
    fenced = fenced_schema(path)
    if fenced is not None:
        return _refuse_newer(path, fenced)
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
    try:
        _check_version(path, db)
    finally:
        db.close()


def _check_version(path: Path, db: sqlite3.Connection) -> None:
    row = db.execute("SELECT value FROM setting WHERE key='schema_version'").fetchone()
    _refuse_newer(path, int(row[0]) if row else 0)


def _refuse_newer(path: Path, version: int) -> None:
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{path} has schema version {version}, this cachefs knows {SCHEMA_VERSION}",
            hint="mount it with the newer cachefs that wrote it",
        )


def _sync_directory(path: Path) -> None:
    """The database and WAL files' own directory entries must survive a power cut too."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _schema() -> str:
    return resources.files("cachefs.meta").joinpath("schema.sql").read_text()


def _connect(path: Path, vfs: str | None) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}{f'?vfs={vfs}' if vfs else ''}",
        uri=True,
        isolation_level=None,
        timeout=10,
        cached_statements=512,
        check_same_thread=False,
    )
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("PRAGMA cache_size=-32768")
        db.execute("PRAGMA temp_store=MEMORY")
    except BaseException:
        db.close()
        raise
    return db
