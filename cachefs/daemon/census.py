"""How much the bucket lacks: one count for status, metrics and the end of a mount."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cachefs.daemon.services import Services
from cachefs.daemon.trouble import Troubles
from cachefs.flush.queue import BLOCKED
from cachefs.meta import Meta
from cachefs.meta.summary import Summary
from cachefs.model.states import GenState
from cachefs.observe.metrics import Snapshot
from cachefs.vfs.opened import OpenInode, OpenTable

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of one instant; sizes in bytes."""

    files: int
    """Files and other names that the bucket does not show as they are here."""
    bytes: int
    oldest_seconds: float
    """Age of the oldest pending change, 0.0 without one; files still open do not count."""
    uploading_bytes: int
    stalled_files: int


def open_for_writing(services: Services) -> Iterator[OpenInode]:
    """Files with a name that are open for writing, whether or not they were written to."""
    return _open_for_writing(services.table)


def _open_for_writing(table: OpenTable) -> Iterator[OpenInode]:
    table.settle()
    for opened in list(table.inodes.values()):
        if (opened.writing or opened.writers) and not opened.orphaned:
            yield opened


def open_keys(meta: Meta, table: OpenTable) -> list[str]:
    """Every name of those."""
    dentries = meta.dentries
    names = (dentries.of_inode(opened.ino) for opened in _open_for_writing(table))
    return [dentries.path(name.parent, name.name).decode() for each in names for name in each]


def take(services: Services) -> Census:
    """Count now."""
    summary = Summary(services.meta.db)
    files, size = summary.dirty()
    for opened in open_for_writing(services):
        if opened.writing:
            opened.refresh()
            files += 0 if summary.has_dirty(opened.ino) else 1
            size += opened.size
    mount = services.settings.mount
    return Census(
        files=files + summary.other_changes(mount.uid, mount.gid),
        bytes=size,
        oldest_seconds=_oldest(services),
        uploading_bytes=summary.in_state(GenState.UPLOADING)[1],
        stalled_files=_stalled(services, summary),
    )


def _oldest(services: Services) -> float:
    since = services.queue.waiting_since_ns()
    return 0.0 if since is None else max(0.0, (time.time_ns() - since) / _NS)


def _stalled(services: Services, summary: Summary) -> int:
    rows = services.queue.in_trouble()
    others = sum(1 for row in rows if row.gen is None and row.state == BLOCKED)
    return summary.in_state(GenState.STALLED)[0] + others


def snapshot(services: Services, troubles: Troubles) -> Snapshot:
    """The gauges of the metrics."""
    services.files.note_changes()
    census = take(services)
    restraint, forecast = services.restraint, services.forecast
    lag = services.meta.db.lag
    tier = services.tiering.tier if services.tiering is not None else None
    return Snapshot(
        dirty_bytes=census.bytes,
        dirty_files=census.files,
        oldest_dirty_seconds=census.oldest_seconds,
        uploading_bytes=census.uploading_bytes,
        stalled_files=census.stalled_files,
        effects_pending=Counter(row.klass for row in services.queue.effects.values()),
        effects_blocked=len(troubles.behind()),
        pacer_rate=services.pacer_rate(),
        upload_slots=restraint.slots if restraint else services.settings.flush.concurrency,
        bandwidth_limit_bytes=(restraint.bandwidth or 0.0) if restraint else 0.0,
        pressure_ratio=restraint.pressures if restraint else {},
        cache_used_bytes={str(each.device.directory): each.used for each in services.ledgers},
        cache_size_bytes={str(each.device.directory): each.limit for each in services.ledgers},
        cache_healthy={
            str(each.device.directory): int(each.device.healthy) for each in services.ledgers
        },
        metadata_pending_bytes=lag.nbytes,
        metadata_lag_seconds=lag.seconds,
        waiting_writers=services.files.admission.waiting,
        next_checkpoint_bytes=forecast.nbytes if forecast else 0,
        next_checkpoint_room_bytes=forecast.room if forecast else 0,
        next_checkpoint_fits=forecast is None or forecast.fits,
        takeovers_total=services.takeovers(),
        warm_usable=tier is not None and tier.trouble is None,
        warm_obstructed_files=len(tier.obstacles.all) if tier is not None else 0,
        degraded=services.degraded(),
        uptime_seconds=time.monotonic() - services.started_at,
    )
