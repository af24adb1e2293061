"""Every step that changes something has a failpoint: read from the source, so none is forgotten."""

from __future__ import annotations

import ast
import timeit
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cachefs import failpoints
from cachefs.failpoints import Change, Point
from tests.crash.points import all_points

PACKAGE = Path(failpoints.__file__).parent
ROOMS = ("vfs", "cache", "meta", "flush")
CHANGING = {
    f"os.{name}"
    for name in (
        *("chmod", "copy_file_range", "fallocate", "fchmod", "fdatasync", "fsync", "ftruncate"),
        *("link", "makedirs", "mkdir", "posix_fallocate", "pwrite", "pwritev", "remove"),
        *("removexattr", "rename", "replace", "rmdir", "sendfile", "setxattr", "symlink"),
        *("truncate", "unlink", "utime", "write"),
    )
}
"""Functions of `os` that change something on a disk."""
WAITING = {
    "acquire",
    "changed",
    "checkpoint",
    "enter_async_context",
    "sleep",
    "sleep_forever",
    "wait",
}
"""What is only waited for: nothing has changed when it is over."""
HOOKS = {
    "before_change",
    "before_rewrite",
    "move_away",
    "fetched",
    "find",
    "on_changed",
    "rescue",
    "shelter",
    "sync_meta",
    "_sweep",
    "_sync_meta",
    "work",
}
"""Functions that are passed in: theirs are the points."""
EXEMPT = {
    "cache.apart": "makes calls: theirs are the points",
    "cache.doubt": "FSYNC_AFTER_FILE, CUT_AFTER_FSYNC and OFFLOAD_AFTER_SYNC stand behind it",
    "cache.fresh": "empty files that nobody knows, by CacheDevice.create and .remove",
    "cache.leftovers": "a note in memory of whose files lie there; one cut short removes nothing",
    "cache.speed": "bytes that nobody reads, to see how fast the device is",
    "cache.heartbeat": "bytes that nobody reads, to see whether the device answers",
    "cache.marks": "what a file says of itself, inside SEAL or before FILE_AFTER_CLOSED_MARK",
    "cache.lock": "the pid in the lock file is for people; the lock is the kernel's",
    "cache.clone": "a copy that nobody knows yet: CLONE_AFTER_BYTES stands behind it",
    "cache.system._tells_changes_apart": "a file without a name, to learn about the filesystem",
    "cache.system.write_all": "bytes of a write: WRITE_AFTER_BYTES stands behind it",
    "cache.device._fsync_directory": "SYNC_DIR_AFTER_* and DEVICE_AFTER_SYNC stand behind it",
    "cache.device.CacheDevice._link": "ADOPT_AFTER_LINK stands behind it",
    "cache.ledger": "counts; what it changes is the reserve, which has points",
    "vfs.contents.Contents.new_file": "looks; the file is made by CacheDevice.create",
    "vfs.spilling.Spiller._copy_from": "looks; BEGIN_COPY and COPY_AFTER_FSYNC stand behind",
    "vfs.eviction.Eviction.evict": "looks; EVICT and what is behind it have points",
    "vfs.endings.Endings.remove_all": "FILE_AFTER_UNLINK stands behind each",
    "vfs.clock": "a time of a file that is to be written to: BEGIN_AFTER_TIME stands behind it",
    "vfs.files.Files._read": "reads",
    "vfs.streaming.Streams._read_here": "reads",
    "meta.ring._name": "RING_AFTER_NAME stands behind it",
    "meta.deferral.Deferral.reserve_index": "DATABASE_AFTER_OPEN stands behind it",
    "meta.ring._replay": "bytes of the log that go to their places, however often",
    "meta.ring._write_at": "the same",
    "meta.fence": "nothing but locks, and a file that says nothing: DATABASE_AFTER_OPEN is behind",
    "meta.logsync": "the same bytes to the same places of the log; DATABASE_AFTER_SYNC is behind",
    "meta.database._sync_directory": "DATABASE_AFTER_OPEN stands behind it",
    "cache.unkept": "bytes in memory that are read and dropped: nothing outlives the process",
    "cache.warmdir": "copies of another tier: nobody sees them before one rename shows them",
    "flush.movers": "carries requests between processes; what they do has points in the client",
}
"""Module, class or function -> why it has no point of its own."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((PACKAGE / room).glob("*.py")):
            yield f"{room}.{path.stem}", ast.parse(path.read_text())


def functions(
    name: str, node: ast.AST
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions with their full names; those inside of others belong to these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from functions(f"{name}.{child.name}", child)


@cache
def own_coroutines() -> frozenset[str]:
    """Names of coroutines in these rooms: whoever awaits one leaves the points to it."""
    return frozenset(
        node.name for _, tree in sources() for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef)
    )  # fmt: skip


@cache
def functions_with_points() -> frozenset[str]:
    """Names of functions that reach a point."""
    return frozenset(
        name.rpartition(".")[2] for room, tree in sources() for name, node in functions(room, tree)
        if has_point(node)
    )  # fmt: skip


def called(node: ast.AST) -> str:
    """The last name of what is called or passed: `os.fsync` -> `fsync`."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def has_point(function: ast.AST, after: int = 0) -> bool:
    """Whether a point is reached in a function, at or after a line."""
    return any(
        isinstance(node, ast.Call)
        and called(node) in ("reach", "before_request", "after_answer", "after_commit")
        and node.lineno >= after
        for node in ast.walk(function)
    )


