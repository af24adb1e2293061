"""Which checkpoints the mount holds, and how safe each is.

Found by their names in what is known locally: no request is made. The tree is walked from the root,
without going into what is a checkpoint already, some entries at a time so that requests are served
in between. Where that takes long, what was found is used again for many times as long.
"""

from __future__ import annotations

import heapq
import stat
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import trio

from cachefs.daemon.paths import absolute, entry_at
from cachefs.daemon.services import Services
from cachefs.meta.rows import InodeRow
from cachefs.meta.summary import Summary
from cachefs.model import checkpoints, names
from cachefs.model.effects import EffectKind
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.vfs.attributes import ROOT

SHOWN = 50
"""Checkpoints in an answer: the newest."""
_LOOKED_AT = 5_000
"""Entries outside of checkpoints that are looked at. Checkpoints beyond are not in the list."""
_BATCH = 100
_DUTY = 20.0
_CHEAP = 0.02
"""Seconds of looking that are spent for every question."""

Member = tuple[int, bytes, int, int, int]
"""(dentry, name, inode, size, mtime_ns) of one file."""


@dataclass(slots=True)
class _Candidate:
    """A root that some path told of, with the files that did."""

    found: checkpoints.Checkpoint
    told_by: list[Member] = field(default_factory=list)


class CheckpointIndex:
    """Answers for `status`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._meta = services.meta
        self._queue = services.queue
        self._summary = Summary(services.meta.db)
        self._patterns = services.settings.checkpoint.patterns
        self._markers = services.settings.order.barrier
        self._temps = services.settings.flush.temp_patterns
        self._lock = trio.Lock()
        self._found: list[dict[str, Any]] = []
        self._valid_until = 0.0

    async def newest(self) -> list[dict[str, Any]]:
        """The newest checkpoints, oldest first."""
        async with self._lock:
            if time.monotonic() >= self._valid_until:
                began = time.monotonic()
                self._found = await self._look()
                now = time.monotonic()
                cost = now - began
                self._valid_until = now + (_DUTY * cost if cost > _CHEAP else 0.0)
            return self._found

    async def _look(self) -> list[dict[str, Any]]:
        candidates = await self._candidates()
        ages = [(self._changed_ns(root, each), root) for root, each in candidates.items()]
        shrinking = self._shrinking(candidates)
        answer = []
        for _, root in sorted(heapq.nlargest(SHOWN, ages)):
            candidate = candidates[root]
            members = self._members(root, candidate)
            answer.append(self._describe(candidate.found, members, root in shrinking))
            await trio.lowlevel.checkpoint()
        return answer

    # -- finding ------------------------------------------------------------------------------

    async def _candidates(self) -> dict[str, _Candidate]:
        found: dict[str, _Candidate] = {}
        folders = [(ROOT, "")]
        left = _LOOKED_AT
        while folders and left > 0:
            ino, base = folders.pop()
            after = 0
            while left > 0:
                entries = self._meta.inodes.children(ino, after, _BATCH)
                for dentry, name, row in entries:
                    self._look_at(found, folders, base, (dentry, name, row))
                left -= len(entries)
                await trio.lowlevel.checkpoint()
                if len(entries) < _BATCH:
                    break
                after = entries[-1][0]
        return found

    def _look_at(
        self,
        found: dict[str, _Candidate],
        folders: list[tuple[int, str]],
        base: str,
        entry: tuple[int, bytes, InodeRow],
    ) -> None:
        dentry, name, row = entry
        path = base + name.decode()
        point = checkpoints.find(path, self._patterns)
        if point is not None:
            candidate = found.setdefault(point.root, _Candidate(point))
            candidate.told_by.append((dentry, name, row.ino, row.size, row.mtime_ns))
        elif stat.S_ISDIR(row.mode):
            folders.append((row.ino, path + "/"))

    def _changed_ns(self, root: str, candidate: _Candidate) -> int:
        row = self._row(root)
        return max(each[4] for each in candidate.told_by) if row is None else row.mtime_ns

    def _row(self, root: str) -> InodeRow | None:
        """The directory or file of that name; None for a group of files that only share it."""
        entry = entry_at(self._meta, root)
        return self._meta.inodes.get(entry.ino) if entry is not None else None

    def _members(self, root: str, candidate: _Candidate) -> list[Member]:
        row = self._row(root)
        if row is not None and stat.S_ISDIR(row.mode):
            return self._summary.subtree(row.ino)
        return candidate.told_by

    def _shrinking(self, roots: Container[str]) -> set[str]:
        """Roots below which the bucket still has to delete something."""
        found = set()
        for effect in self._queue.effects.values():
            if effect.kind != EffectKind.UNPUBLISH or effect.key is None:
                continue
            path = effect.key.rstrip("/")
            while path:
                if path in roots:
                    found.add(path)
                path = path.rpartition("/")[0]
        return found

    # -- describing ---------------------------------------------------------------------------

    def _describe(
        self, point: checkpoints.Checkpoint, members: list[Member], shrinking: bool
    ) -> dict[str, Any]:
        opened = [self._services.table.inodes.get(each[2]) for each in members]
        writing = any(each is not None and (each.writing or each.writers) for each in opened)
        pending = [each for each in members if self._queue.of_dentry(each[0])]
        lacking = [each for each in members if self._is_superseded(each[2])]
        return {
            "path": absolute(self._services, point.root),
            "framework": point.framework,
            "step": point.step,
            "complete": not writing and self._is_complete(point.root, members),
            "durable": not (writing or pending or shrinking or lacking) and bool(members),
            "files": len(members),
            "bytes": sum(each[3] for each in members),
            "changed_ns": max((each[4] for each in members), default=0),
            "superseded": bool(lacking),
            "survives": str(Level.PROCESS if writing else self._survives([*pending, *lacking])),
        }

    def _is_complete(self, root: str, members: list[Member]) -> bool:
        """Quiet, and its marker is there; what is one file is its own."""
        base = root.rpartition("/")[2].encode()
        if len(members) == 1 and members[0][1] == base:
            return True
        texts = [each[1].decode() for each in members]
        unfinished = any(names.is_temp(self._temps, text) for text in texts)
        return not unfinished and any(checkpoints.is_marker(t, self._markers) for t in texts)

    def _is_superseded(self, ino: int) -> bool:
        gen = self._meta.generations.current(ino)
        return gen is not None and gen.state == GenState.SUPERSEDED

    def _survives(self, lacking: list[Member]) -> Level:
        """The worst of the files that the store lacks."""
        worst = Level.SITE
        for dentry, _, ino, *_ in lacking:
            rows = [self._meta.generations.get(e.gen or 0) for e in self._queue.of_dentry(dentry)]
            for gen in rows or [self._meta.generations.current(ino)]:
                if gen is not None:
                    worst = min(worst, self._services.inspector.survives(gen, gen.state))
            if worst <= Level.PROCESS:
                break
        return worst
