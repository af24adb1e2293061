"""What runs beside the request handlers: syncing, checkpoints, the patience of temporary names."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
import trio

from cachefs.cache import doubt
from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.leftovers import sweep
from cachefs.cache.system import sync_filesystem
from cachefs.daemon import census
from cachefs.daemon.services import Services
from cachefs.errors import CacheError
from cachefs.failpoints import Change
from cachefs.flush.queue import EffectQueue
from cachefs.flush.reboot import Reboots
from cachefs.flush.recovery import Recovery
from cachefs.flush.superseding import Superseder
from cachefs.meta import Meta
from cachefs.meta.database import CHECKPOINT_BYTES
from cachefs.meta.room import room
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.vfs.contents import Contents
from cachefs.vfs.files import Files

log = structlog.get_logger("cachefs.daemon")

_CHECKPOINT_INTERVAL = 5.0
_RELEASE_INTERVAL = 30.0
_SYNC_DELAY = 0.2
"""Seconds to wait for more files to sync together; many are in the store before."""
_SYNC_BATCH = 512
_SYNC_ALL = 32
"""Files from which one sync of the whole filesystem costs less than theirs."""
_UNSAFE = (GenState.SEALED, GenState.UPLOADING, GenState.STALLED, GenState.CONFLICTED)
_RETRY_INTERVAL = 1.0
_LAST_LOOK = 5.0
_RECOUNT_PAUSES = (1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0)
"""Seconds after each count of the cache files that follows a takeover."""
_SUPERSEDE_INTERVAL = 0.2
"""Seconds between looks for checkpoints to skip."""
_HELD_INTERVAL = 5.0
_RAM_PATIENCE = 60.0
"""Seconds that an orderly end gives to what has to be copied from RAM."""
_DISK_PATIENCE = 10.0
"""Seconds that an orderly end waits for the disks."""


async def keep_going(task: Callable[[], Awaitable[None]], make_room: Callable[[], None]) -> None:
    """Run a task that never returns, and begin it anew when the disk or the database failed it: a
    full or broken disk is no reason to end the mount."""
    while True:
        try:
            await task()
            return
        except (OSError, CacheError, sqlite3.Error) as error:
            failure: BaseException = error
        except BaseExceptionGroup as group:
            disk, other = group.split((OSError, CacheError, sqlite3.Error))
            if disk is None or other is not None:
                raise
            failure = disk
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
        name = getattr(task, "__qualname__", "task")
        log.warning("a task failed and is begun anew", task=name, reason=str(failure))
        make_room()
        await trio.sleep(_RETRY_INTERVAL)


class MetaSync:
    """Group commit: concurrent callers share one sync of the database."""

    def __init__(self, meta: Meta, *, lasting: bool = True) -> None:
        """`lasting`: the database is on a device that outlives a power cut, if it is synced."""
        self._meta = meta
        self._lasting = lasting
        self._lock = trio.Lock()
        self._asked = 0
        self._done = 0
        self.on_synced: Callable[[float], None] = lambda seconds: None
        """Called with the time that each sync took."""

    async def __call__(self) -> None:
        """Return once every commit made before the call survives a power cut. OSError."""
        if not self._lasting:
            return
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._done >= mine:
                return
            covered, began = self._asked, time.perf_counter()
            await trio.to_thread.run_sync(self._meta.db.sync)
            self._done = covered
            self.on_synced(time.perf_counter() - began)


class Syncer:
    """Brings sealed generations to the disk, so that they survive a reboot before the store has
    them. An fsync by a program does the same earlier; this is for those that never ask."""

    def __init__(
        self, meta: Meta, queue: EffectQueue, contents: Contents, sync_meta: MetaSync
    ) -> None:
        self._meta = meta
        self._queue = queue
        self._contents = contents
        self._sync_meta = sync_meta
        self._send, self._receive = trio.open_memory_channel[int](float("inf"))
        if self._lasting():
            contents.on_sealed = lambda sealed: self._send.send_nowait(sealed.gen)

    def _lasting(self) -> set[int]:
        """Devices whose bytes a reboot leaves alone: for others there is nothing to be done."""
        return {each.index for each in self._contents.devices if each.survives > Level.PROCESS}

    async def run(self) -> None:
        """Sync what was left unsynced, then whatever is sealed, some together."""
        for row in self._meta.generations.in_states(GenState.SEALED):
            if not row.synced:
                self._send.send_nowait(row.gen)
        async for first in self._receive:
            await trio.sleep(_SYNC_DELAY)
            await self._sync([first, *self._waiting()])

    def _waiting(self) -> list[int]:
        found: list[int] = []
        while len(found) < _SYNC_BATCH:
            try:
                found.append(self._receive.receive_nowait())
            except trio.WouldBlock:
                break
        return found

    async def _sync(self, gens: list[int]) -> None:
        rows = (self._meta.generations.get(gen) for gen in gens)
        due = [row for row in rows if row and not row.synced and row.state in _UNSAFE]
        lasting = self._lasting()
        groups: dict[int, list[GenerationRow]] = defaultdict(list)
        for row in due:
            if row.device in lasting:
                groups[row.device].append(row)
        for device, group in groups.items():
            await self._sync_group(self._contents.devices[device], group)

    async def _sync_group(self, device: CacheDevice, rows: list[GenerationRow]) -> None:
        done = await trio.to_thread.run_sync(self._sync_files, device, rows)
        try:
            await self._sync_meta()
            with self._meta.transaction(Change.SYNCED):
                for row in done:
                    self._meta.generations.set_synced(row.gen, row.sealed_ns)
            self._queue.kick()  # whoever waits for a survival level looks again
            await self._sync_meta()  # The note as well, or the next boot would not trust the bytes.
        except (OSError, sqlite3.Error) as error:
            log.warning("the database could not be synced", reason=str(error))

    def _sync_files(self, device: CacheDevice, rows: list[GenerationRow]) -> list[GenerationRow]:
        done, together = [], len(rows) >= _SYNC_ALL and self._sync_all(device)
        for row in rows:
            try:
                if together:
                    _check(device, row.file)
                else:
                    self._sync_file(row)
            except OSError as error:
                log.info("a cache file could not be synced", file=row.file, reason=str(error))
            else:
                done.append(row)
        return done

    def _sync_all(self, device: CacheDevice) -> bool:
        try:
            sync_filesystem(device.directory)
        except OSError as error:
            log.info("cache files could not be synced", reason=str(error))
            return False
        return True

    def _sync_file(self, row: GenerationRow) -> None:
        device = self._contents.device(row)
        fd = device.open(row.file)
        try:
            doubt.sync(fd)
        finally:
            os.close(fd)
        device.sync_dir(row.file)


async def empty_ram(services: Services) -> None:
    """At an orderly end: what the store lacks leaves RAM, as far as there is room and time."""
    if services.spiller.active:
        with trio.move_on_after(_RAM_PATIENCE):
            await services.spiller.round()


async def bring_to_disk(meta: Meta, devices: Sequence[CacheDevice]) -> None:
    """At an orderly end: what is in the cache then survives whatever happens to the machine."""
    if meta.generations.in_states(GenState.OPEN):
        return  # Somebody goes on writing.
    with trio.move_on_after(_DISK_PATIENCE):
        unsynced = meta.generations.unsynced()
        for device in (each for each in devices if each.healthy):
            files = [file for where, file in unsynced if where == device.index]
            try:
                await trio.to_thread.run_sync(_bring_all, device, files, abandon_on_cancel=True)
            except OSError as error:
                log.warning("not all that is cached is on the disk", reason=str(error))
                return
        Reboots(meta).all_is_on_disk()


def _bring_all(device: CacheDevice, files: Sequence[int]) -> None:
    sync_filesystem(device.directory)
    for file in files:
        _check(device, file)


def _check(device: CacheDevice, file: int) -> None:
    with suppress(FileNotFoundError):  # The store has it by now, or it is damaged anyhow.
        fd = device.open(file)
        try:
            doubt.check(fd)
        finally:
            os.close(fd)


async def recount(ledgers: Sequence[SpaceLedger]) -> None:
    """After a takeover: writers went on, and go on, while the cache files are counted."""
    async with trio.open_nursery() as nursery:
        for ledger in ledgers:
            nursery.start_soon(_recount, ledger)


async def _recount(ledger: SpaceLedger) -> None:
    """Until a count that nothing disturbs finds nothing wrong; under steady writing those of the
    reaper must do. And once more: what is stored through a mapping that has outlived its descriptor
    is known to nobody since the daemon before."""
    try:
        for pause in _RECOUNT_PAUSES:
            if not await ledger.rescan() and ledger.undisturbed:
                break
            await trio.sleep(pause)
        await trio.sleep(_LAST_LOOK)
        await ledger.rescan()
    except OSError as error:
        log.warning("the cache could not be counted", reason=str(error))


async def checkpoint_database(meta: Meta) -> None:
    """Keep the WAL file short, in a thread. The first checkpoint notes in the database itself that
    it is in use, so that a WAL file that goes missing is missed."""
    due = True
    while True:
        if due:
            try:
                await trio.to_thread.run_sync(meta.db.checkpoint)
            except (OSError, sqlite3.Error) as error:
                log.warning("checkpoint of the database failed", reason=str(error))
        await trio.sleep(_CHECKPOINT_INTERVAL)
        due = meta.db.wal_bytes >= CHECKPOINT_BYTES


async def retry_seals(files: Files, storage: Callable[[], None]) -> None:
    """Record closed files that the database refused; `storage` makes room for it first."""
    while True:
        await trio.sleep(_RETRY_INTERVAL)
        try:
            files.retry_seals()
        except (OSError, sqlite3.Error) as error:
            log.warning("closed files wait to be recorded", reason=str(error))
            storage()


async def supersede(services: Services) -> None:
    """Skip checkpoints that nobody waits for any more, as saves come in."""
    settings = services.settings
    superseder = Superseder(
        services.meta,
        services.queue,
        patterns=settings.checkpoint.patterns,
        markers=settings.order.barrier,
        temps=settings.flush.temp_patterns,
        open_keys=lambda: census.open_keys(services.meta, services.table),
    )
    while True:
        await services.queue.changed()
        await trio.sleep(_SUPERSEDE_INTERVAL)
        await room(services.meta.db)
        try:
            superseder.look()
        except sqlite3.Error as error:
            log.warning("old checkpoints could not be skipped", reason=str(error))


async def settle_held(recovery: Recovery) -> None:
    """Publish what was held for a writer that outlived its mount, once that has ended."""
    while True:
        await trio.sleep(_HELD_INTERVAL)
        try:
            recovery.settle_held()
        except (OSError, sqlite3.Error) as error:
            log.warning("held files could not be looked at", reason=str(error))


async def tidy_memory(places: Collection[Path]) -> None:
    """Once: remove what killed daemons left in memory of caches that are gone."""
    try:
        removed = await trio.to_thread.run_sync(sweep, places, abandon_on_cancel=True)
    except OSError as error:
        log.info("memory could not be tidied up", reason=str(error))
        return
    for left in removed:
        log.info("memory of a cache that is gone was freed", directory=left.directory)


async def record_uses(files: Files, home: CacheDevice) -> None:
    """Keep the order of eviction up to date, when nobody has to wait for that."""
    while True:
        await trio.sleep(_RELEASE_INTERVAL)
        try:
            if home.direct_ok:
                files.record_uses()
        except sqlite3.Error as error:
            log.warning("uses of files could not be recorded", reason=str(error))


async def release_temporary_names(queue: EffectQueue) -> None:
    """Publish what has borne a temporary name for too long."""
    while True:
        await trio.sleep(_RELEASE_INTERVAL)
        queue.release_expired()