def steps(function: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that changes something or may take its time."""
    for node in ast.walk(function):
        if isinstance(node, ast.Await) and not is_left_to_others(node.value):
            yield node.lineno, f"await {ast.unparse(node.value)[:60]}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CHANGING:
            yield node.lineno, ast.unparse(node.func)


def is_left_to_others(value: ast.AST) -> bool:
    name = called(value)
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(("run_sync", "apart.run")):
        return called(value.args[0]) in functions_with_points()
    return name in WAITING or name in own_coroutines() or name in HOOKS


def is_exempt(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in EXEMPT)


def test_every_step_has_a_point() -> None:
    missing, found = [], 0
    for room, tree in sources():
        for name, node in functions(room, tree):
            for line, what in steps(node):
                found += 1
                if not is_exempt(name) and not has_point(node, line):
                    missing.append(f"{name}:{line}: {what}")
    print(f"{found} steps, {len(all_points())} points")
    assert not missing, "\n".join(missing)


def test_every_transaction_says_what_it_changes() -> None:
    nameless = [
        f"{room}:{node.lineno}"
        for room, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) == "transaction" and not node.args
        if room != "meta.inspection"  # no daemon runs then, and what is mended can be mended again
    ]
    assert not nameless


def test_every_point_is_in_one_place() -> None:
    """So that its name says where the daemon stands."""
    used = Counter(
        (node.value.id, node.attr)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "fuse"  # has points of another kind
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("Point", "Change")
    )
    points = {("Point", name) for name in vars(Point) if name.isupper()}
    changes = {("Change", name) for name in vars(Change) if name.isupper()}
    assert used.keys() == points | changes
    assert {each for each, count in used.items() if count > 1} == set()


def test_there_are_many() -> None:
    assert len(all_points()) >= 60


def test_exemptions_are_needed() -> None:
    """An exemption of what is not there any more would hide what comes there next."""
    names = [n for room, tree in sources() for n, node in functions(room, tree) if [*steps(node)]]
    for each in EXEMPT:
        assert any(name == each or name.startswith(f"{each}.") for name in names), each


def test_an_unarmed_point_costs_next_to_nothing() -> None:
    """One look at one bool; less than a microsecond even on a busy machine."""
    assert not failpoints.ARMED
    point = Point.WRITE_AFTER_BYTES
    seconds = min(timeit.repeat(lambda: failpoints.reach(point), number=10_000, repeat=20))
    print(f"{seconds / 10_000 * 1e9:.0f} ns")
    assert seconds / 10_000 < 5e-6
