"""Processes that hold files of a mount that is gone.

Passthrough writers survive the end of their connection: the kernel goes on writing to the cache
file. Asking the dead mount for anything fails, but what /proc tells of a descriptor needs no answer
from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def holders(ino: int) -> list[int]:
    """Pids of processes with an inode of this number open for writing, from a mount that is gone.

    A file of another mount that ended may have the same number: this is for people to read.
    """
    live = _live_mounts()
    return sorted({pid for pid, info in _descriptors() if _writes(info, ino, live)})


def _live_mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    return {line.split(" ", 1)[0] for line in lines}


def _descriptors() -> Iterator[tuple[int, dict[str, str]]]:
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            text = path.read_text()
        except OSError:
            continue  # It has ended, or is not ours to look at.
        pairs = (line.partition(":") for line in text.splitlines())
        yield int(path.parts[2]), {name: value.strip() for name, _, value in pairs}


def _writes(info: dict[str, str], ino: int, live: set[str]) -> bool:
    """See proc_pid_fdinfo(5): `ino` since Linux 5.14, `flags` in octal."""
    if info.get("ino") != str(ino) or info.get("mnt_id") in live:
        return False
    return int(info.get("flags", "0"), 8) & os.O_ACCMODE != os.O_RDONLY
