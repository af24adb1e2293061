"""Puts the parts of a daemon together. Every default comes from the settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import structlog

from cachefs.cache.device import CacheDevice
from cachefs.cache.filler import Filler
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.placement import Placement
from cachefs.config import Settings
from cachefs.daemon.census import open_keys
from cachefs.daemon.counting import damage_reporter, store_observer, write_observer
from cachefs.daemon.fetching import checksums, make_prefetcher, reader_of
from cachefs.daemon.keeping import HotTier
from cachefs.daemon.resolving import Resolver
from cachefs.daemon.restraint import make_restraint
from cachefs.daemon.roommaking import connect_offloader, connect_spiller
from cachefs.daemon.session import BucketReader, StoreSession
from cachefs.daemon.storage import Storage
from cachefs.daemon.tasks import MetaSync, Syncer
from cachefs.daemon.tiering import ReadWarm, Tiering, read_nothing
from cachefs.flush import copies
from cachefs.flush.client import StoreClient
from cachefs.flush.commits import Commits
from cachefs.flush.flusher import Flusher
from cachefs.flush.hidden import HiddenSpans
from cachefs.flush.movers import MoverPool
from cachefs.flush.pacing import Pacing
from cachefs.flush.pressure import Restraint
from cachefs.flush.publisher import Publisher
from cachefs.flush.queue import EffectQueue
from cachefs.flush.recovery import Recovery
from cachefs.fuse.lanes import PassthroughLanes
from cachefs.fuse.tap import Tap
from cachefs.meta import Meta
from cachefs.meta.room import room
from cachefs.model import names
from cachefs.model.effects import OrderRules, is_unordered
from cachefs.model.pacer import PacerRules
from cachefs.model.survival import Level
from cachefs.observe.metrics import Metrics
from cachefs.store.base import FileRange
from cachefs.tiers.complete import Complete
from cachefs.vfs.admission import Admission
from cachefs.vfs.askers import Askers
from cachefs.vfs.borrowing import Borrower
from cachefs.vfs.contents import Contents
from cachefs.vfs.eviction import Eviction
from cachefs.vfs.files import Files
from cachefs.vfs.lanes import LaneKeeper, TrackedOnly
from cachefs.vfs.leaving import Leaving
from cachefs.vfs.namespace import Namespace
from cachefs.vfs.offloading import Offloader
from cachefs.vfs.opened import OpenInode, OpenTable
from cachefs.vfs.plausible import PlausibleReader
from cachefs.vfs.prefetch import Prefetcher
from cachefs.vfs.refreshing import Refresher
from cachefs.vfs.remote import RemoteView
from cachefs.vfs.rescuing import Rescuer
from cachefs.vfs.rewriting import Rewriter
from cachefs.vfs.rounds import Rounds
from cachefs.vfs.sizes import Sizes
from cachefs.vfs.smallfiles import SmallFiles
from cachefs.vfs.snapshots import Snapshots
from cachefs.vfs.space import Space
from cachefs.vfs.spilling import Spiller
from cachefs.vfs.streaming import Streams
from cachefs.vfs.texts import text_of
from cachefs.vfs.trimming import Trimmer
from cachefs.vfs.virtual import Inspector

log = structlog.get_logger("cachefs.daemon")

_TASKS_PER_REQUEST = 4
"""Effects in progress for each request in flight: some wait for the database or their turn."""


def prefix_of(url: str) -> str:
    """The prefix that keys have in the store: `a/b/` of `s3://bucket/a/b`, empty for files."""
    parts = urlsplit(url)
    inner = parts.path.strip("/") if parts.scheme == "s3" else ""
    return inner + "/" if inner else ""


@dataclass(slots=True)
class Parts:
    """A daemon's parts, put together."""

    storage: Storage
    queue: EffectQueue
    table: OpenTable
    client: StoreClient
    session: StoreSession
    contents: Contents
    namespace: Namespace
    files: Files
    inspector: Inspector
    space: Space
    publisher: Publisher
    flusher: Flusher
    recovery: Recovery
    resolver: Resolver
    eviction: Eviction
    pacing: Pacing
    tiering: Tiering | None
    hot: HotTier
    restraint: Restraint
    syncer: Syncer
    snapshots: Snapshots
    sync_meta: MetaSync
    leaving: Leaving
    announce: Callable[..., bool]
    refresher: Refresher
    commits: Commits
    prefetcher: Prefetcher
    small: SmallFiles
    spiller: Spiller
    rescuer: Rescuer
    hidden: HiddenSpans
    streams: Streams
    borrower: Borrower
    offloader: Offloader
    askers: Askers


