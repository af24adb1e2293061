"""Processor time of the processes that take part in something, from /proc.

On a machine that others use as well, this says what a piece of work costs where the time it takes
says how busy they were.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_KTHREADD = 2
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    seconds: float
    """With those of its children that have ended."""
    command: str


def _processes() -> dict[int, _Process]:
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # It has ended.
        ticks = sum(int(word) for word in words[11:15])
        found[int(folder.name)] = _Process(int(words[1]), ticks / _TICK, command)
    return found


def _below(processes: dict[int, _Process], root: int) -> Iterator[int]:
    if root in processes:
        yield root
    for pid, process in processes.items():
        if process.parent == root and pid != root:
            yield from _below(processes, pid)


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Usage:
    """Seconds of processor time since it was made, by who spent them."""

    def __init__(self, server: int, others: tuple[int, ...] = ()) -> None:
        """`server`: the store's process. `others`: the first processes of a mount."""
        self._server = server
        self._others = others
        self._began = self._look()

    def _look(self) -> dict[str, float]:
        processes = _processes()
        told = {"reader": _own(), "ended": _ended_children()}
        for pid in _below(processes, self._server):
            told["server"] = told.get("server", 0.0) + processes[pid].seconds
        kernel = [at for at, process in processes.items() if process.parent == _KTHREADD]
        told["kernel"] = sum(processes[pid].seconds for pid in kernel)
        for root in self._others:
            for pid in _below(processes, root):
                mover = ".flush.mover" in processes[pid].command
                name = "movers" if mover else "daemon"
                told[name] = told.get(name, 0.0) + processes[pid].seconds
        return told

    def so_far(self) -> dict[str, float]:
        """By name, and their sum as `all`."""
        now = self._look()
        spent = {name: round(now[name] - self._began.get(name, 0.0), 2) for name in now}
        return {**spent, "all": round(sum(spent.values()), 2)}


def _ended_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
