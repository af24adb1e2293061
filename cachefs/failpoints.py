"""Named places in every mutation where a test can end the daemon, to prove what survives it.

A facility for tests, harmless to anybody else: nothing happens, at the cost of looking at one bool,
unless `CACHEFS_FAILPOINTS` names a file when the daemon starts. Then, each time a point is reached,
the first plan in that file is looked at:

    [{"action": "kill", "point": "FSYNC_AFTER_FILE", "hit": 2}, {"action": "kill", ...}]

The daemon takes the plan out of the file and kills itself (SIGKILL) when it reaches that point for
the second time; the next daemon goes on with the next plan. `{"action": "record", "file": PATH}`
appends the name of each point that is reached to a file instead. (`fuse.failpoints` reads the same
file for its plans about whole requests.)

A name says after (or before) which step of which operation the daemon stands: `OP_AFTER_STEP`. A
transaction has two, by the change it makes: `UNLINK_BEFORE_COMMIT`, `UNLINK_AFTER_COMMIT`; so has a
request to the store: `PUT_BEFORE_REQUEST`, `PUT_AFTER_ANSWER`. What is missing from a name is where
nothing on the disk or in the store has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

_FILE = os.environ.get("CACHEFS_FAILPOINTS", "")
ARMED = bool(_FILE)
"""Whether this process has failpoints at all."""


class Point:
    """Steps that are no transactions and no requests to the store."""

    # The cache device.
    DEVICE_AFTER_META_DIR = "DEVICE_AFTER_META_DIR"
    DEVICE_AFTER_FILES_DIR = "DEVICE_AFTER_FILES_DIR"
    DEVICE_AFTER_SYNC = "DEVICE_AFTER_SYNC"
    DEVICE_AFTER_NAME = "DEVICE_AFTER_NAME"
    DEVICE_AFTER_NAMED = "DEVICE_AFTER_NAMED"
    FILE_AFTER_CREATE = "FILE_AFTER_CREATE"
    FILE_AFTER_SHARD = "FILE_AFTER_SHARD"
    FILE_AFTER_UNLINK = "FILE_AFTER_UNLINK"
    FILE_AFTER_SET_ASIDE = "FILE_AFTER_SET_ASIDE"
    FILE_AFTER_CLOSED_MARK = "FILE_AFTER_CLOSED_MARK"
    SYNC_DIR_AFTER_SHARD = "SYNC_DIR_AFTER_SHARD"
    SYNC_DIR_AFTER_FILES = "SYNC_DIR_AFTER_FILES"
    ADOPT_AFTER_LINK = "ADOPT_AFTER_LINK"
    CLONE_AFTER_BYTES = "CLONE_AFTER_BYTES"
    CLOSINGS_AFTER_ALLOCATE = "CLOSINGS_AFTER_ALLOCATE"
    JOURNAL_AFTER_ALLOCATE = "JOURNAL_AFTER_ALLOCATE"
    JOURNAL_AFTER_HEADER = "JOURNAL_AFTER_HEADER"
    JOURNAL_AFTER_LINK = "JOURNAL_AFTER_LINK"
    SPARE_AFTER_CREATE = "SPARE_AFTER_CREATE"
    SPARE_AFTER_CLOSE = "SPARE_AFTER_CLOSE"
    RESERVE_AFTER_CREATE = "RESERVE_AFTER_CREATE"
    RESERVE_AFTER_ALLOCATE = "RESERVE_AFTER_ALLOCATE"
    RESERVE_AFTER_RELEASE = "RESERVE_AFTER_RELEASE"
    FILL_AFTER_FETCH = "FILL_AFTER_FETCH"
    SYNC_ALL_AFTER_SYNC = "SYNC_ALL_AFTER_SYNC"

    # The database.
    RING_AFTER_CREATE = "RING_AFTER_CREATE"
    RING_AFTER_NAME = "RING_AFTER_NAME"
    DATABASE_AFTER_CREATE = "DATABASE_AFTER_CREATE"
    DATABASE_AFTER_SCHEMA = "DATABASE_AFTER_SCHEMA"
    DATABASE_AFTER_OPEN = "DATABASE_AFTER_OPEN"
    DATABASE_BEFORE_SYNC = "DATABASE_BEFORE_SYNC"
    DATABASE_AFTER_SYNC = "DATABASE_AFTER_SYNC"
    DATABASE_AFTER_CHECKPOINT = "DATABASE_AFTER_CHECKPOINT"
    DATABASE_AFTER_CLOSE = "DATABASE_AFTER_CLOSE"

    # Files.
    OPEN_AFTER_CACHE_FILE = "OPEN_AFTER_CACHE_FILE"
    OPEN_AFTER_INODE = "OPEN_AFTER_INODE"
    OPEN_AFTER_BEGIN = "OPEN_AFTER_BEGIN"
    OPEN_REMOTE_AFTER_FILE = "OPEN_REMOTE_AFTER_FILE"
    FILLED_AFTER_SAVE = "FILLED_AFTER_SAVE"
    WRITE_AFTER_ROOM = "WRITE_AFTER_ROOM"
    WRITE_AFTER_BYTES = "WRITE_AFTER_BYTES"
    TRUNCATE_AFTER_FILE = "TRUNCATE_AFTER_FILE"
    TIMES_AFTER_FILE = "TIMES_AFTER_FILE"
    FSYNC_AFTER_FILE = "FSYNC_AFTER_FILE"
    FSYNC_AFTER_DIRECTORY = "FSYNC_AFTER_DIRECTORY"
    FSYNC_AFTER_ANCHOR = "FSYNC_AFTER_ANCHOR"
    FSYNC_AFTER_SIZE = "FSYNC_AFTER_SIZE"
    FSYNC_AFTER_DATABASE = "FSYNC_AFTER_DATABASE"
    FSYNC_AFTER_NOTE = "FSYNC_AFTER_NOTE"

    # Rewriting what is sealed.
    BEGIN_AFTER_TIME = "BEGIN_AFTER_TIME"
    TAKE_OVER_AFTER_FSYNC = "TAKE_OVER_AFTER_FSYNC"
    TAKE_OVER_AFTER_SYNC = "TAKE_OVER_AFTER_SYNC"
    COPY_FOR_WRITER_AFTER_CLONE = "COPY_FOR_WRITER_AFTER_CLONE"
    COPY_FOR_WRITER_AFTER_SWITCH = "COPY_FOR_WRITER_AFTER_SWITCH"
    COPY_FOR_UPLOAD_AFTER_BLOCK = "COPY_FOR_UPLOAD_AFTER_BLOCK"
    COPY_FOR_UPLOAD_AFTER_STOP = "COPY_FOR_UPLOAD_AFTER_STOP"
    CLONE_AFTER_FSYNC = "CLONE_AFTER_FSYNC"
    COPY_FOR_UPLOAD_AFTER_CLONE = "COPY_FOR_UPLOAD_AFTER_CLONE"
    COPY_FOR_UPLOAD_AFTER_SYNC = "COPY_FOR_UPLOAD_AFTER_SYNC"
    MERGE_AFTER_STOP = "MERGE_AFTER_STOP"
    MERGE_AFTER_SYNC = "MERGE_AFTER_SYNC"
    SPOIL_AFTER_STOP = "SPOIL_AFTER_STOP"
    REOPEN_AFTER_SAVE = "REOPEN_AFTER_SAVE"

    # From RAM to a disk.
    COPY_AFTER_FSYNC = "COPY_AFTER_FSYNC"
    SPILL_AFTER_SYNC = "SPILL_AFTER_SYNC"
    MOVE_OPEN_AFTER_SWITCH = "MOVE_OPEN_AFTER_SWITCH"
    TRIM_AFTER_PUNCH = "TRIM_AFTER_PUNCH"
    TRIM_AFTER_SAVE = "TRIM_AFTER_SAVE"
    OFFLOAD_AFTER_SYNC = "OFFLOAD_AFTER_SYNC"
    OFFLOAD_AFTER_PUNCH = "OFFLOAD_AFTER_PUNCH"
    BORROW_AFTER_FILE = "BORROW_AFTER_FILE"
    BORROW_AFTER_SYNC = "BORROW_AFTER_SYNC"
    BRING_BACK_AFTER_BYTES = "BRING_BACK_AFTER_BYTES"
    CUT_AFTER_FSYNC = "CUT_AFTER_FSYNC"
    RESCUE_AFTER_BYTES = "RESCUE_AFTER_BYTES"

    # Names.
    LEAVING_AFTER_SYNC = "LEAVING_AFTER_SYNC"
    LIST_AFTER_PAGE = "LIST_AFTER_PAGE"
    LIST_AFTER_MARK = "LIST_AFTER_MARK"
    RENAME_AFTER_LISTING = "RENAME_AFTER_LISTING"

    # Flushing.
    SEND_PARTS_AFTER_START = "SEND_PARTS_AFTER_START"
    SEND_PARTS_AFTER_CONFIRM = "SEND_PARTS_AFTER_CONFIRM"
    SEND_PARTS_AFTER_ALL = "SEND_PARTS_AFTER_ALL"
    ABORT_AFTER_FORGET = "ABORT_AFTER_FORGET"
    RESCUE_AFTER_INTENT = "RESCUE_AFTER_INTENT"
    RESCUE_AFTER_COPY = "RESCUE_AFTER_COPY"

    # Recovery.
    RECOVER_AFTER_REMEMBER = "RECOVER_AFTER_REMEMBER"
    RECOVER_AFTER_SNAPSHOTS = "RECOVER_AFTER_SNAPSHOTS"
    RECOVER_AFTER_COPIES = "RECOVER_AFTER_COPIES"
    RECOVER_AFTER_OPEN = "RECOVER_AFTER_OPEN"
    RECOVER_AFTER_UNLINKED = "RECOVER_AFTER_UNLINKED"
    RECOVER_AFTER_FILES = "RECOVER_AFTER_FILES"


class Change:
    """What a transaction does: it has a point before its commit and one after it."""

    # Names and attributes.
    CREATE = "CREATE"
    ADOPT = "ADOPT"
    MKDIR = "MKDIR"
    SYMLINK = "SYMLINK"
    LINK = "LINK"
    UNLINK = "UNLINK"
    RMDIR = "RMDIR"
    RENAME = "RENAME"
    EXCHANGE = "EXCHANGE"
    SETATTR = "SETATTR"
    SETXATTR = "SETXATTR"
    LIST = "LIST"
    APPEAR = "APPEAR"
    KNOW = "KNOW"
    ROUND_LISTING = "ROUND_LISTING"
    ROUND_DIRECTORY = "ROUND_DIRECTORY"
    ROUND_ENTRY = "ROUND_ENTRY"

    # Content.
    OPEN_REMOTE = "OPEN_REMOTE"
    FOLD = "FOLD"
    FORGET_CACHED = "FORGET_CACHED"
    SEAL = "SEAL"
    SEAL_UNCHANGED = "SEAL_UNCHANGED"
    FORGET_INODE = "FORGET_INODE"
    TAKE_OVER = "TAKE_OVER"
    COPY_FOR_WRITER = "COPY_FOR_WRITER"
    COPY_FOR_UPLOAD = "COPY_FOR_UPLOAD"
    MERGE = "MERGE"
    SNAPSHOT = "SNAPSHOT"
    EVICT = "EVICT"
    USES = "USES"
    SYNCED = "SYNCED"
    BEGIN_COPY = "BEGIN_COPY"
    COPIED = "COPIED"
    DROP_COPY = "DROP_COPY"
    SPILL = "SPILL"
    SPILLED = "SPILLED"
    MOVE_OPEN = "MOVE_OPEN"
    REGAIN = "REGAIN"
    TRIM = "TRIM"
    OFFLOAD = "OFFLOAD"
    BORROW = "BORROW"
    BRING_BACK = "BRING_BACK"
    CUT = "CUT"
    RECOVER_SPANS = "RECOVER_SPANS"

    # Flushing.
    INTEND = "INTEND"
    RECORD = "RECORD"
    REFRESH = "REFRESH"
    PUBLISHED = "PUBLISHED"
    RELOCATED = "RELOCATED"
    UNPUBLISHED = "UNPUBLISHED"
    BEGIN_UPLOAD = "BEGIN_UPLOAD"
    BEGIN_SPAN = "BEGIN_SPAN"
    LEAVE_SPAN = "LEAVE_SPAN"
    FORGET_SPANS = "FORGET_SPANS"
    INSIST = "INSIST"
    CANCEL = "CANCEL"
    SET_STATE = "SET_STATE"
    STALL = "STALL"
    PAUSE = "PAUSE"
    CONFLICT = "CONFLICT"
    REVIVE = "REVIVE"
    RESCUE = "RESCUE"
    SUPERSEDE = "SUPERSEDE"

    # Recovery.
    RECOVER = "RECOVER"
    DROP_SNAPSHOT = "DROP_SNAPSHOT"
    SETTLE_OPEN = "SETTLE_OPEN"
    RELEASE_HELD = "RELEASE_HELD"
    FORGET_MISSING = "FORGET_MISSING"
    LOSE = "LOSE"
    TAKE_COPY = "TAKE_COPY"
    FORGET_COPY = "FORGET_COPY"


_lock = threading.Lock()
_hits: Counter[tuple[int, str]] = Counter()


def reach(point: str) -> None:
    """The daemon stands at a point."""
    if ARMED:
        _reached(point)


def before_commit(change: str) -> None:
    """A transaction has done everything but its commit."""
    if ARMED and change:
        _reached(f"{change}_BEFORE_COMMIT")


def after_commit(change: str) -> None:
    """A transaction is committed, and nobody knows yet."""
    if ARMED and change:
        _reached(f"{change}_AFTER_COMMIT")


def before_request(method: str) -> None:
    """A request to the store is about to be made."""
    if ARMED:
        _reached(f"{method.upper()}_BEFORE_REQUEST")


def after_answer(method: str) -> None:
    """The store has done it, and nobody knows yet."""
    if ARMED:
        _reached(f"{method.upper()}_AFTER_ANSWER")


def plans() -> list[dict[str, Any]]:
    """What the file says now; nothing while it is not there."""
    with contextlib.suppress(FileNotFoundError):
        found: list[dict[str, Any]] = json.loads(Path(_FILE).read_bytes())
        return found
    return []


def _reached(point: str) -> None:
    with _lock:
        found = plans()
        plan = found[0] if found else {}
        if plan.get("action") == "record":
            with open(plan["file"], "a", encoding="ascii") as log:
                log.write(f"{point}\n")
        if plan.get("action") == "kill" and plan["point"] == point:
            _hits[len(found), point] += 1
            if _hits[len(found), point] >= plan.get("hit", 1):
                _die(found[1:])


def _die(rest: list[dict[str, Any]]) -> None:
    fresh = Path(f"{_FILE}.{os.getpid()}")
    fresh.write_text(json.dumps(rest))
    os.replace(fresh, _FILE)
    os.kill(os.getpid(), signal.SIGKILL)