def compose(
    settings: Settings,
    storage: Storage,
    pool: MoverPool,
    make_filler: Callable[[StoreClient, ReadWarm], Filler],
    tap: Tap | None,
    metrics: Metrics,
) -> Parts:
    """Wire everything up; nothing runs yet."""
    meta, devices, ledgers = storage.meta, storage.devices, storage.ledgers
    queue = EffectQueue(
        meta,
        _order_rules(settings),
        settle=settings.flush.settle,
        settle_max=settings.flush.settle_max,
        temp_hold=settings.flush.temp_hold,
        large_from=settings.flush.single_put_max,
    )
    pacing = Pacing(
        PacerRules(
            initial_rate=settings.pacer.initial_rate,
            min_rate=settings.pacer.min_rate,
            max_rate=settings.pacer.max_rate,
            decrease=settings.pacer.decrease,
        ),
        concurrency=settings.flush.concurrency,
    )
    prefix = prefix_of(settings.store.url)
    client = StoreClient(pool, pacing, prefix, observe=store_observer(metrics))
    session = StoreSession(meta, client, settings, storage.name)
    owner = (settings.mount.uid, settings.mount.gid)
    remote = RemoteView(
        meta,
        PlausibleReader(BucketReader(client)),
        uid=owner[0],
        gid=owner[1],
        umask=settings.mount.umask,
    )
    askers = Askers() if tap is None else Askers(tap.caller, tap.is_given_up)
    lasting = storage.home.survives > Level.PROCESS
    tiering = None
    complete = _complete(settings, meta)
    if settings.tiers.warm is not None:
        tiering = Tiering(settings, meta, devices, queue, metrics, complete)
    sync_meta = MetaSync(meta, lasting=lasting)
    client.before_change = sync_meta
    client.before_part = partial(room, meta.db)
    meta.db.on_full = storage.make_room
    sizes = Sizes(meta)
    lanes, announce = _lanes(settings, ledgers, sizes, tap, metrics)
    placement = Placement(ledgers)
    contents = Contents(
        meta,
        queue,
        devices,
        placement,
        make_filler(client, tiering.read if tiering is not None else read_nothing),
        remote,
        lanes,
    )
    remote.while_wanted = contents.while_wanted = askers.wanted
    rewriter = Rewriter(
        meta, queue, contents, preserve_limit=settings.cache.preserve_limit, sync_meta=sync_meta
    )
    rewriter.has_room = lambda device, nbytes: nbytes <= ledgers[device.index].headroom()
    contents.on_account = _accountant(ledgers)
    contents.checksum = lambda path, size: client.checksum(FileRange(path, 0, size))
    contents.fetched = checksums(client)
    contents.unkept = reader_of(client, metrics, tiering)
    contents.on_damaged = damage_reporter(metrics)
    leaving = Leaving(sync_meta, contents, lasting=lasting)
    contents.leave = leaving.add
    namespace = Namespace(
        meta, queue, remote, prefix_bytes=len(prefix.encode()), uid=owner[0], gid=owner[1]
    )
    table = OpenTable()
    space = Space(meta, ledgers, table)
    admission = _admission(settings, meta, ledgers, tap)
    contents.room_to_write = admission.look_for_room
    hidden = HiddenSpans(meta, client, settings.node.id)
    streams = Streams(meta, table, contents, lanes, ledgers, admission, hidden, sync_meta=sync_meta)
    contents.stream_of = streams.of
    files = Files(
        meta,
        namespace,
        contents,
        rewriter,
        lanes,
        table,
        ledgers,
        admission=admission,
        streams=streams,
        sync_meta=sync_meta,
    )
    journal = storage.journal()
    small = SmallFiles(meta, queue, contents, files, ledgers, lanes, announce, journal)
    spiller = Spiller(
        meta,
        queue,
        table,
        contents,
        placement,
        ledgers,
        admission,
        sync_meta=sync_meta,
        lasting=lasting,
    )
    connect_spiller(spiller, files, lanes, metrics)
    rules = _order_rules(settings)
    snapshots = Snapshots(
        meta,
        queue,
        table,
        contents,
        interval=settings.flush.open_file_interval,
        is_log=lambda path: is_unordered(rules, path),
    )
    if tap is not None:
        files.kills_privileges = tap.kills_privileges
    files.is_log = lambda path: is_unordered(rules, path)
    files.before_rewrite = snapshots.spoil
    files.on_written = write_observer(metrics)
    files.on_read = metrics.counter("cachefs_read_bytes_total").inc
    meta.db.on_committed = metrics.histogram("cachefs_db_commit_seconds", "normal").observe
    sync_meta.on_synced = metrics.histogram("cachefs_db_commit_seconds", "full").observe
    commits = Commits(
        meta,
        queue,
        client,
        node=settings.node.id,
        nodes=settings.checkpoint.nodes,
        patterns=settings.checkpoint.patterns,
        markers=settings.order.barrier,
        temps=settings.flush.temp_patterns,
        open_keys=lambda: open_keys(meta, table),
        text_of=lambda effect: text_of(meta, contents, effect),
    )
    queue.may_pass = lambda row: (
        files.all_released(row.queued_ns or time.time_ns()) and commits.may_pass(row)
    )
    publisher = Publisher(
        meta,
        queue,
        client,
        lambda row: contents.device(row).path(row.file),
        part_size=settings.flush.part_size,
        single_put_max=settings.flush.single_put_max,
        owner=owner,
    )
    rescuer = Rescuer(meta, queue, contents)
    contents.rescue = publisher.decay.rescue = rescuer.rescue
    rescuer.take_copy = partial(
        copies.take_lost, meta, queue, devices, publish_held=settings.flush.held == "publish"
    )
    publisher.on_durable = metrics.histogram("cachefs_durable_lag_seconds").observe
    retries = metrics.counter("cachefs_upload_retries_total")
    flusher = Flusher(
        meta,
        queue,
        publisher,
        client,
        tasks=_TASKS_PER_REQUEST * settings.flush.concurrency,
        node=settings.node.id,
        barriers=tuple(settings.order.barrier),
        on_retry=lambda reason: retries.inc(),
    )

    def is_kept(opened: OpenInode) -> bool:
        return opened.device.index in spiller.volatile or files.names_log(opened.ino)

    offloader = Offloader(
        meta,
        queue,
        table,
        contents,
        ledgers,
        admission,
        streams,
        hidden,
        sync_meta=sync_meta,
        is_kept=is_kept,
    )
    connect_offloader(offloader, files, spiller, session, metrics)
    borrower = Borrower(
        meta,
        queue,
        contents,
        ledgers,
        streams,
        hidden,
        sync_meta=sync_meta,
        may_stream=lambda opened: admission.is_patient and not is_kept(opened),
    )
    rewriter.borrow = borrower.borrow
    borrower.can_copy = lambda: offloader.can_copy()
    if tap is not None:
        offloader.held_up = spiller.held_up = tap.left
        spiller.hold = tap.hold
    publisher.on_assembled = contents.on_assembled = streams.released
    recovery = Recovery(
        meta,
        queue,
        devices,
        publish_held=settings.flush.held == "publish",
        is_log=files.is_log,
        forget_inode=contents.forget_inode,
        on_freed=lambda device, nbytes: ledgers[device.index].credit(nbytes),
    )
    recovery.settle_spans = streams.recover
    syncer = Syncer(meta, queue, contents, sync_meta)
    contents.on_sealed = both(contents.on_sealed, sizes.note)
    inspector = Inspector(meta, queue, table, devices, settings.store.url)
    inspector.home = storage.home
    trimmer = Trimmer(meta, table, contents, lanes, sync_meta=sync_meta)
    trimmer.is_waited_for = lambda device: ledgers[device].wanted > 0
    trimmer.is_pressing = lambda device: admission.waits_for(ledgers[device]) > 0
    for ledger in ledgers:
        ledger.before_scan = contents.fetches.count_all
    eviction = Eviction(meta, queue, table, contents, sweep=leaving.sweep, trimmer=trimmer)
    if tiering is not None:
        tiering.attach(inspector, eviction, contents, commits)
        rescuer.find = tiering.regain
    warm_lacks = tiering.lacks if tiering is not None else lambda root: False
    prefetcher = make_prefetcher(settings, meta, files, contents, space, lanes)
    prefetcher.while_wanted = askers.wanted
    return Parts(
        storage=storage,
        queue=queue,
        table=table,
        client=client,
        session=session,
        contents=contents,
        namespace=namespace,
        files=files,
        inspector=inspector,
        space=space,
        publisher=publisher,
        flusher=flusher,
        recovery=recovery,
        resolver=Resolver(meta, queue, flusher, recovery, contents, namespace, remote, table),
        eviction=eviction,
        pacing=pacing,
        tiering=tiering,
        hot=HotTier(settings, meta, queue, eviction, complete, warm_lacks),
        restraint=make_restraint(settings, meta, queue, pacing, contents, ledgers),
        syncer=syncer,
        snapshots=snapshots,
        sync_meta=sync_meta,
        leaving=leaving,
        announce=announce,
        commits=commits,
        prefetcher=prefetcher,
        refresher=_refresher(settings, meta, queue, table, namespace, remote, metrics),
        small=small,
        spiller=spiller,
        rescuer=rescuer,
        hidden=hidden,
        streams=streams,
        borrower=borrower,
        offloader=offloader,
        askers=askers,
    )


