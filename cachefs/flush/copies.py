"""Second cache files, on a disk, of generations in RAM: which of the two counts.

Asked after a restart, and when RAM is lost while the mount goes on. While the file in RAM is there,
it does. When it is lost, with the machine or by somebody's hand, the
copy takes its place if it was ever whole: it holds what the last fsync promised. Whether anything
was written after that is known (`synced`); if so, or if nobody can tell, it is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from cachefs.cache.device import CacheDevice
from cachefs.failpoints import Change
from cachefs.flush.queue import BLOCKED, EffectQueue
from cachefs.flush.reboot import NOT_ON_DISK
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import TRANSITIONS, Event, GenState
from cachefs.model.survival import Level

log = structlog.get_logger("cachefs.recovery")


def settle(
    meta: Meta, queue: EffectQueue, devices: Sequence[CacheDevice], *, publish_held: bool
) -> None:
    """Decide for each copy. A cache file that is given up here has no row any more, and goes with
    all of that kind. `publish_held`: nothing is held. OSError, sqlite3.Error."""
    for row in meta.generations.with_copies():
        is_good = row.copy_size is not None and _is_whole(devices, row)
        if devices[row.device].exists(row.file):
            # On a disk it was made to move an open file, and is of no use before that has moved.
            if not is_good or devices[row.device].survives > Level.PROCESS:
                _forget(meta, row)
        elif not is_good or (row.state == GenState.DURABLE and not row.synced):
            _forget(meta, row)
        else:
            _take(meta, queue, devices, row, publish_held=publish_held)


def take_lost(
    meta: Meta,
    queue: EffectQueue,
    devices: Sequence[CacheDevice],
    row: GenerationRow,
    *,
    publish_held: bool,
) -> bool:
    """The cache file of a closed generation is lost: go on with its copy, if it has a good one.
    sqlite3.Error."""
    if row.copy_size is None or not _is_whole(devices, row):
        return False
    _take(meta, queue, devices, row, publish_held=publish_held)
    return True


def _is_whole(devices: Sequence[CacheDevice], row: GenerationRow) -> bool:
    assert row.copy_device is not None
    assert row.copy_file is not None
    try:
        size = devices[row.copy_device].stat(row.copy_file).st_size
    except OSError:
        return False
    return size >= (row.copy_size or 0)


def _forget(meta: Meta, row: GenerationRow) -> None:
    with meta.transaction(Change.FORGET_COPY):
        meta.generations.forget_copy(row.gen)


def _take(
    meta: Meta,
    queue: EffectQueue,
    devices: Sequence[CacheDevice],
    row: GenerationRow,
    *,
    publish_held: bool,
) -> None:
    log.info("a cache file is lost, its copy is taken", generation=row.gen, file=row.file)
    with meta.transaction(Change.TAKE_COPY):
        meta.generations.move_to_copy(row.gen)
        if row.synced:
            return
        _measure(meta, devices, row.gen)
        held = TRANSITIONS[GenState(row.state)].get(Event.HOLD, GenState(row.state))
        if row.state == GenState.OPEN:
            meta.generations.set_state(row.gen, row.state, NOT_ON_DISK)  # It is settled next.
        elif not publish_held:
            meta.generations.set_state(row.gen, held, NOT_ON_DISK)
            for effect in queue.of_gen(row.gen):
                queue.set_state(effect, BLOCKED, NOT_ON_DISK)


def _measure(meta: Meta, devices: Sequence[CacheDevice], gen: int) -> None:
    """Size and time are those of the copy."""
    row = meta.generations.get(gen)
    assert row is not None
    status = devices[row.device].stat(row.file)
    row.size, row.dirty, row.crc64 = status.st_size, None, None
    meta.generations.save(row)
    inode = meta.inodes.get(row.ino)
    if inode is not None and inode.gen == gen:
        meta.inodes.set_content(inode.ino, status.st_size, status.st_blocks, status.st_mtime_ns)
