"""Plays scenes on a stage, ends lives at points, and judges what is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.scenes import ARM, Call, Scene
from tests.cuts import recovered
from tests.cuts.writer import block

KILLED = -9
Tree = dict[str, Any]


class Stages:
    """The process that forks daemons."""

    def __init__(self, folder: Path) -> None:
        self.plan = folder / "plan"
        self._errors = (folder / "errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.stage"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "CACHEFS_FAILPOINTS": str(self.plan)},
        )  # fmt: skip

    def live(self, **life: Any) -> int:
        """One daemon's life; its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"plan": str(self.plan), **life}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().rpartition("Traceback")[2][-2000:]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._errors.close()


class Twin:
    """The same calls on an ordinary directory, and what they were meant to leave."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.fds: dict[str, int] = {}
        self.contents: set[bytes] = {b""}
        """What files held when they were closed, and what others put into the bucket."""

    def at(self, path: object) -> Path:
        return self.root / str(path)

    def apply(self, call: Call) -> None:
        name, *words = call
        method = getattr(self, f"do_{name}", None)
        if method is not None:
            method(*words)

    def forget_handles(self) -> None:
        """Their daemon is dead."""
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()

    def fd(self, path: str) -> int:
        if path not in self.fds:
            self.do_open(path)
        return self.fds[path]

    def do_again(self, name: str, *words: object) -> None:
        """It was done before."""
        if name in ("write", "close", "snapshot", "open"):
            self.apply((name, *words))

    def do_create(self, path: str) -> None:
        self.fds[path] = os.open(self.at(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)

    def do_open(self, path: str, flags: int = os.O_RDWR) -> None:
        self.fds[path] = os.open(self.at(path), flags)

    def do_write(self, path: str, at: int, length: int, seed: int) -> None:
        os.pwrite(self.fd(path), block(seed, length), at)
        if path.endswith(".log"):
            self.do_snapshot(path)  # a prefix of a log makes sense

    def do_crowd(self, path: str, length: int, seed: int) -> None:
        self.do_write(path, 0, length, seed)

    def do_close(self, path: str) -> None:
        fd = self.fd(path)
        del self.fds[path]
        self.contents.add(_whole(fd))
        os.close(fd)

    def do_snapshot(self, path: str) -> None:
        self.contents.add(_whole(self.fd(path)))

    def do_release(self, path: str) -> None:
        self.contents.add(self.at(path).read_bytes())

    def do_truncate(self, path: str, size: int) -> None:
        os.truncate(self.at(path), size)
        self.contents.add(self.at(path).read_bytes())

    def do_mkdir(self, path: str) -> None:
        self.at(path).mkdir()

    def do_symlink(self, path: str, target: str) -> None:
        self.at(path).symlink_to(target)
        self.contents.add(target.encode())

    def do_link(self, old: str, new: str) -> None:
        os.link(self.at(old), self.at(new))

    def do_unlink(self, path: str) -> None:
        self.at(path).unlink()

    def do_rmdir(self, path: str) -> None:
        self.at(path).rmdir()

    def do_rename(self, old: str, new: str) -> None:
        self.at(old).rename(self.at(new))

    def do_exchange(self, one: str, other: str) -> None:
        self.at(one).rename(self.at("between"))
        self.at(other).rename(self.at(one))
        self.at("between").rename(self.at(other))

    def do_foreign(self, key: str, length: int, seed: int) -> None:
        self.at(key).parent.mkdir(exist_ok=True)
        self.at(key).unlink(missing_ok=True)
        self.at(key).write_bytes(block(seed, length))
        self.contents.add(block(seed, length))

    def do_small(self, path: str, length: int, seed: int) -> None:
        self.do_adopt(path, length, seed)

    def do_adopt(self, path: str, length: int, seed: int) -> None:
        self.at(path).write_bytes(block(seed, length))
        self.contents.add(block(seed, length))

    def do_usurp(self, key: str, length: int, seed: int) -> None:
        self.contents.add(block(seed, length))

    def do_foreign_link(self, key: str) -> None:
        self.at(key).symlink_to("target")
        self.contents.add(b"target")

    def do_foreign_delete(self, key: str) -> None:
        if key.endswith("/"):
            self.at(key).rmdir()
        else:
            self.at(key).unlink()

    def tree(self) -> Tree:
        found: Tree = {}
        for path in self.root.rglob("*"):
            if path.is_symlink():
                found[str(path.relative_to(self.root))] = os.readlink(path)
            elif path.is_file():
                found[str(path.relative_to(self.root))] = path.read_bytes()
        return found


def _whole(fd: int) -> bytes:
    return Path(f"/proc/self/fd/{fd}").read_bytes()


@dataclass(slots=True)
class Played:
    """What came of a scene: exit statuses of its daemons, the trees that may be found, and contents
    that were complete."""

    statuses: list[int]
    trees: list[Tree]
    contents: set[bytes]


def play(
    stages: Stages, scene: Scene, root: Path, plans: list[dict[str, Any]], armed: int, *,
    goes_on: bool = False,
) -> Played:  # fmt: skip
    """Play a scene until its end or until the first plan ends it; plans count from life number
    `armed` on. A second plan is for the life that follows: one that only recovers, or one of the
    programs that try again and go on (`goes_on`)."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "store").mkdir(parents=True)
    stages.plan.unlink(missing_ok=True)
    played, twin = Played([], [], set()), Twin(root / "twin")
    for number, lines in enumerate(scene.lives):
        if number == armed and (number or scene.fresh):
            stages.plan.write_text(json.dumps(plans))
        calls = [
            (*call, plans) if call == ARM else call
            for call in lines
            if call != ARM or number == armed
        ]
        rest = _live(stages, scene, root, played, twin, calls)
        if played.statuses[-1] != 0:
            if len(plans) > 1:
                _live(stages, scene, root, played, twin, _again(rest) if goes_on else [])
            break
    played.contents = twin.contents
    return played