def _complete(settings: Settings, meta: Meta) -> Complete:
    return Complete(
        meta,
        patterns=tuple(settings.checkpoint.patterns),
        markers=tuple(settings.order.barrier),
        temps=tuple(settings.flush.temp_patterns),
        is_unordered=partial(names.matches, tuple(settings.order.unordered)),
        nodes=settings.checkpoint.nodes,
    )


def _refresher(
    settings: Settings,
    meta: Meta,
    queue: EffectQueue,
    table: OpenTable,
    namespace: Namespace,
    remote: RemoteView,
    metrics: Metrics,
) -> Refresher:
    rounds = Rounds(meta, queue, table, namespace, remote)
    rounds.on_change = lambda kind: metrics.counter("cachefs_foreign_changes_total", kind).inc()
    refresher = Refresher(meta, rounds, ttl=settings.mount.metadata_ttl)
    refresher.on_round = lambda outcome: metrics.counter(
        "cachefs_listings_refreshed_total", outcome
    ).inc()
    namespace.views = refresher
    return refresher


def _order_rules(settings: Settings) -> OrderRules:
    return OrderRules(
        mode=settings.order.mode,
        data_patterns=tuple(settings.order.data),
        barrier_patterns=tuple(settings.order.barrier),
        unordered_patterns=tuple(settings.order.unordered),
        temp_patterns=tuple(settings.flush.temp_patterns),
        data_min_size=settings.order.data_min_size,
    )


