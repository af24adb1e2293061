"""What `cachefs status` and `cachefs ls` show."""

from __future__ import annotations

import heapq
import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator
from typing import Any

import trio

from cachefs.daemon import census, devices
from cachefs.daemon.checkpoints import CheckpointIndex
from cachefs.daemon.paths import Spot, absolute, key_in
from cachefs.daemon.services import Services
from cachefs.daemon.trouble import Troubles
from cachefs.flush.pending import in_order
from cachefs.meta.rows import EffectRow, InodeRow
from cachefs.model.states import GenState
from cachefs.model.survival import Level, of_files

MOST = 100
"""Pending changes and errors in an answer."""
_MOST_AWAITED = 5
"""Names that one change is said to wait for."""
_PAGE = 200
"""Entries of a directory that are described before other requests get their turn."""


class StatusReport:
    """Answers about the mount and what is in it."""

    def __init__(self, services: Services, troubles: Troubles) -> None:
        self._services = services
        self._meta = services.meta
        self._queue = services.queue
        self._troubles = troubles
        self._checkpoints = CheckpointIndex(services)

    # -- the mount ----------------------------------------------------------------------------

    async def mount(self) -> dict[str, Any]:
        """How the whole mount is doing."""
        services = self._services
        points = await self._checkpoints.newest()
        counted = census.take(services)
        lanes = services.lanes()
        return {
            "mountpoint": services.mountpoint,
            "store": services.settings.store.url,
            "node": services.settings.node.id,
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - services.started_at,
            "degraded": services.degraded(),
            "metrics": services.metrics_address,
            "lanes": {"passthrough": lanes.passthrough, "reason": lanes.reason},
            "dirty_bytes": counted.bytes,
            "dirty_files": counted.files,
            "oldest_dirty_seconds": counted.oldest_seconds,
            "uploading_bytes": counted.uploading_bytes,
            "stalled_files": counted.stalled_files,
            "cache": self._cache(),
            "tiers": {"warm": services.tiering.status() if services.tiering else None},
            "takeovers": services.takeovers(),
            "requests": services.requests(),
            "checkpoints": points,
            "effects_total": len(self._queue.effects),
            "effects": self._effects(),
            "errors": self._errors(),
        }

    def _cache(self) -> dict[str, Any]:
        used = list(devices.in_use(self._services))
        told = [
            {
                "path": str(ledger.device.directory),
                "kind": str(ledger.device.kind),
                "write_bytes_per_second": _whole(ledger.device.write_speed),
                "used_bytes": ledger.used,
                "size_bytes": ledger.limit,
                "survives": str(ledger.device.survives),
                "healthy": ledger.device.healthy,
                "error": ledger.device.failure,
            }
            for ledger in self._services.ledgers
            if ledger.device in used
        ]
        return {
            "waiting_writers": self._services.files.admission.waiting,
            "next_checkpoint": self._next_checkpoint(),
            "larger_files": self._services.offloader.files,
            "offloaded_bytes": self._services.offloader.total,
            "used_bytes": sum(ledger.used for ledger in self._services.ledgers),
            "size_bytes": sum(ledger.limit for ledger in self._services.ledgers),
            "metadata": self._metadata(),
            "devices": told,
        }

    def _metadata(self) -> dict[str, Any]:
        """Whether commits wait for a disk that stands still, or in memory; and how many do."""
        database = self._meta.db
        lag = database.lag
        return {
            "deferred": database.deferral is not None,
            "reason": "" if database.deferral is not None else database.undeferred,
            "pending_bytes": lag.nbytes,
            "lag_seconds": lag.seconds,
            "error": os.strerror(lag.error) if lag.error else None,
        }

    def _next_checkpoint(self) -> dict[str, Any] | None:
        found = self._services.forecast
        if found is None:
            return None
        return {"expected_bytes": found.nbytes, "room_bytes": found.room, "fits": found.fits}

    def _effects(self) -> list[dict[str, Any]]:
        """The first in line, those in trouble before all others."""
        rows = self._queue.effects
        first = [rows[i] for i in sorted(self._troubles.guilty()) if i in rows][:MOST]
        line = heapq.nsmallest(MOST, rows.values(), key=in_order)
        chosen = {row.id: row for row in (*first, *line)}
        return [self._effect(row) for row in list(chosen.values())[:MOST]]

    def _effect(self, row: EffectRow) -> dict[str, Any]:
        return {
            "path": self._path(row),
            "kind": row.kind,
            "class": row.klass,
            "state": self._state(row),
            "bytes": self._queue.standing(row.id).size,
            "waits_for": self._waits_for(row),
            "error": row.error,
        }

    def _state(self, row: EffectRow) -> str:
        word = self._troubles.word(row)
        if word is not None:
            return word
        if row.id in self._troubles.behind():
            return "blocked"
        if self._queue.standing(row.id).held:
            return "held"
        return "uploading" if self._queue.is_busy(row.id) else "pending"

    def _waits_for(self, row: EffectRow) -> list[str]:
        """The culprit, if there is one, else the next in line before it, or other nodes."""
        lacking = self._services.commits.lacks(row)
        if lacking:
            return [f"{lacking} other {'nodes' if lacking > 1 else 'node'}"]
        culprit = self._queue.effects.get(self._troubles.behind().get(row.id, 0))
        if culprit is not None:
            return [self._path(culprit)]
        return [self._path(each) for each in self._queue.blockers(row.id, _MOST_AWAITED)]

    def _path(self, row: EffectRow) -> str:
        return absolute(self._services, self._queue.standing(row.id).key)

    def _errors(self) -> list[dict[str, str]]:
        errors = [
            {"path": self._path(row), "error": row.error or row.state}
            for row in heapq.nsmallest(MOST, self._queue.in_trouble(), key=in_order)
            if self._troubles.word(row) is not None
        ]
        known = {each["path"] for each in errors}
        errors += [each for each in self._elsewhere() if each["path"] not in known]
        return errors[:MOST]

    def _elsewhere(self) -> Iterator[dict[str, str]]:
        """What no effect tells of."""
        yield from self._held()
        yield from self._obstructed()
        yield from itertools.islice(devices.lost_files(self._services), MOST)

    def _held(self) -> Iterator[dict[str, str]]:
        """Generations that lost their writer: nobody publishes them unasked."""
        for gen in self._meta.generations.in_states(GenState.HELD):
            for name in self._meta.dentries.of_inode(gen.ino)[:1]:
                key = self._meta.dentries.path(name.parent, name.name).decode()
                yield {"path": absolute(self._services, key), "error": gen.error or "held"}

    def _obstructed(self) -> Iterator[dict[str, str]]:
        """Files whose places in the warm tier are taken, or that cannot go there."""
        tiering = self._services.tiering
        found = tiering.tier.obstacles.all if tiering is not None else ()
        for each in itertools.islice(found, MOST):
            yield {"path": absolute(self._services, each.path), "error": each.reason}

    # -- one path -----------------------------------------------------------------------------

    def path(self, spot: Spot) -> dict[str, Any]:
        """How one file, or all below one directory, is doing."""
        if spot.is_dir:
            return self._directory(spot)
        info = self._services.inspector.describe(spot.row)
        rows = self._queue.of_dentry(spot.dentry)
        return {
            "path": absolute(self._services, spot.path),
            "state": info.state,
            "survives": info.survives,
            "lane": info.lane,
            "url": info.url,
            "etag": info.etag,
            "error": info.error,
            "size": self._services.files.overlay(spot.row).size,
            "dirty_bytes": info.dirty_bytes,
            "waits_for": self._waits_for(rows[0]) if rows else [],
        }

    def _directory(self, spot: Spot) -> dict[str, Any]:
        """From the pending effects alone, however large the tree is."""
        effects = self._queue.effects
        rows = [row for i, row in effects.items() if spot.covers(self._queue.standing(i).key)]
        opened = [
            each
            for each in census.open_for_writing(self._services)
            if key_in(self._meta, spot, each.ino) is not None
        ]
        for each in opened:
            each.refresh()
        dirty = sum(self._queue.standing(row.id).size for row in rows if row.gen is not None)
        words = [word for word in map(self._troubles.word, rows) if word is not None]
        return {
            "path": absolute(self._services, spot.path),
            "state": words[0] if words else "dirty" if rows or opened else "durable",
            "survives": str(Level.PROCESS if opened else of_files(self._levels(rows))),
            "lane": None,
            "url": f"{self._services.settings.store.url.rstrip('/')}/{spot.path}".rstrip("/") + "/",
            "etag": None,
            "error": next((row.error for row in rows if row.error), None),
            "size": None,
            "dirty_bytes": dirty + sum(each.size for each in opened),
            "waits_for": [],
        }

    def _levels(self, rows: Iterable[EffectRow]) -> Iterator[Level]:
        for row in rows:
            gen = self._meta.generations.get(row.gen) if row.gen is not None else None
            if gen is not None:
                yield self._services.inspector.survives(gen, gen.state)

    # -- a listing ----------------------------------------------------------------------------

    async def listing(self, spot: Spot) -> list[dict[str, Any]]:
        """The entries of a directory, or a file as its own only one."""
        if not spot.is_dir:
            return [self._entry(spot.path.rpartition("/")[2].encode(), spot.row)]
        await self._services.namespace.list_directory(spot.row.ino)
        entries: list[dict[str, Any]] = []
        after = 0
        while True:
            page = await self._services.namespace.known_entries(spot.row.ino, after, _PAGE)
            entries += [self._entry(name, row) for _, name, row in page]
            await trio.lowlevel.checkpoint()
            if len(page) < _PAGE:
                return entries
            after = page[-1][0]

    def _entry(self, name: bytes, row: InodeRow) -> dict[str, Any]:
        is_dir = stat.S_ISDIR(row.mode)
        info = None if is_dir else self._services.inspector.describe(row)
        row = self._services.files.overlay(row)
        return {
            "name": os.fsdecode(name),
            "type": "dir" if is_dir else "symlink" if stat.S_ISLNK(row.mode) else "file",
            "size": 0 if is_dir else row.size,
            "mtime": row.mtime_ns / 1e9,
            "state": info.state if info is not None else None,
            "survives": info.survives if info is not None else None,
        }


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None else None
