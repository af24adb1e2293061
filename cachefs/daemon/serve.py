"""One daemon from start to end: what runs, in which nursery, and how it stops.

Nurseries, outermost first: movers; background tasks (flusher, reaper, syncer, control socket);
the request loop. The end comes from a signal, a control request, or the kernel's end of the
connection. Then, in order: drain (as asked for), stop taking requests, sync the database, exit.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import structlog
import trio

from cachefs import failpoints
from cachefs.cache.filler import Fetch, Filler, open_filler
from cachefs.cache.reaper import Reaper
from cachefs.daemon import devices, selfreport, tasks
from cachefs.daemon.arguments import CLEAN, FAILED, REMAINS, UPGRADE, Arguments
from cachefs.daemon.compose import Parts, compose
from cachefs.daemon.fetching import fetcher
from cachefs.daemon.foresight import Foresight
from cachefs.daemon.handlers import (
    Remaining,
    drain,
    gathered,
    make_handlers,
    refresh_snapshot,
)
from cachefs.daemon.joining import join
from cachefs.daemon.services import Lanes, Services
from cachefs.daemon.session import StoreSession, WrongStore
from cachefs.daemon.speeds import Speeds
from cachefs.daemon.storage import Storage, open_storage
from cachefs.daemon.takeover import restore_handles
from cachefs.daemon.tiering import ReadWarm, Tiering
from cachefs.errors import CachefsError, MountError, StoreError
from cachefs.flush.client import StoreClient
from cachefs.flush.movers import MoverPool, open_movers
from cachefs.fuse import tap as taps
from cachefs.fuse.smallfiles import NoSmallFiles, SmallFileMaker
from cachefs.meta import Meta
from cachefs.observe import log as logs
from cachefs.observe import runfiles
from cachefs.observe.control import serve_control
from cachefs.observe.metrics import Metrics
from cachefs.supervised import objection, python_module

log = structlog.get_logger("cachefs.daemon")

Report = Callable[[int | None, dict[str, object]], None]
_UPGRADE_PATIENCE = 10.0
_FUSE_TASKS = 4096
"""Requests at a time: those that wait for a silent store must not keep others from being heard."""
_LAST_MANIFESTS = 5.0
"""Seconds that the end of a mount gives to manifests of what has just become durable, and to the
hidden objects that it was made of."""
_EPOCH_AT = 12
_METRICS_PORT = "metrics_port"
_RECOGNITION = 1.5
"""Seconds that a mount waits for a store its cache knows, to be sure that it is the same."""


class Server:
    """The daemon of one mount."""

    def __init__(self, arguments: Arguments, report: Report) -> None:
        self._arguments = arguments
        self._settings = arguments.settings
        self._report = report
        self._started_at = time.monotonic()
        self._metrics = Metrics()
        self._stop = trio.Event()
        self._reason = ""
        self._warnings: list[str] = []
        self._code = CLEAN

    def run(self) -> int:
        """Serve until the end; returns the exit code. Raises CachefsError when it cannot start."""
        storage = open_storage(self._settings, runfiles.memory_dirs())
        try:
            storage.note_memory(runfiles.memory_dirs())
            stack_depth = max(device.stack_depth for device in storage.devices)
            mount = self._settings.mount
            loaded = taps.load(
                self._arguments.state_fd,
                mount.passthrough == "auto",
                stack_depth,
                want_takeover=mount.takeover == "auto",
            )
            tap = loaded if isinstance(loaded, taps.Tap) else None
            for device in storage.devices:
                device.keep_closings(runfiles.memory_dirs())
                if tap is not None and device.closings is not None:
                    tap.use_close_table(device.index, device.closings.table)
            if tap is not None and not failpoints.ARMED:
                tap.answer_briefly()
            reason = "" if tap is not None else str(loaded)
            if storage.shares_disk(sys.stderr.fileno()):
                logs.write_apart()
            trio.run(self._main, storage, tap, reason)
        except BaseExceptionGroup as group:
            raise _cause(group) from group
        finally:
            storage.close()
            logs.finish()
        return self._code

    # -- start --------------------------------------------------------------------------------

    async def _main(self, storage: Storage, tap: taps.Tap | None, reason: str) -> None:
        settings = self._settings
        store = settings.store.model_dump(mode="json")
        async with (
            open_movers(store, settings.flush.movers, settings.flush.threads) as pool,
            _LateFiller(self._metrics) as late,
        ):
            self._warnings += storage.warnings()
            for warning in self._warnings:
                log.error(warning)
            parts = compose(settings, storage, pool, late.connect, tap, self._metrics)
            await self._meet_store(parts)
            await self._serve(parts, pool, tap, reason)

    async def _meet_store(self, parts: Parts) -> None:
        """A cache that knows its store mounts without it, but not with another; a new one needs it
        now."""
        session = parts.session
        session.check_remembered()
        if not session.is_fresh:
            await self._recognise(session)
            return
        try:
            await session.open()
        except (StoreError, MountError) as error:
            if self._settings.store.require:
                raise MountError(
                    f"cannot use {self._settings.store.url}: {error}",
                    hint=error.hint or "`-o store.require=false` mounts without the store",
                ) from error
            session.problem = str(error)

    async def _recognise(self, session: StoreSession) -> None:
        if self._takes_over():
            return  # Requests wait; the store was the right one a moment ago.
        with trio.move_on_after(_RECOGNITION):
            try:
                await session.open()
            except WrongStore:
                raise
            except (StoreError, MountError) as error:
                session.problem = str(error)

    def _takes_over(self) -> bool:
        """Whether a daemon of this connection went before us: restarts are counted in the state
        that the supervisor shares (`supervised.TapState`)."""
        fd = self._arguments.state_fd
        return fd is not None and os.pread(fd, 4, _EPOCH_AT) not in (b"", bytes(4))

    async def _serve(
        self, parts: Parts, pool: MoverPool, tap: taps.Tap | None, reason: str
    ) -> None:
        import pyfuse3

        from cachefs.fuse.guard import RequestObserver
        from cachefs.fuse.kernelcache import KernelCache
        from cachefs.fuse.listings import Listings
        from cachefs.fuse.ops import CacheOperations

        parts.namespace.make_root()
        small = self._small_files(parts, tap)
        ttl = self._settings.mount.metadata_ttl
        grant = tap.set_listing if tap is not None else None
        listings = Listings(grant, parts.table.directories, lifetime=ttl)
        kernel = KernelCache(listings)
        parts.resolver.on_changed, parts.resolver.on_shown = kernel.forget, listings.forget
        parts.refresher.on_changed = kernel.lead_elsewhere
        parts.refresher.rounds.hold = small.held
        operations = CacheOperations(
            parts.storage.meta,
            parts.namespace,
            parts.files,
            parts.inspector,
            parts.space,
            RequestObserver(self._request_seconds, self._request_failed),
            listings,
            attr_timeout=ttl,
            announce=parts.announce,
            current_request=tap.current if tap is not None else None,
            times_of_now=tap.times_of_now if tap is not None else None,
            gather=small.gather,
            on_created=small.created,
        )
        operations.before_open = parts.prefetcher.before_open
        operations.askers = parts.askers
        address = self._serve_metrics(parts.storage.meta)
        services = self._services(parts, tap, reason, address)
        join(operations, self._arguments.fuse_fd, tap, live=self._takes_over())
        lives = tap is not None and tap.is_takeover
        parts.streams.recover()
        recovered = parts.recovery.run(restore_handles(services, tap), mount_lives=lives)
        parts.contents.reserve_numbers(recovered.highest_file)
        operations.remember_applied(taken_over=lives)
        small.start(self._settings.mount.metadata_ttl)
        parts.storage.note_memory(runfiles.memory_dirs())
        log.info("recovered", dirty=recovered.dirty, held=recovered.held, lost=recovered.lost)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(tasks.tidy_memory, runfiles.memory_dirs())
            nursery.start_soon(selfreport.run, lambda: tap.inflight() if tap is not None else [])
            await self._start_background(nursery, parts, services, small)
            if lives:
                nursery.start_soon(tasks.recount, parts.storage.ledgers)
            parts.session.remember()
            nursery.start_soon(self._fuse_loop, pyfuse3)
            self._report(self._arguments.ready_fd, {"ok": True, "warnings": self._warnings})
            await self._stop.wait()
            await self._end(services, tap, small)
            pool.shut_down()
            nursery.cancel_scope.cancel()
        self._metrics.close()

    def _serve_metrics(self, meta: Meta) -> str | None:
        """Where metrics are. A free port (0) stays the mount's own: who reads them knows it."""
        wanted, port = self._settings.metrics.address, meta.setting(_METRICS_PORT)
        if wanted is not None and wanted[1] == 0 and port is not None and self._takes_over():
            with suppress(MountError):  # Somebody else may have it by now.
                return self._metrics.serve((wanted[0], int(port)))
        address = self._metrics.serve(wanted)
        if address is not None:
            meta.set_setting(_METRICS_PORT, address.rpartition(":")[2])
        return address

    def _small_files(self, parts: Parts, tap: taps.Tap | None) -> NoSmallFiles:
        """Take in those that the daemon before made last, and be ready to make more."""
        found = parts.small.recover()
        if found:
            log.info("small files were left in the journal", files=found)
        if tap is None or failpoints.ARMED or self._settings.mount.small_files == "off":
            return NoSmallFiles()
        meta = parts.storage.meta
        return SmallFileMaker(tap, meta, parts.namespace, parts.small)

    async def _objection(self) -> str:
        arguments = self._arguments
        assert arguments.state_fd is not None
        words = [str(arguments.settings_file), "--mountpoint", arguments.mountpoint]
        ask = partial(objection, [*python_module("cachefs.daemon"), *words], arguments.state_fd)
        return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)

    def _services(
        self, parts: Parts, tap: taps.Tap | None, reason: str, address: str | None
    ) -> Services:
        return Services(
            settings=self._settings,
            mountpoint=self._arguments.mountpoint,
            meta=parts.storage.meta,
            queue=parts.queue,
            table=parts.table,
            namespace=parts.namespace,
            files=parts.files,
            contents=parts.contents,
            inspector=parts.inspector,
            devices=parts.storage.devices,
            home=parts.storage.home,
            ledgers=parts.storage.ledgers,
            flusher=parts.flusher,
            resolver=parts.resolver,
            eviction=parts.eviction,
            spiller=parts.spiller,
            hot=parts.hot,
            offloader=parts.offloader,
            commits=parts.commits,
            hidden=parts.hidden,
            metrics=self._metrics,
            started_at=self._started_at,
            lanes=lambda: _lanes_of(tap, reason),
            takeovers=lambda: tap.takeovers if tap is not None else 0,
            requests=lambda: _requests_of(tap),
            degraded=lambda: parts.session.is_degraded,
            metrics_address=address,
            sync_meta=parts.sync_meta,
            on_names=parts.refresher.on_changed,
            hold=parts.refresher.rounds.hold,
            pacer_rate=lambda: parts.pacing.rate,
            restraint=parts.restraint,
            tiering=parts.tiering,
            can_upgrade=lambda: tap is not None and tap.takeover_possible,
            objection=self._objection,
        )

    async def _start_background(
        self, nursery: trio.Nursery, parts: Parts, services: Services, small: NoSmallFiles
    ) -> None:
        if parts.session.problem is not None:
            if parts.session.is_fresh or parts.session.problem != "not asked yet":
                self._warnings.append(f"the store cannot be used: {parts.session.problem}")
            make_room = parts.storage.make_room
            nursery.start_soon(tasks.keep_going, parts.session.keep_trying, make_room)
        if self._settings.cache.measure:
            speeds = Speeds(parts.storage.meta, parts.storage.ledgers)
            speeds.recall()
            nursery.start_soon(speeds.run)
        evicted = self._metrics.counter("cachefs_evicted_bytes_total")
        overruns = self._metrics.counter("cachefs_overruns_total")
        reaper = Reaper(
            parts.storage.ledgers,
            parts.eviction,
            on_evicted=lambda _, size: evicted.inc(size),
            on_overrun=lambda _, gen: overruns.inc(),
        )
        make_room = parts.storage.make_room
        background: list[Callable[[], Awaitable[None]]] = [
            reaper.run,
            parts.syncer.run,
            parts.askers.run,
            parts.spiller.run,
            parts.rescuer.run,
            parts.hot.run,
            Foresight(services).run,
            parts.leaving.run,
            parts.contents.fresh.run,
            parts.snapshots.run,
            parts.publisher.decay.run,
            parts.restraint.run,
            partial(tasks.checkpoint_database, parts.storage.meta),
            partial(tasks.release_temporary_names, parts.queue),
            parts.files.lingering.run,
            partial(tasks.settle_held, parts.recovery),
            partial(tasks.record_uses, parts.files, parts.storage.home),
            partial(tasks.retry_seals, parts.files, make_room),
            partial(refresh_snapshot, services),
            partial(devices.watch, services, small.renew),
        ]
        if parts.tiering is not None:
            background.append(parts.tiering.run)
            await self._look_at_tier(parts.tiering)
        if self._settings.checkpoint.supersede == "unstarted":
            background.append(partial(tasks.supersede, services))
        nursery.start_soon(self._when_usable, parts)
        for task in background:
            nursery.start_soon(tasks.keep_going, task, make_room)
        nursery.start_soon(small.run)
        handlers = gathered(make_handlers(services, self.shut_down), small)
        socket = runfiles.socket_path(self._arguments.mountpoint)
        await nursery.start(serve_control, socket, handlers)

    async def _look_at_tier(self, tiering: Tiering) -> None:
        """A mount comes up without its warm tier; who mounts is told."""
        if not self._takes_over() and (problem := await tiering.look()) is not None:
            self._warnings.append(f"nothing is copied to the warm tier: {problem}")

    async def _when_usable(self, parts: Parts) -> None:
        """Nothing is sent to a store before it is known to be the right one."""
        await parts.session.usable.wait()
        make_room = parts.storage.make_room
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tasks.keep_going, parts.flusher.sweep, make_room)
            nursery.start_soon(tasks.keep_going, parts.flusher.run, make_room)
            nursery.start_soon(tasks.keep_going, parts.refresher.run, make_room)
            nursery.start_soon(tasks.keep_going, parts.session.keep_looking, make_room)
            nursery.start_soon(tasks.keep_going, parts.session.tidy_up, make_room)
            nursery.start_soon(tasks.keep_going, parts.commits.run, make_room)
            nursery.start_soon(tasks.keep_going, parts.prefetcher.run, make_room)
            nursery.start_soon(tasks.keep_going, parts.hidden.run, make_room)
            nursery.start_soon(tasks.keep_going, parts.offloader.run, make_room)

    # -- requests -----------------------------------------------------------------------------

    async def _fuse_loop(self, pyfuse3: object) -> None:
        try:
            await pyfuse3.main(max_tasks=_FUSE_TASKS)  # type: ignore[attr-defined]
        except Exception as error:
            cause = _cause(error) if isinstance(error, BaseExceptionGroup) else error
            # To end in order would leave requests unanswered. The next daemon gets them all.
            log.critical("requests cannot be read any more", reason=repr(cause))
            os._exit(FAILED)
        self.shut_down("the connection ended")

    def _request_seconds(self, op: str) -> Callable[[float], None]:
        observe: Callable[[float], None] = self._metrics.histogram(
            "cachefs_fuse_request_seconds", op
        ).observe
        return observe

    def _request_failed(self, op: str, name: str, expected: bool) -> None:
        self._metrics.counter("cachefs_fuse_errors_total", op, name).inc()
        if not expected:
            self._metrics.counter("cachefs_fuse_bugs_total").inc()

    # -- end ----------------------------------------------------------------------------------

    def shut_down(self, reason: str) -> None:
        """Begin the end: `reason` is unmount, upgrade, a signal's name, or what happened."""
        if not self._stop.is_set():
            self._reason = reason
            self._stop.set()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                self.shut_down(signal.Signals(number).name)

    async def _end(self, services: Services, tap: taps.Tap | None, small: NoSmallFiles) -> None:
        log.info("ending", reason=self._reason)
        if self._reason == "upgrade" and tap is not None:
            await self._quiesce(tap)
            await self._stop_making(services, small)
            self._code = UPGRADE
        else:
            await self._stop_making(services, small)
            remaining = await self._drain(services)
            with trio.move_on_after(_LAST_MANIFESTS), suppress(StoreError):
                await services.commits.write_due()
                await services.hidden.sweep()
            self._code = REMAINS if remaining.files else CLEAN
        try:
            await tasks.empty_ram(services)
            await tasks.bring_to_disk(services.meta, services.devices)
            await services.sync_meta()
        except (OSError, sqlite3.Error) as error:
            log.error("the database could not be synced", reason=str(error))

    async def _stop_making(self, services: Services, small: NoSmallFiles) -> None:
        try:
            await small.stop()
        except (OSError, sqlite3.Error) as error:
            log.error("new files stay in the journal", reason=str(error))
        await services.contents.fresh.stop()

    async def _drain(self, services: Services) -> Remaining:
        timeout = self._settings.flush.drain_timeout
        if self._reason == "unmount":
            timeout = 0.0  # The request that asked for it has drained already.
        return await drain(services, timeout)

    async def _quiesce(self, tap: taps.Tap) -> None:
        """Take no more requests, answer those at hand; the next daemon goes on from there."""
        tap.pause(True)
        with trio.move_on_after(_UPGRADE_PATIENCE):
            # The table is kept in C, which has no event to offer.
            while tap.inflight():  # noqa: ASYNC110
                await trio.sleep(0.005)


