"""`cachefs latest`: the newest checkpoint that somebody could resume from, wherever it was saved.

What counts is what the bucket holds now, all of it, by the manifests of those who saved it or, if
there are none, by the framework's own index. Of what this node has yet to upload nothing counts.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import Any

import trio

from cachefs.daemon.paths import Spot, absolute, entry_at, locate
from cachefs.daemon.services import Services
from cachefs.errors import NotFound
from cachefs.model import checkpoints, indexes
from cachefs.observe.control import Progress
from cachefs.observe.protocol import ControlError
from cachefs.store.base import ObjectInfo
from cachefs.vfs.attributes import ROOT

_LOOKED_AT = 5_000
"""Entries outside of checkpoints that are looked at."""
_BATCH = 200
_INDEX_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class _Candidate:
    found: checkpoints.Checkpoint
    mtime_ns: int

    def age(self) -> tuple[int, int]:
        """Sort key: the newest is the largest."""
        return -1 if self.found.step is None else self.found.step, self.mtime_ns


class Latest:
    """The handler of `latest`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._patterns = services.settings.checkpoint.patterns
        self._markers = services.settings.order.barrier

    async def latest(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """The newest complete and durable checkpoint in or below directory `path`.

        Newest by its step, then by time. Exit code 1: there is none.
        """
        spot = await locate(self._services, args.get("path"))
        await self._services.commits.write_due()
        candidates = await self._candidates(spot)
        order = sorted(
            candidates.values(),
            key=lambda each: (each.found.step or -1, each.mtime_ns),
            reverse=True,
        )
        for each in order:
            answer = await self._judge(each.found)
            if answer is not None:
                return answer
        raise ControlError(
            f"{absolute(self._services, spot.path)}: no checkpoint is complete and durable "
            f"({len(order)} looked at)"
        )

    # -- finding ------------------------------------------------------------------------------

    async def _candidates(self, spot: Spot) -> dict[str, _Candidate]:
        found: dict[str, _Candidate] = {}
        own = checkpoints.find(spot.path, self._patterns) if spot.path else None
        if own is not None or not spot.is_dir:
            if own is not None:
                found[own.root] = _Candidate(own, spot.row.mtime_ns)
            return found
        folders, left = [(spot.row.ino, spot.path)], _LOOKED_AT
        while folders and left > 0:
            ino, base = folders.pop(0)
            await self._services.namespace.list_directory(ino)
            after = 0
            while entries := self._services.meta.inodes.children(ino, after, _BATCH):
                after = entries[-1][0]
                left -= len(entries)
                for _, name, row in entries:
                    path = f"{base}/{name.decode()}".lstrip("/")
                    point = checkpoints.find(path, self._patterns)
                    if point is not None:
                        before = found.get(point.root)
                        newest = max(row.mtime_ns, before.mtime_ns if before else 0)
                        found[point.root] = _Candidate(point, newest)
                    elif stat.S_ISDIR(row.mode):
                        folders.append((row.ino, path))
                await trio.lowlevel.checkpoint()
        return found

    # -- judging ------------------------------------------------------------------------------

    async def _judge(self, point: checkpoints.Checkpoint) -> dict[str, Any] | None:
        if self._services.commits.is_pending(point.root):
            return None
        held = await self._services.commits.held(point.root)
        verdict = await self._services.commits.verdict(point.root, held)
        proof = "manifest"
        if verdict is None:
            verdict, proof = await self._by_index(point.root, held), "index"
        elif verdict:
            verdict = await self._is_marked(point.root, held)
        if not verdict:
            return None
        return {
            "path": absolute(self._services, point.root),
            "step": point.step,
            "framework": point.framework,
            "files": len(held),
            "bytes": sum(item.size for item in held.values()),
            "proof": proof,
        }

    async def _is_marked(self, root: str, held: dict[str, ObjectInfo]) -> bool:
        """Whether its saving was finished: who saved it may have ended between two of its files.

        A marker in it says so, or a pointer beside it that names it; one object needs neither.
        """
        names = [key.rpartition("/")[2] for key in held]
        if root in held or any(checkpoints.is_marker(name, self._markers) for name in names):
            return True
        folder = root.rpartition("/")[0]
        entry = entry_at(self._services.meta, folder) if folder else None
        after, parent = 0, entry.ino if entry is not None else ROOT
        while entries := self._services.meta.inodes.children(parent, after, _BATCH):
            after = entries[-1][0]
            for _, raw, row in entries:
                name = raw.decode()
                is_small = row.size <= checkpoints.POINTER_MAX
                if not (is_small and checkpoints.is_marker(name, self._markers)):
                    continue
                if await self._names(f"{folder}/{name}".lstrip("/"), root):
                    return True
        return False

    async def _names(self, pointer: str, root: str) -> bool:
        """Whether a pointer in the bucket names the checkpoint."""
        try:
            body = await self._services.commits.read(pointer, checkpoints.POINTER_MAX)
        except NotFound:
            return False
        return checkpoints.is_named_by(root, pointer, body.decode("utf-8", "replace"))

    async def _by_index(self, root: str, held: dict[str, ObjectInfo]) -> bool:
        if root in held:
            return True  # One object is whole or not there.
        texts: dict[str, bytes] = {}
        for key in filter(indexes.is_index, held):
            try:
                texts[key] = await self._services.commits.read(key, _INDEX_MAX)
            except NotFound:
                return False
        return indexes.is_whole(held, self._markers, texts.__getitem__)
