"""What is done in front of the failpoints: lives of a daemon, each a list of calls.

`("arm",)` marks from where on points count; in a later life they count from its beginning. All of
it together reaches every point there is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

Call = tuple[object, ...]
ARM: Call = ("arm",)
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Scene:
    """Lives one after the other; `armed` from the start of the first one if `fresh`."""

    name: str
    lives: tuple[tuple[Call, ...], ...]
    options: tuple[str, ...] = ()
    fresh: bool = False
    orderly: bool = False
    ram: bool = False
    """The cache has a device in RAM, and one on a disk."""
    forgiving: tuple[str, ...] = ()
    """Paths that others write to: what is shown there depends on when one looks."""


def saved(path: str, length: int = 3000, seed: int = 1) -> tuple[Call, ...]:
    return (("create", path), ("write", path, 0, length, seed), ("close", path))


def rewritten(path: str, at: int, length: int, seed: int) -> tuple[Call, ...]:
    return (("open", path), ("write", path, at, length, seed), ("close", path))


SCENES = [
    Scene("first", (saved("a"),), fresh=True),
    Scene("end", ((*saved("a"), ARM, ("sync_all",)),), orderly=True),
    Scene(
        "names",
        (
            (
                ARM, ("mkdir", "d"), *saved("d/a"), *saved("d/b", 5000, 2), ("symlink", "d/s", "a"),
                ("link", "d/a", "d/l"), ("flush",), ("rename", "d/a", "d/c"), *saved("x"),
                *saved("y", 9, 3), ("exchange", "x", "y"), ("rename", "x", "d/b"), ("flush",),
                ("unlink", "d/l"), ("mkdir", "e"), ("rmdir", "e"), ("flush",), ("leave",),
            ),
        ),
    ),
    Scene(
        "attributes",
        (
            (
                ("mkdir", "d"), *saved("d/a"), ("flush",), ARM, ("chmod", "d/a", 0o600),
                ("setxattr", "d/a", "v"), ("flush",), ("chmod", "d", 0o700), ("flush",),
                ("truncate", "d/a", 100), ("truncate", "d/a", 0), ("flush",), ("open", "d/a"),
                ("write", "d/a", 0, 10, 4), ("utime", "d/a"), ("close", "d/a"),
            ),
        ),
    ),
    Scene("folders", ((
        ("mkdir", "d"), ("mkdir", "d/e"), *saved("d/a"), *saved("d/e/b", 70_000, 2), ("flush",),
        ARM,
        ("rename", "d", "f"), ("flush",), *saved("f/c", 5, 5), ("rename", "f/e", "g"), ("flush",),
    ),)),
    Scene("fsync", ((
        ("create", "a"), ("write", "a", 0, 9000, 1), ARM, ("fsync", "a"), ("write", "a", 50, 10, 2),
        ("fsync", "a"), ("close", "a"), ("open", "a", os.O_RDONLY), ("fsync", "a"), ("close", "a"),
        *saved("b"), ("sync", "b"),
    ),)),
    Scene("adopt", ((*saved("a"), ARM, ("adopt", "a", 5000, 2), ("adopt", "b", 9, 3)),)),
    Scene("small", (
        (ARM, ("small", "a", 700, 1), ("small", "b", 9, 2), ("fold",), ("small", "c", 90, 3)),
        (("read", "c"),),
    )),
    Scene("rewrite", ((
        *saved("a", 9000), ("flush",), ARM, *rewritten("a", 100, 50, 2), *rewritten("a", 20, 9, 3),
        ("flush",), ("open", "a"), ("close", "a"), ("flush",), ("open", "a", os.O_WRONLY),
        ("close", "a"),
    ),)),
    Scene("kernel", ((
        *saved("a", 9000), ("open", "a", os.O_RDONLY), ("passthrough", "a"), ARM,
        ("truncate", "a", 5000), ("close", "a"), ("flush",),
    ),)),
    Scene("merge", ((*saved("a", 9000), ARM, *rewritten("a", 100, 50, 2), ("flush",)),),
          options=("cache.preserve_limit=1B",)),
    Scene("parts", ((
        ARM, *saved("a.bin", 11 * MB), ("flush",), *rewritten("a.bin", 7 * MB, 10, 2), ("flush",),
    ),)),
    Scene("parts given up", ((
        *saved("z.pt", 10, 9), ("refuse", "a.bin", 1), *saved("a.bin", 6 * MB), ARM, ("flush",),
        ("chmod", "a.bin", 0o600), ("unlink", "a.bin"), ("sweep",), ("lost_upload", "b"),
        ("sweep",), ("flush",),
    ),)),
    Scene("late attributes", ((
        ("refuse", "a.bin", 1), *saved("a.bin", 6 * MB), ("flush",), ("chmod", "a.bin", 0o600), ARM,
        ("retry",), ("flush",),
    ),)),
    Scene("bucket", ((
        ("foreign", "r/a", 5 * MB, 7), ("foreign_link", "r/s"), ("foreign", "r/empty", 0, 8), ARM,
        ("list", ""), ("list", "r"), ("read", "r/a"), ("read", "r/empty"),
        *rewritten("r/a", 9, 9, 9), ("rename", "r", "q"), ("flush",),
    ),)),
    Scene("others", ((
        ("list", ""), ("mkdir", "d"), *saved("d/a"), *saved("d/b"), ("mkdir", "e"), *saved("e/x"),
        ("flush",), ("foreign", "d/n", 10, 5), ("foreign", "d/a", 20, 6), ("foreign_delete", "d/b"),
        ("foreign_delete", "e/x"), ("foreign_delete", "e/"), ARM, ("round", "d"), ("round", "e"),
        ("round", ""), ("read", "d/a"),
    ),), forgiving=("d/n", "d/a", "d/b", "e/x")),
    Scene("eviction", ((
        *saved("a", 9000), ("flush",), ARM, ("evict", "a"), ("read", "a"), ("uses",), ("full",),
        ("checkpoint",), ("create", "b"), ("crowd", "b", 1 * MB, 4), ("close", "b"),
    ),)),
    Scene("logs", (
        (
            ("create", "x.log"), ("write", "x.log", 0, 500, 1), ARM, ("snapshot", "x.log"),
            ("write", "x.log", 500, 100, 2), ("write", "x.log", 0, 5, 3), ("snapshot", "x.log"),
        ),
        (("flush",),),
    ), options=("order.unordered=[\"*.log\"]",)),
    Scene("ram", ((
        ARM, *saved("a", 9000), ("spill",), *rewritten("a", 100, 50, 2), ("spill",),
        ("create", "b"), ("write", "b", 0, 9000, 1), ("fsync", "b"), ("write", "b", 50, 10, 2),
        ("fsync", "b"), ("close", "b"), ("open", "b", os.O_RDONLY), ("fsync", "b"), ("spill",),
        ("close", "b"), ("spill",), ("flush",), ("create", "c"), ("write", "c", 0, 5000, 3),
        ("move", "c"), ("write", "c", 4000, 5000, 4), ("close", "c"), *saved("d"),
        ("spill_in_vain",), ("flush",), ("spill",), ("evict", "a"), ("read", "a"),
    ),), ram=True),
    Scene("ram is lost", (
        (*saved("a", 9000), ("spill",), ("create", "b"), ("write", "b", 0, 700, 1), ("fsync", "b"),
         *saved("c"), ("flush",), *saved("d"), *saved("e"), ("begin_copy", "d"), ("lose_ram",)),
        (("read", "a"), ("read", "c"), ("flush",)),
    ), ram=True, forgiving=("d", "e")),
    Scene("ram is lost while mounted", ((
        *saved("a", 9000), ("open", "a", os.O_RDONLY), ("spill",), *saved("c", 9000, 5),
        ("open", "c", os.O_RDONLY), ("create", "b"), ("write", "b", 0, 700, 1), ("fsync", "b"),
        ARM, ("lose_ram",), ("notice",), ("flee",), ("close", "a"), ("close", "c"), ("read", "a"),
        ("read", "c"), ("write", "b", 700, 50, 2), ("close", "b"), ("flee",), ("flush",),
    ),), ram=True, forgiving=("b", "c")),
    Scene("held", (
        (*saved("s"), ("create", "a"), ("write", "a", 0, 700, 1), ("create", "b"),
         ("write", "b", 0, 9, 2), *saved("u"), ("open", "u"), ("unlink", "u")),
        (("open", "a"), ("write", "a", 10, 10, 3), ("close", "a"), ("release", "b"), ("flush",)),
    )),
    Scene("regained", (
        (*saved("a"), ("keep_elsewhere", "a"), ("lose_cache", "a")),
        (("read", "a"), ("flush",)),
    ), forgiving=("a",)),
    Scene("trimmed", ((
        ("foreign", "big", 60 * MB, 7), ("list", ""), ("open", "big", os.O_RDONLY), ARM,
        *(("read_at", "big", n * MB) for n in (0, 7, 14)), ("trim",), ("read_at", "big", 0),
        ("close", "big"), ("read", "big"), ("trim_closed", "big"), ("read", "big"),
    ),)),
    Scene("streamed", (
        (
            ("create", "h"), ("write", "h", 0, 17 * MB, 1), ARM, ("offload", "h", 0),
            ("offload", "h", 8), ("fsync", "h"), ("write", "h", 100, 50, 2), ("outdated", "h", 0),
            ("offload", "h", 0), ("forget_spans",), ("truncate", "h", 4 * MB),
            ("write", "h", 16 * MB, 9, 3), ("offload", "h", 0), ("offload", "h", 8),
            ("rename", "h", "g"), ("close", "g"), ("flush",), ("forget_spans",), ("read", "g"),
        ),
        (("open", "g"), ("write", "g", 9 * MB, 9, 4), ("close", "g"), ("flush",)),
    )),
    Scene("streamed, reopened", ((
        ("create", "h"), ("write", "h", 0, 17 * MB, 1), ("offload", "h", 0), ("close", "h"), ARM,
        ("open", "h"), ("write", "h", 16 * MB, 90, 2), ("offload", "h", 8), ("close", "h"),
        ("flush",), ("forget_spans",),
    ),)),
    Scene("borrowed", (
        (
            ("foreign", "big", 17 * MB, 7), ("list", ""), ARM, ("tight",), ("open", "big"),
            ("write", "big", 17 * MB, 900, 2), ("write", "big", 5 * MB, 90, 3), ("fsync", "big"),
            ("close", "big"), ("flush",), ("forget_spans",), ("read", "big"),
        ),
        (("tight",), ("open", "big"), ("write", "big", 0, 9, 4), ("close", "big"), ("flush",)),
    )),
    Scene("missing", (
        (*saved("a"), *saved("b"), ("flush",), ("lose_cache", "a"), ("stray",)),
        (("read", "a"), ("lose_cache", "b"), ("read", "b")),
    )),
    Scene("refused", ((
        ("refuse", "a", 1), *saved("a"), ARM, ("flush",), ("retry",), ("flush",),
    ),)),
    Scene("conflict", ((
        ("list", ""), ("usurp", "a", 10, 5), *saved("a"), ARM, ("flush",),
        ("resolve", "a", "keep"), ("flush",), ("usurp", "c", 10, 6), ("show", "c"),
    ),), forgiving=("c",)),
    Scene("circle", ((
        *saved("a"), *saved("b", 50, 2), ("flush",), ("evict", "a"), ("evict", "b"), ARM,
        ("rename", "a", "t"), ("rename", "b", "a"), ("rename", "t", "b"), ("flush",),
    ),)),
    Scene("skipped", ((
        ("mkdir", "step_1"), *saved("step_1/m.bin", 10, 1),
        *saved("step_1/model.safetensors.index.json", 9, 2), ("mkdir", "step_2"),
        *saved("step_2/m.bin", 11, 3), *saved("step_2/model.safetensors.index.json", 8, 4), ARM,
        ("supersede",), ("resolve", "step_1/m.bin", "keep"),
    ),)),
]  # fmt: skip
