"""Kills that hit a request: queued, read and not yet handled, or applied and not yet answered.

Whatever the next daemon is sent again must have happened exactly once: no EEXIST from a program's
own create, no ENOENT from its own unlink.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_readonly_disk import Ext4
from tests.e2e.test_stalled_disk import at_rest, frozen
from tests.support import fusectl
from tests.support.actor import pattern
from tests.support.client import Actor, Client
from tests.support.failpoints import Failpoints
from tests.support.mounts import MountFactory, poll

KILLED = ("ended unexpectedly",)
Command = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that is hit, what comes before it and what its program does next."""

    request: str
    """What the kernel calls it."""
    op: str
    """The handler."""
    before: tuple[Command, ...]
    command: Command
    after: tuple[Command, ...] = ()


def _saved(name: str, seed: int) -> tuple[Command, ...]:
    return ("open", 0, name, "WRONLY|CREAT"), ("write", 0, seed, 50_000), ("close", 0)


_WRITE_ON = (("write", 0, 77, 30_000), ("close", 0))
CALLS = (
    Call("CREATE", "create", (), ("open", 0, "created", "RDWR|CREAT|EXCL"), _WRITE_ON),
    Call(
        "RENAME", "rename", (*_saved("old", 1), *_saved("taken", 2)), ("rename", "old", "taken"),
        _saved("old", 3),
    ),
    Call("UNLINK", "unlink", _saved("gone", 4), ("unlink", "gone")),
    Call(
        "OPEN", "open", _saved("emptied", 5), ("open", 0, "emptied", "WRONLY|TRUNC"), _WRITE_ON
    ),
    Call("SETATTR", "setattr", _saved("cut", 6), ("truncate", "cut", 1000)),
    Call(
        "FLUSH", "flush", (("open", 0, "closed", "WRONLY|CREAT"), ("write", 0, 7, 60_000)),
        ("close", 0),
    ),
)  # fmt: skip
OTHERS = (
    Call("MKDIR", "mkdir", (), ("mkdir", "made")),
    Call("RMDIR", "rmdir", (("mkdir", "removed"),), ("rmdir", "removed")),
    Call("SYMLINK", "symlink", (), ("symlink", "target", "pointer")),
    Call("LINK", "link", _saved("one", 10), ("link", "one", "other")),
    Call(
        "REMOVEXATTR", "removexattr", (*_saved("x", 11), ("setxattr", "x", "user.a", "1")),
        ("removexattr", "x", "user.a"),
    ),
    Call("SETXATTR", "setxattr", _saved("y", 12), ("setxattr", "y", "user.a", "1")),
)  # fmt: skip
RELEASED = Call(
    "RELEASE", "release", (("open", 0, "released", "WRONLY|CREAT"), ("write", 0, 8, 60_000)),
    ("close", 0),
)  # fmt: skip
READER = Call(
    "RELEASE", "release", (*_saved("read", 9), ("open", 0, "read", "RDONLY")), ("close", 0)
)
"""The kernel asks for no FLUSH of it, so that its RELEASE can wait in the queue."""


class Victims:
    """A process for each call, and one that does the same in a local directory.

    Each call has a directory of its own: the kernel makes no two changes of one directory at once.
    """

    def __init__(self, client: Client, mounted: Path, local: Path, calls: tuple[Call, ...]) -> None:
        self._calls = calls
        self._mounted, self._local = mounted, local
        self._actors = [client.actor(mounted / call.op) for call in calls]
        self._twin = client.actor(local)
        for call, actor in self._pairs():
            for top in (mounted, local):
                (top / call.op).mkdir()
            _all(actor, call.before)

    def _pairs(self) -> Iterator[tuple[Call, Actor]]:
        return zip(self._calls, self._actors, strict=True)

    def send(self, *requests: str) -> None:
        """The calls are made; nobody waits for their results yet."""
        for call, actor in self._pairs():
            if call.request in requests:
                actor.send(*call.command)

    def finish(self) -> None:
        """Each call has succeeded, its program goes on, and both directories are the same."""
        for call, actor in self._pairs():
            assert "ok" in (got := actor.receive()), f"{call.command}: {got}"
            _all(actor, call.after)
            self._twin("reset", str(self._local / call.op))
            _all(self._twin, (*call.before, call.command, *call.after))
        assert _names(self._mounted) == _names(self._local)
        assert _files(self._mounted) == _files(self._local)


def _all(actor: Actor, commands: tuple[Command, ...]) -> None:
    for command in commands:
        actor(*command)