def _admission(
    settings: Settings, meta: Meta, ledgers: list[SpaceLedger], tap: Tap | None
) -> Admission:
    waits = settings.cache.full == "wait"
    admission = Admission(meta, ledgers, timeout=settings.cache.full_timeout if waits else 0.0)
    if tap is not None:
        admission.asker = tap.caller
        admission.is_given_up = tap.is_given_up
    return admission


def _lanes(
    settings: Settings,
    ledgers: list[SpaceLedger],
    sizes: Sizes,
    tap: Tap | None,
    metrics: Metrics,
) -> tuple[LaneKeeper, Callable[..., bool]]:
    if tap is None:
        return TrackedOnly(), lambda handle: True
    lanes = PassthroughLanes(tap, ledgers, sizes, headroom=settings.mount.passthrough_headroom)
    lanes.on_overrun = metrics.counter("cachefs_overruns_total").inc
    return lanes, lanes.announce


_T = TypeVar("_T")


def both(one: Callable[[_T], None], other: Callable[[_T], None]) -> Callable[[_T], None]:
    """Call one, then the other."""

    def call(what: _T) -> None:
        one(what)
        other(what)

    return call


def _accountant(ledgers: list[SpaceLedger]) -> Callable[[CacheDevice, int], None]:
    def account(device: CacheDevice, delta: int) -> None:
        ledger = ledgers[device.index]
        if delta > 0:
            ledger.charge(delta)
        elif delta < 0:
            ledger.credit(-delta)

    return account
