"""Random programs: lists of steps `[actor, operation, argument...]` (see `support/actor.py`).

One generator serves two sources of choice: Hypothesis (small programs, shrunk by it) and a seeded
`random.Random` (long programs with kills and remounts, shrunk by `shrink`). A rough sketch of what
exists keeps most steps meaningful; a step that fails is fine, as it must fail alike on both sides.

Steps whose operation begins with "!" concern the mount itself and are carried out by the engine:
`!kill` (the daemon dies and is taken over), `!crash` (daemon and supervisor die; mounted again),
`!remount`, `!pause` (uploads get a moment to begin), `!durable`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = list[Any]
Program = list[Step]
Choose = Callable[[Sequence[Any]], Any]

NAMES = ("a", "b", "c", "d", "e", "d/a", "d/b", "d/e", "d/e/a", "e/a", "näme", "x.safetensors")
TOPS = ("a", "b", "c", "d", "e")
SIZES = (0, 1, 10, 100, 4095, 4096, 4097, 10_000, 65_536, 131_073, 300_000)
OFFSETS = (0, 1, 100, 4095, 4096, 8192, 65_536, 131_072, 200_001, 1_000_000)
MODES = (0o644, 0o600, 0o400, 0o755, 0o000, 0o666, 0o777)
SPECIAL_MODES = (*MODES, 0o4755, 0o2755, 0o1777, 0o2777)
OPENS = (
    "RDONLY", "WRONLY", "RDWR", "RDWR|CREAT", "RDWR|CREAT", "RDWR|CREAT", "WRONLY|CREAT",
    "WRONLY|CREAT|TRUNC", "RDWR|CREAT|TRUNC", "RDWR|CREAT|EXCL", "WRONLY|APPEND",
    "RDWR|CREAT|APPEND", "RDWR|TRUNC", "RDONLY|DIRECTORY", "RDONLY|NOFOLLOW", "RDONLY|TRUNC",
    "RDWR|CREAT|SYNC", "WRONLY|DSYNC", "RDONLY|CREAT",
)  # fmt: skip
TIMES = (0, 1, 999_999_999, 1_000_000_000_123_456_789, 1_234_567_890_000_000_000)
TARGETS = ("a", "b", "d", "d/a", "nowhere", "a/b", "", "x" * 200, "./d/../b")
XATTRS = ("user.one", "user.two", "user.mime_type")
VALUES = ("", "value", "v" * 200)
OWNERS = (0, 1, 12345, -1)
SLOTS = (0, 1, 2)

WEIGHTS = {
    "open": 16, "write": 9, "pwrite": 11, "read": 4, "pread": 5, "close": 8, "truncate": 4,
    "ftruncate": 5, "fsync": 2, "fdatasync": 1, "dup": 2, "unlink": 6, "rename": 8,
    "renameat2": 2, "link": 4, "symlink": 2, "readlink": 1, "mkdir": 5, "rmdir": 2, "listdir": 2,
    "scandir": 1, "stat": 5, "lstat": 3, "fstat": 5, "chmod": 3, "fchmod": 1, "chown": 2,
    "fchown": 1, "utimens": 3, "futimens": 1, "touch": 1, "setxattr": 2, "getxattr": 1,
    "listxattr": 1, "removexattr": 1, "mmap_write": 4, "mmap_read": 2, "mmap_private": 1,
    "flock": 1, "lockf": 1, "fallocate": 2, "seek_data": 1, "seek_hole": 1,
    "copy_file_range": 2, "sendfile": 2, "lseek": 2, "access": 1, "fork_exit": 1, "fsync_dir": 1,
}  # fmt: skip
DECK = tuple(op for op, weight in WEIGHTS.items() for _ in range(weight))


@dataclass(slots=True)
class Sketch:
    """What probably exists: good enough to make most steps succeed."""

    names: list[str] = field(default_factory=list)
    slots: dict[int, list[int]] = field(default_factory=dict)


class Maker:
    """Makes one program from a source of choices."""

    def __init__(self, choose: Choose, actors: int) -> None:
        self._choose = choose
        self._actors = range(actors)
        self._sketch = Sketch(slots={actor: [] for actor in self._actors})

    def step(self, deck: Sequence[str] = DECK) -> Step:
        """The next step."""
        actor = self._choose(self._actors)
        op = self._choose(deck)
        if op.startswith("!"):
            return [actor, op]
        arguments = getattr(self, f"_{op}", self._by_shape(op))(actor)
        return [actor, op, *arguments]

    # ---- choices

    def _known(self) -> str:
        """Mostly a name that exists."""
        names = self._sketch.names
        if names and self._choose((True, True, True, False)):
            return str(self._choose(names))
        return str(self._choose(NAMES))

    def _any(self) -> str:
        return str(self._choose(NAMES))

    def _slot(self, actor: int) -> int:
        held = self._sketch.slots[actor]
        return int(self._choose(held) if held else self._choose(SLOTS))

    def _seed(self) -> int:
        return int(self._choose(range(1, 200)))

    def _made(self, name: str) -> None:
        if name not in self._sketch.names:
            self._sketch.names.append(name)

    def _gone(self, name: str) -> None:
        if name in self._sketch.names:
            self._sketch.names.remove(name)

    def _by_shape(self, op: str) -> Callable[[int], list[Any]]:
        """Arguments of the operations that have no method of their own."""
        pick = self._choose
        shapes: dict[str, Callable[[int], list[Any]]] = {
            "write": lambda a: [self._slot(a), self._seed(), pick(SIZES)],
            "pwrite": lambda a: [self._slot(a), self._seed(), pick(SIZES), pick(OFFSETS)],
            "read": lambda a: [self._slot(a), pick(SIZES)],
            "pread": lambda a: [self._slot(a), pick(SIZES), pick(OFFSETS)],
            "truncate": lambda a: [self._known(), pick(OFFSETS)],
            "ftruncate": lambda a: [self._slot(a), pick(OFFSETS)],
            "renameat2": lambda a: [self._known(), self._any(), pick((1, 2, 1, 2, 3))],
            "chmod": lambda a: [self._known(), pick(SPECIAL_MODES)],
            "fchmod": lambda a: [self._slot(a), pick(MODES)],
            "chown": lambda a: [self._known(), pick(OWNERS), pick(OWNERS), pick((True, False))],
            "fchown": lambda a: [self._slot(a), pick(OWNERS), pick(OWNERS)],
            "utimens": lambda a: [self._known(), pick(TIMES), pick(TIMES), pick((True, False))],
            "futimens": lambda a: [self._slot(a), pick(TIMES), pick(TIMES)],
            "setxattr": lambda a: [self._known(), pick(XATTRS), pick(VALUES), pick((0, 0, 1, 2))],
            "getxattr": lambda a: [self._known(), pick(XATTRS)],
            "removexattr": lambda a: [self._known(), pick(XATTRS)],
            "mmap_write": lambda a: [
                self._slot(a), self._seed(), pick(SIZES), pick(OFFSETS), pick((True, False)),
            ],
            "mmap_read": lambda a: [self._slot(a), pick(SIZES), pick(OFFSETS)],
            "mmap_private": lambda a: [self._slot(a), self._seed(), pick(SIZES), pick(OFFSETS)],
            "flock": lambda a: [self._slot(a), pick(("SH", "EX", "UN"))],
            "lockf": lambda a: [
                self._slot(a), pick(("SH", "EX", "UN")), pick(SIZES), pick(OFFSETS),
            ],
            "fallocate": lambda a: [self._slot(a), 0, pick(OFFSETS), pick(SIZES)],
            "seek_data": lambda a: [self._slot(a), pick(OFFSETS)],
            "seek_hole": lambda a: [self._slot(a), pick(OFFSETS)],
            "copy_file_range": lambda a: [
                self._slot(a), pick(OFFSETS), self._slot(a), pick(OFFSETS), pick(SIZES),
            ],
            "sendfile": lambda a: [self._slot(a), self._slot(a), pick(OFFSETS), pick(SIZES)],
            "lseek": lambda a: [self._slot(a), pick(OFFSETS), pick((0, 1, 2))],
            "access": lambda a: [self._known(), pick((0, 1, 2, 4))],
        }  # fmt: skip
        if op in shapes:
            return shapes[op]
        if op in ("fsync", "fdatasync", "fstat", "fork_exit"):
            return lambda a: [self._slot(a)]
        return lambda a: [self._known()]

    # ---- operations that change the sketch

    def _open(self, actor: int) -> list[Any]:
        flags = self._choose(OPENS)
        name = self._any() if "CREAT" in flags else self._known()
        slot = self._choose(SLOTS)
        if slot not in self._sketch.slots[actor]:
            self._sketch.slots[actor].append(slot)
        if "CREAT" in flags:
            self._made(name)
        return [slot, name, flags, self._choose(MODES)]

    def _close(self, actor: int) -> list[Any]:
        slot = self._slot(actor)
        if slot in self._sketch.slots[actor]:
            self._sketch.slots[actor].remove(slot)
        return [slot]

    def _dup(self, actor: int) -> list[Any]:
        source, target = self._slot(actor), self._choose(SLOTS)
        if target not in self._sketch.slots[actor]:
            self._sketch.slots[actor].append(target)
        return [source, target]

    def _unlink(self, actor: int) -> list[Any]:
        name = self._known()
        self._gone(name)
        return [name]

    def _rmdir(self, actor: int) -> list[Any]:
        return self._unlink(actor)

    def _rename(self, actor: int) -> list[Any]:
        source, target = self._known(), self._any()
        self._gone(source)
        self._made(target)
        return [source, target]

    def _link(self, actor: int) -> list[Any]:
        source, target = self._known(), self._any()
        self._made(target)
        return [source, target]

    def _symlink(self, actor: int) -> list[Any]:
        name = self._any()
        self._made(name)
        return [self._choose(TARGETS), name]

    def _mkdir(self, actor: int) -> list[Any]:
        name = self._choose(("d", "e", "d/e", "c"))
        self._made(name)
        return [name, self._choose((0o755, 0o777, 0o700, 0o2775, 0o1777))]


def random_program(
    rng: random.Random, length: int, actors: int = 2, specials: Iterable[str] = ()
) -> Program:
    """A program of `length` steps, about one in fifteen of them special."""
    specials = tuple(specials)
    maker = Maker(rng.choice, actors)
    extra = tuple(rng.choice(specials) for _ in range(len(DECK) // 15)) if specials else ()
    return [maker.step(DECK + extra) for _ in range(length)]


def shrink(
    program: Program, fails: Callable[[Program], bool], within: Callable[[], bool]
) -> Program:
    """The program without what it does not need to fail; stops when `within()` says no.

    Removes ever smaller runs of steps as long as the rest still fails.
    """
    size = max(1, len(program) // 2)
    while within():
        start, progress = 0, False
        while start < len(program) and within():
            shorter = program[:start] + program[start + size :]
            if shorter and fails(shorter):
                program, progress = shorter, True
            else:
                start += size
        if size == 1 and not progress:
            break
        size = max(1, size // 2)
    return program


def as_text(program: Program) -> str:
    """The program as Python source, ready to become a test."""
    return "[\n" + "".join(f"    {step!r},\n" for step in program) + "]"