class _LateFiller:
    """A filler that is open before the client it fetches with exists."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._fetch: Fetch | None = None
        self._manager = open_filler(self._call)
        self._filler: Filler | None = None

    async def _call(
        self, key: str, path: str, start: int, end: int, if_match: str | None
    ) -> tuple[int, int | None]:
        assert self._fetch is not None
        return await self._fetch(key, path, start, end, if_match)

    def connect(self, client: StoreClient, read_warm: ReadWarm) -> Filler:
        """The filler, now that there is a client."""
        self._fetch = fetcher(client, self._metrics, read_warm)
        assert self._filler is not None
        return self._filler

    async def __aenter__(self) -> _LateFiller:
        self._filler = await self._manager.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._manager.__aexit__(*exc)  # type: ignore[arg-type]


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What nurseries wrapped: the error for people if there is one, else the first."""
    known = group.subgroup(CachefsError)
    leaf: BaseException = known if known is not None else group
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf


def _lanes_of(tap: taps.Tap | None, reason: str) -> Lanes:
    if tap is None:
        return Lanes(False, reason)
    return Lanes(tap.passthrough_ok, tap.passthrough_reason)


def _requests_of(tap: taps.Tap | None) -> dict[str, int]:
    counts = tap.counts() if tap is not None else {}
    return {opcode.name: count for opcode, count in counts.items() if count}