def _live(
    stages: Stages, scene: Scene, root: Path, played: Played, twin: Twin, calls: list[Call]
) -> list[Call]:
    """One life; the calls that were not answered in it."""
    told = root / f"told{len(played.statuses)}"
    status = stages.live(
        root=str(root), calls=calls, told=str(told), options=scene.options, orderly=scene.orderly,
        ram=scene.ram,
    )  # fmt: skip
    played.statuses.append(status)
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    done = sum(kind == "end" for kind, _ in lines)
    for call in calls[:done]:
        twin.apply(call)
    if not calls or (calls[0][0] == "again" and not done):
        return []  # What was in question still is.
    played.trees = [twin.tree()]
    if sum(kind == "begin" for kind, _ in lines) > done:
        twin.apply(calls[done])
        played.trees.append(twin.tree())
        calls = [*calls[:done], ("again", *calls[done]), *calls[done + 1 :]]
    twin.forget_handles()
    return calls[done:]


def _again(rest: list[Call]) -> list[Call]:
    """The call in question once more, if that does no harm, and all that was to come."""
    if rest and rest[0][:2] == ("again", "exchange"):
        return []
    return [call for call in rest if "arm" not in call[:2]]


def judge(root: Path, played: Played, forgiving: Collection[str]) -> list[str]:
    """What is wrong with what a killed daemon left; `forgiving`: paths of which nothing was
    promised."""
    try:
        view = recovered.look(root / "cache", root / "store", rebooted=False)
    except Exception as error:
        return [f"it cannot be recovered: {error!r}"]
    wrong = []
    for when, shown in (("after recovery", view.shown), ("after flushing", view.after)):
        if not any(_agree(shown, tree, forgiving) for tree in played.trees):
            wrong.append(f"{when}: {_difference(shown, played.trees[-1])}")
    for key, data in view.bucket.items():
        if data not in played.contents:
            wrong.append(f"the bucket shows {len(data)} bytes as {key} that never were complete")
    wrong += [each for path in view.end.keys() - set(forgiving) for each in _doubts(view, path)]
    if (view.recovered.missing or view.again.missing) and not forgiving:
        wrong.append("dirty cache files are missing")
    offences = (o for o in view.offences if not (forgiving and o.startswith("file-missing")))
    wrong += [f"fsck: {each}" for each in offences]
    if view.leaked and not forgiving:
        wrong.append(f"leaked cache files: {view.leaked}")
    return wrong


def _doubts(view: recovered.View, path: str) -> Iterator[str]:
    """What is said of a path and is not so."""
    state, data = view.end[path], view.after[path]
    if state == "durable" and view.bucket.get(path, data) != data:
        yield f"{path} is durable, but the bucket has something else"
    if state == "durable" and path not in view.bucket and path not in view.links:
        yield f"{path} is durable, but not in the bucket"
    if state not in ("durable", "remote", "held", "conflicted", "superseded"):
        yield f"{path} stays {state}: {view.left}"


def _agree(shown: Tree, tree: Tree, forgiving: Collection[str]) -> bool:
    names = (shown.keys() | tree.keys()) - set(forgiving)
    return all(_plain(shown.get(name)) == _plain(tree.get(name)) for name in names)


def _plain(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _difference(shown: Tree, tree: Tree) -> str:
    told = []
    for name in sorted(shown.keys() | tree.keys()):
        got, wanted = shown.get(name), tree.get(name)
        if _plain(got) != _plain(wanted):
            told.append(f"{name}: {_brief(got)} instead of {_brief(wanted)}")
    return "; ".join(told)


def _brief(value: Any) -> str:
    return f"{len(value)} bytes {value[:8]!r}" if isinstance(value, bytes) else repr(value)
