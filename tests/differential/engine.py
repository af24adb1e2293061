"""Runs one program on a mount and on a local directory and compares every answer.

Each side has one client process per actor. A step is sent to both sides and the two answers are
compared: results, errnos, content, attributes. What may differ, and why:

- inode numbers: each local number must go with one number of the mount (a bijection);
- times: one set by utimens must be equal; any other must be a time of this run, and between two
  looks at the same inode it must have changed on both sides or on neither, and the mount's ctime
  never goes back. A local filesystem whose clock has ticks (Linux before 6.13) may hide a change
  that falls into the tick of the one before: such a change may be seen on the mount alone;
- times after truncate(2) of a file of holes, or an empty one: disks move them even if it has that
  size already, tmpfs does not;
- size and link count of directories, blocks of anything: filesystems count them differently;
- SEEK_DATA and SEEK_HOLE: a filesystem may report a hole as data, never data as a hole;
- atime: not compared;
- exchanging a directory (RENAME_EXCHANGE): a bucket cannot, so once it holds something of it the
  mount may say EINVAL, as filesystems without that flag do. The local side is put back then.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from tests.differential.programs import Program, Step, as_text
from tests.support.client import Actor

EXCHANGE = 2
"""RENAME_EXCHANGE of renameat2(2)."""
CLOCK_SLACK = 20_000_000
"""The kernel's coarse clock may lag this much, in ns."""


def has_fine_clock(directory: Path) -> bool:
    """Whether two changes of a file in `directory` always have different times, once looked at."""
    probe = directory / "probe"
    probe.touch()
    seen = set()
    for _ in range(20):
        probe.chmod(0o600)
        seen.add(probe.stat().st_ctime_ns)
    probe.unlink()
    return len(seen) == 20


class Difference(AssertionError):
    """The two sides did not do the same."""


@dataclass(slots=True)
class Side:
    """One directory and the processes that work in it."""

    name: str
    actors: list[Actor]
    root: Path | None = None


@dataclass(slots=True)
class Memory:
    """What was seen of inodes so far in this program: local number -> the mount's."""

    began: int
    inodes: dict[int, int] = field(default_factory=dict)
    times: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Local number -> name of a time -> the local and the mount's, in ns."""
    stored: set[int] = field(default_factory=set)
    """Inodes with stores through mappings: when their mtime moves is up to the kernel."""
    timeless: set[int] = field(default_factory=set)
    """Inodes whose times here are not what a disk would have: those that tmpfs does not move at a
    truncation, and directories of an exchange that was undone."""


def _message(step: Step, number: int, local: Any, mount: Any, why: str) -> str:
    return f"step {number} {step!r}: {why}\n  local: {local}\n  mount: {mount}"