def _files(top: Path) -> dict[str, bytes]:
    """What the store shows of a tree."""
    files = (path for path in top.rglob("*") if path.is_file())
    return {str(path.relative_to(top)): path.read_bytes() for path in files}


def _names(top: Path) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in top.rglob("*"))


def _hit(log: str) -> Counter[str]:
    """What the last takeover found unanswered, as the new daemon tells."""
    told = re.findall(r'event="took over".*?inflight="?([A-Z0-9_: ]*)', log)[-1]
    return Counter({name: int(n) for name, _, n in (each.partition(":") for each in told.split())})


def _compare(store: Any, local: Path) -> None:
    shown = {key: store.get(key) for key in list(store.keys()) if not key.endswith("/")}
    wanted = _files(local)
    for pointer in (path for path in local.rglob("*") if path.is_symlink()):
        shown.pop(str(pointer.relative_to(local)))
    assert shown == wanted


@pytest.fixture
def local(ram_dir: Path) -> Path:
    made = ram_dir / "local"
    made.mkdir()
    return made


@pytest.mark.parametrize("point", ["begun", "applied"])
def test_read_by_the_dead_daemon(
    dir_store: Any, client: Client, mounted: MountFactory, local: Path, ram_dir: Path, point: str
) -> None:
    failpoints = Failpoints(ram_dir / "failpoints")
    mount = mounted(dir_store, env=failpoints.env, allow=KILLED)
    held = (*CALLS, *OTHERS)
    victims = Victims(client, mount.path, local, (*held, RELEASED))
    ops = [call.op for call in held]
    seen = len(mount.log)
    failpoints.arm("hold", point, "release")
    victims.send("RELEASE")
    failpoints.reached(mount, seen, "release")
    failpoints.arm("hold", point, *ops)
    victims.send(*(call.request for call in held))
    failpoints.reached(mount, seen, *ops)
    failpoints.disarm()
    mount.took_over(mount.kill_daemon())
    hit = _hit(mount.log)
    print(f"in flight at the kill, {point}:", dict(hit))
    assert {call.request for call in (*held, RELEASED)} <= hit.keys()
    victims.finish()
    mount.wait()
    _compare(dir_store, local)


def test_waiting_in_the_kernel(
    dir_store: Any, client: Client, mounted: MountFactory, local: Path
) -> None:
    """The daemon has read nothing of them. (What waits of a create is its LOOKUP.)"""
    mount = mounted(dir_store, allow=KILLED)
    calls = (*CALLS, READER)
    victims = Victims(client, mount.path, local, calls)
    mount.kill_daemon(signal.SIGSTOP, wait=False)
    victims.send(*(call.request for call in calls))
    poll(lambda: fusectl.waiting(mount.path) >= len(calls), what="all of them in the queue")
    print("in the queue at the kill:", *(call.request for call in calls))
    mount.took_over(mount.kill_daemon())
    victims.finish()
    mount.wait()
    _compare(dir_store, local)


def _threads(pid: int) -> set[tuple[str, str]]:
    """Name and state of each thread of a process (proc_pid_stat(5))."""
    stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    parts = [each.partition("(")[2].rpartition(") ") for each in stats]
    return {(name, rest[0]) for name, _, rest in parts}


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
def test_held_up_by_the_disk(
    dir_store: Any, client: Client, mounted: MountFactory, tmp_path: Path, after_mounts: ExitStack
) -> None:
    """A thread of the dead daemon is at a write still, and ends only once the disk goes on."""
    disk = Ext4(tmp_path)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", disk.top], check=True))
    options = {"cache.size": "64MiB", "cache.meta_reserve": "1MiB"}
    mount = mounted(dir_store, cache_dirs=[disk.top / "cache"], options=options, allow=KILLED)
    actor = client.actor(mount.path)
    actor("open", 0, "file", "WRONLY|CREAT")
    actor("write", 0, 1, 100_000)
    poll(lambda: at_rest(mount))
    old = mount.daemon_pid
    with frozen(disk):
        actor.send("write", 0, 2, 100_000)
        poll(lambda: ("cachefs-disk", "D") in _threads(old), what="the write at the disk")
        assert mount.status()["dirty_files"] == 1
        mount.kill_daemon(wait=False)
        poll(lambda: {state for _, state in _threads(old)} <= {"D", "Z"}, what="the kill")
    mount.took_over(old)
    assert actor.receive() == {"ok": 100_000}
    assert _hit(mount.log)["WRITE"] == 1
    actor("close", 0)
    mount.wait()
    assert dir_store.get("file") == pattern(1, 100_000) + pattern(2, 100_000)
