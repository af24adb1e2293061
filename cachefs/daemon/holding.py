"""What a person wants in the cache, or out of it: warm, evict, pin, unpin."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import trio

from cachefs.daemon.paths import Spot, absolute, locate
from cachefs.daemon.services import Services
from cachefs.errors import CachefsError, UsageError
from cachefs.meta.rows import GenerationRow
from cachefs.meta.summary import Summary
from cachefs.model.extents import ExtentSet
from cachefs.observe.control import Progress
from cachefs.observe.protocol import ControlError

_FILES_AT_ONCE = 16
_TICK = 0.2
"""Seconds between two reports of progress."""


@dataclass(slots=True)
class _Wanted:
    """One file to be fetched."""

    ino: int
    key: str
    size: int
    lacking: int
    """Bytes that are not in the cache."""


class Holding:
    """Handlers of the control socket; each takes `paths`, files or trees."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._meta = services.meta
        self._summary = Summary(services.meta.db)

    async def warm(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Fetch what is not in the cache. Exit code 1: missing, does not fit, or not to be had."""
        return await self._warm(await self._spots(args), progress)

    async def pin(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Fetch, and never evict until unpinned."""
        spots = await self._spots(args)
        for spot in spots:
            self._meta.pins.add(spot.path)
        return await self._warm(spots, progress)

    async def unpin(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Take back the pins of paths and of all below them."""
        began = trio.current_time()
        spots = await self._spots(args)
        for spot in spots:
            if self._meta.pins.remove(spot.path):
                continue
            above = self._meta.pins.over(spot.path)
            name = absolute(self._services, spot.path)
            if above is not None:
                raise UsageError(f"{name} is pinned with {absolute(self._services, above)}")
            raise UsageError(f"{name} is not pinned")
        return _result(args["paths"], 0, 0, began)

    async def evict(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Give back the space of what the store holds. What is open, pinned or not in the store yet
        stays: `kept` counts it by reason."""
        began = trio.current_time()
        files = freed = 0
        kept: Counter[str] = Counter()
        spots = await self._spots(args)
        cached = [each for spot in spots for each in await self._cached(spot)]
        left, tell_at = sum(each.size for each in cached), began
        whole = left
        for count, row in enumerate(cached):
            if trio.current_time() >= tell_at:
                await progress(_progress(len(cached), len(cached) - count, whole, left))
                tell_at = trio.current_time() + _TICK
            now = self._meta.generations.get(row.gen)
            reason = self._services.eviction.keeps(now) if now is not None else "gone"
            if reason is None:
                freed += await self._services.eviction.evict(row.gen)
                files += 1
            elif now is not None:
                kept[reason] += 1
            left -= row.size
            await trio.lowlevel.checkpoint()
        return _result(args["paths"], files, freed, began, kept=dict(kept))

    async def _cached(self, spot: Spot) -> list[GenerationRow]:
        """What is in the cache of the files at a path."""
        found = []
        for ino in self._files(spot):
            gen = self._meta.generations.current(ino)
            if gen is not None:
                found.append(gen)
            await trio.lowlevel.checkpoint()
        return found

    # -- fetching -----------------------------------------------------------------------------

    async def _warm(self, spots: Sequence[Spot], progress: Progress) -> dict[str, Any]:
        began = trio.current_time()
        wanted = await self._wanted(spots)
        lacking = [each for each in wanted if each.lacking]
        total = sum(each.lacking for each in lacking)
        if total:
            self._require_room(sum(each.size for each in wanted))
        failures = await self._fetch_all(lacking, progress)
        if failures:
            raise ControlError(f"{len(failures)} of {len(lacking)} files: {failures[0]}")
        names = [absolute(self._services, spot.path) for spot in spots]
        return _result(names, len(lacking), total, began)

    async def _wanted(self, spots: Sequence[Spot]) -> list[_Wanted]:
        found: dict[int, _Wanted] = {}
        for spot in spots:
            if spot.is_dir:
                await self._services.namespace.list_tree(spot.row)
            for ino in self._files(spot):
                row = self._meta.inodes.get(ino)
                if row is not None and stat.S_ISREG(row.mode):
                    key = self._key(ino)
                    found[ino] = _Wanted(ino, key, row.size, self._lacking(ino, row.size))
        return list(found.values())

    def _files(self, spot: Spot) -> list[int]:
        if not spot.is_dir:
            return [spot.row.ino]
        return [row[2] for row in self._summary.subtree(spot.row.ino)]

    def _key(self, ino: int) -> str:
        name = self._meta.dentries.of_inode(ino)[0]
        return self._meta.dentries.path(name.parent, name.name).decode()

    def _lacking(self, ino: int, size: int) -> int:
        gen = self._meta.generations.current(ino)
        if gen is None:
            return size
        return 0 if gen.present is None else gen.size - ExtentSet.unpack(gen.present).total

    def _require_room(self, needed: int) -> None:
        """What is fetched must not push out what was fetched before it."""
        room = sum(each.watermarks.high_bytes for each in self._services.ledgers)
        pending = self._summary.dirty()[1]
        if needed + pending > room:
            raise ControlError(
                f"{needed} bytes are wanted in the cache, which has room for {room - pending}"
            )

    async def _fetch_all(self, lacking: Sequence[_Wanted], progress: Progress) -> list[str]:
        limit = trio.CapacityLimiter(_FILES_AT_ONCE)
        left = {each.ino: each.lacking for each in lacking}
        failures: list[str] = []

        async def one(each: _Wanted) -> None:
            async with limit:
                try:
                    await self._fetch(each.ino)
                except (OSError, CachefsError, sqlite3.Error) as error:
                    name = absolute(self._services, each.key)
                    failures.append(f"{name}: {getattr(error, 'strerror', None) or error}")
            del left[each.ino]

        async def report() -> None:
            whole = sum(left.values())
            while True:
                now = {ino: self._left(ino, lacks) for ino, lacks in left.items()}
                await progress(_progress(len(lacking), len(now), whole, sum(now.values())))
                await trio.sleep(_TICK)

        async with trio.open_nursery() as reporting:
            reporting.start_soon(report)
            async with trio.open_nursery() as nursery:
                for each in lacking:
                    nursery.start_soon(one, each)
            reporting.cancel_scope.cancel()
        return failures

    def _left(self, ino: int, lacking: int) -> int:
        opened = self._services.table.inodes.get(ino)
        if opened is None or opened.fill is None:
            return lacking
        return opened.fill.size - opened.fill.present.total

    async def _fetch(self, ino: int) -> None:
        handle = await self._services.files.open(ino, os.O_RDONLY)
        try:
            await self._services.contents.fetch(handle.inode)
        finally:
            self._services.files.release(handle.fh)

    async def _spots(self, args: dict[str, Any]) -> list[Spot]:
        paths = args.get("paths")
        if not isinstance(paths, list) or not paths:
            raise UsageError("malformed request: `paths` must be a list of paths")
        return [await locate(self._services, path) for path in paths]


def _progress(files: int, files_left: int, nbytes: int, bytes_left: int) -> dict[str, int]:
    return {
        "files_total": files,
        "files_left": files_left,
        "bytes_total": nbytes,
        "bytes_left": bytes_left,
    }


def _result(
    paths: Sequence[str], files: int, nbytes: int, began: float, **more: Any
) -> dict[str, Any]:
    seconds = trio.current_time() - began
    return {"paths": list(paths), "files": files, "bytes": nbytes, "seconds": seconds, **more}