class Engine:
    """Two sides, and the comparison of what they answer."""

    def __init__(
        self,
        local: list[Actor],
        mount: list[Actor],
        special: Callable[[str], None] | None = None,
        *,
        fine_clock: bool,
    ) -> None:
        """`fine_clock`: see `has_fine_clock`; of the local side."""
        self.local = Side("local", local)
        self.mount = Side("mount", mount)
        self._special = special
        self._fine_clock = fine_clock
        self._memory = Memory(0)
        self.steps = 0

    # ---- running -------------------------------------------------------------------------------

    def run(self, program: Program, local_root: Path, mount_root: Path) -> None:
        """Run the program in two fresh directories. Raises Difference, with the program's text."""
        self.local.root, self.mount.root = local_root, mount_root
        self._memory = Memory(time.time_ns() - CLOCK_SLACK)
        self.reset()
        try:
            for number, step in enumerate(program):
                self._step(number, step)
            self._trees(len(program), "open")
            self.reset()
            self._trees(len(program), "closed")
        except Difference as error:
            self.reset()
            raise Difference(f"{error}\nprogram = {as_text(program)}") from None

    def reset(self) -> None:
        """Close everything on both sides."""
        for side in (self.local, self.mount):
            for actor in side.actors:
                actor.ask("reset", str(side.root))

    def _step(self, number: int, step: Step) -> None:
        actor, op, *arguments = step
        self.steps += 1
        if op.startswith("!"):
            if op in ("!remount", "!crash"):
                self.reset()
            if self._special:
                self._special(op)
            return
        answers = self._both(actor, [op, *arguments])
        if op == "renameat2" and self._put_back(actor, arguments, *answers):
            return
        why = self._compare(op, arguments, *answers)
        if why:
            raise Difference(_message(step, number, *answers, why))
        self._note(actor, op, arguments, answers[0])

    def _put_back(self, actor: int, arguments: list[Any], local: Any, mount: Any) -> bool:
        """Undo an exchange that the mount may refuse and did; False if it was none."""
        if "ok" not in local or mount.get("errno") != "EINVAL" or arguments[2] != EXCHANGE:
            return False
        here = self.local.actors[actor]
        if all(here("lstat", name)["type"] != stat.S_IFDIR for name in arguments[:2]):
            return False
        here("renameat2", *arguments)
        self._memory.times.clear()
        for name in arguments[:2]:  # the local directories were changed, twice
            self._memory.timeless.add(here("lstat", str(PurePath(name).parent))["ino"])
        return True

    def _both(self, actor: int, command: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        self.local.actors[actor].send(*command)
        local = self.local.actors[actor].receive()
        self.mount.actors[actor].send(*command)
        return local, self.mount.actors[actor].receive(60)

    def _trees(self, number: int, when: str) -> None:
        local, mount = (side.actors[0].ask("tree") for side in (self.local, self.mount))
        step = [0, "tree", when]
        if "errno" in local or "errno" in mount:
            if local != mount:
                raise Difference(_message(step, number, local, mount, "cannot be walked"))
            return
        want, got = local["ok"], mount["ok"]
        if set(want) != set(got):
            only = f"only local {set(want) - set(got)}, only mount {set(got) - set(want)}"
            raise Difference(_message(step, number, sorted(want), sorted(got), only))
        for path in sorted(want):
            why = self._attributes(want[path], got[path]) or self._rest(want[path], got[path])
            if why:
                raise Difference(_message([*step, path], number, want[path], got[path], why))

    # ---- comparing -----------------------------------------------------------------------------

    def _compare(self, op: str, arguments: list[Any], local: dict[str, Any], mount: Any) -> str:
        """Why the answers differ; empty if they do not."""
        if op in ("stat", "lstat", "fstat") and "ok" in local and "ok" in mount:
            return self._attributes(local["ok"], mount["ok"])
        if op in ("seek_data", "seek_hole"):
            return _seeks(op, arguments[1], local, mount)
        return "" if local == mount else "different answers"

    def _attributes(self, want: dict[str, Any], got: dict[str, Any]) -> str:
        names = ["type", "mode", "uid", "gid"]
        if not stat.S_ISDIR(want["type"]):
            names += ["nlink", "size"]
        wrong = [name for name in names if want[name] != got[name]]
        if wrong:
            return f"different {', '.join(wrong)}"
        return self._identity(want, got) or self._times(want, got)

    def _identity(self, want: dict[str, Any], got: dict[str, Any]) -> str:
        known = self._memory.inodes.setdefault(want["ino"], got["ino"])
        if known != got["ino"]:
            return f"inode number changed from {known}"
        others = [i for i, j in self._memory.inodes.items() if j == got["ino"] and i != want["ino"]]
        return "one inode number for two inodes" if others else ""

    def _times(self, want: dict[str, Any], got: dict[str, Any]) -> str:
        ino = want["ino"]
        seen = self._memory.times.get(ino, {})
        self._memory.times[ino] = {name: (want[name], got[name]) for name in ("mtime", "ctime")}
        if ino in self._memory.timeless:
            return ""
        ours = range(self._memory.began, time.time_ns() + CLOCK_SLACK)
        if want["mtime"] not in ours and got["mtime"] != want["mtime"]:
            return "mtime is not the one that was set"
        if ino in self._memory.stored:
            return ""
        if want["mtime"] in ours and got["mtime"] not in ours:
            return f"mtime is not of this run (began {ours.start})"
        if seen and got["ctime"] < seen["ctime"][1]:
            return f"ctime went back (was {seen['ctime'][1]})"
        wrong = (self._moved(name, pair, want, got) for name, pair in seen.items())
        return next(filter(None, wrong), "")

    def _moved(
        self, name: str, seen: tuple[int, int], want: dict[str, Any], got: dict[str, Any]
    ) -> str:
        """Why a time has moved on one side and may not have; `seen`: local and mount's before."""
        local, mount = seen
        changed = got[name] != mount
        if changed == (want[name] != local):
            return ""
        if changed and not self._fine_clock and mount - local <= CLOCK_SLACK:
            return ""
        return f"{name} changed on one side only (were {local}, {mount})"

    @staticmethod
    def _rest(want: dict[str, Any], got: dict[str, Any]) -> str:
        wrong = [n for n in ("sha", "target", "xattrs") if want.get(n) != got.get(n)]
        return f"different {', '.join(wrong)}" if wrong else ""

    def _note(self, actor: int, op: str, arguments: list[Any], answer: dict[str, Any]) -> None:
        if op == "mmap_write" and "ok" in answer and answer["ok"] != "beyond":
            told = self.local.actors[actor].ask("fstat", arguments[0])
            self._memory.stored.add(told["ok"]["ino"])
        if op == "truncate" and "ok" in answer:
            told = self.local.actors[0].ask("stat", arguments[0])
            if told["ok"]["blocks"] == 0:
                self._memory.timeless.add(told["ok"]["ino"])


def _seeks(op: str, offset: int, local: dict[str, Any], mount: dict[str, Any]) -> str:
    """A hole may be reported as data (a filesystem without holes is right, if wasteful)."""
    if local == mount or local.get("errno") == "EINVAL":  # directories: each has its own way
        return ""
    if "ok" not in local:
        # No data after this offset locally (ENXIO): the mount may not know that it is a hole.
        holds = op == "seek_data" and mount.get("ok") == offset
        return "" if holds else f"{op} found what is not there"
    if "ok" not in mount:
        return f"{op} failed"
    if op == "seek_data":
        return "" if offset <= mount["ok"] <= local["ok"] else "data reported as a hole"
    return "" if mount["ok"] >= local["ok"] else "hole where there is data"
