"""The demonstration from beginning to end.

Everything it starts is on one stack and comes down in reverse order, however it ends: a failure,
Ctrl-C, SIGTERM or the closed terminal. Signals that arrive while that happens are ignored; every
step of it is bounded in time.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cachefs.cli.output import count, size
from cachefs.demo import checkpoint as checkpoints
from cachefs.demo.bucket import OrderWatch, read_back
from cachefs.demo.checkpoint import Checkpoint
from cachefs.demo.mount import DemoMount, environment, finish, stop
from cachefs.demo.screen import Bars, Screen, SetDone, speed
from cachefs.demo.seaweedfs import SeaweedFS
from cachefs.demo.watching import worth_watching
from cachefs.errors import CachefsError
from cachefs.observe import runfiles

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "training"
PREFIX = "llama/"
POLL_INTERVAL = 0.1
"""Seconds between two questions for the state of the upload, and between two listings."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured. Times in seconds, each from its own start."""

    local_seconds: float
    """The same save straight into a local directory."""
    save_seconds: float
    durable_seconds: float
    """From the return of the save until everything was durable."""
    objects: int
    listings: int


def run(screen: Screen, data_size: int, *, stay: bool) -> None:
    """Show the product at work on a checkpoint of about `data_size` bytes.

    `stay`: leave everything up until a signal comes. Raises CachefsError, KeyboardInterrupt. For a
    process of its own: signals are ignored from the end on.
    """
    _signals_interrupt()
    with ExitStack() as stack:
        try:
            _perform(screen, stack, data_size, stay=stay)
        finally:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _perform(screen: Screen, stack: ExitStack, data_size: int, *, stay: bool) -> None:
    base = stack.enter_context(_workspace(4 * data_size))
    screen.say("Starting SeaweedFS, a real S3 store, and mounting its bucket ...")
    store = stack.enter_context(SeaweedFS(base / "store"))
    env = stack.enter_context(_only_environment(store.environment()))
    store.create_bucket(BUCKET)
    mountpoint = base / "mnt"
    mountpoint.mkdir()
    url = f"s3://{BUCKET}/{PREFIX.rstrip('/')}"
    mount = DemoMount(url, store.endpoint, mountpoint, base / "cache", env)
    stack.enter_context(_log_for_failures(screen, mount))
    stack.enter_context(mount)
    screen.say(f"{url} is mounted at {mountpoint}")
    outcome, checkpoint = _demonstrate(screen, mount, store.client(), data_size)
    _summarize(screen, checkpoint, outcome, mount.status()["lanes"])
    rows = worth_watching(mount.metrics())
    screen.table("Metrics worth watching", ("METRIC", ">VALUE", "WHY"), rows)
    if stay:
        _stay(screen, store, mount, url)


def _demonstrate(
    screen: Screen, mount: DemoMount, client: S3Client, data_size: int
) -> tuple[Outcome, Checkpoint]:
    checkpoint = checkpoints.build(data_size)
    files = count(len(checkpoint.files), "file")
    screen.say(f"Saving {checkpoint.name} as a trainer does: {files}, {size(checkpoint.size)}")
    local = _save_without_cachefs(checkpoint, mount.mountpoint.with_name("local"))
    with screen.bars() as bars:
        started = time.monotonic()
        _save(bars, checkpoint, mount.mountpoint)
        saved = time.monotonic()
        with OrderWatch(client, BUCKET, PREFIX, checkpoint, POLL_INTERVAL) as watch:
            _await_durable(bars, mount, checkpoint)
            durable = time.monotonic()
        with bars.phase("read back and compare", checkpoint.size) as set_done:
            objects = read_back(client, BUCKET, PREFIX, checkpoint, _Sum(set_done).add)
    watch.check()
    return Outcome(local, saved - started, durable - saved, objects, watch.looks), checkpoint


def _save_without_cachefs(checkpoint: Checkpoint, folder: Path) -> float:
    """Seconds that the same save takes on the disk that holds the cache, the better of two: the
    first also warms up what the save through the mount then finds warm."""
    best = math.inf
    for _ in range(2):
        started = time.monotonic()
        checkpoints.save(checkpoint, folder, _Sum(lambda _: None).add)
        best = min(best, time.monotonic() - started)
        shutil.rmtree(folder)
    return best


def _save(bars: Bars, checkpoint: Checkpoint, root: Path) -> None:
    with bars.phase("save (the trainer waits)", checkpoint.size) as set_done:
        checkpoints.save(checkpoint, root, _Sum(set_done).add)


def _await_durable(bars: Bars, mount: DemoMount, checkpoint: Checkpoint) -> None:
    """Until `cachefs wait` returns; the bar shows what the store lacks meanwhile."""
    waiting = mount.waiting()
    try:
        with bars.phase("upload (it trains on)", checkpoint.size) as set_done:
            while waiting.poll() is None:
                set_done(max(0, checkpoint.size - mount.status()["dirty_bytes"] - 1))
                time.sleep(POLL_INTERVAL)
            finish(waiting, None)
    finally:
        stop(waiting)


class _Sum:
    """Adds up what threads report in pieces."""

    def __init__(self, set_done: SetDone) -> None:
        self._set_done = set_done
        self._total = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        with self._lock:
            self._total += amount
            self._set_done(self._total)


def _summarize(
    screen: Screen, checkpoint: Checkpoint, outcome: Outcome, lanes: dict[str, Any]
) -> None:
    data = checkpoint.size
    saved, local, after = outcome.save_seconds, outcome.local_seconds, outcome.durable_seconds
    lane = "passthrough: the kernel writes the cache file"
    if not lanes["passthrough"]:
        lane = f"tracked: the daemon sees every write ({lanes['reason']})"
    pairs = [
        ("checkpoint", f"{size(data)} in {count(len(checkpoint.files), 'file')}"),
        ("lane", lane),
        ("save returned after", f"{saved:.2f} s ({speed(data, saved)})"),
        ("same save without cachefs", f"{local:.2f} s ({speed(data, local)})"),
        ("durable in the store", f"{after:.2f} s later ({speed(data, after)})"),
        ("objects read back", f"{outcome.objects}, all checksums (SHA-256) equal"),
        ("pointer ahead of its data", f"never, in {count(outcome.listings, 'listing')}"),
    ]
    screen.facts("Summary", pairs)


def _stay(screen: Screen, store: SeaweedFS, mount: DemoMount, url: str) -> None:
    pairs = [
        ("mountpoint", str(mount.mountpoint)),
        ("store", url),
        ("S3 endpoint", store.endpoint),
        ("AWS_ACCESS_KEY_ID", store.access_key),
        ("AWS_SECRET_ACCESS_KEY", store.secret_key),
        ("metrics", mount.metrics_url()),
    ]
    screen.facts("Still up (the credentials are for this throw-away store only)", pairs)
    screen.say("Press Ctrl-C to end it and remove everything.")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            signal.pause()


@contextmanager
def _log_for_failures(screen: Screen, mount: DemoMount) -> Iterator[None]:
    """Shows the end of the daemon's log when something went wrong; else the log goes with the
    rest. To be entered before the mount, so that it looks after the unmount."""
    try:
        yield
    except Exception:
        if lines := mount.log().splitlines()[-LOG_LINES:]:
            screen.say("\n".join(["The end of the daemon's log:", *lines]))
        raise
    except BaseException:
        mount.remove_log()
        raise
    mount.remove_log()


@contextmanager
def _only_environment(store: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of the mount, for this process too: it has an S3 client of its own."""
    before = dict(os.environ)
    env = environment(store)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield env
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _workspace(needed: int) -> Iterator[Path]:
    """A directory of our own with `needed` bytes free, removed at the end."""
    places = dict.fromkeys((tempfile.gettempdir(), "/var/tmp"))
    roomy = [place for place in places if shutil.disk_usage(place).free >= needed]
    if not roomy:
        raise CachefsError(
            f"no {size(needed)} free in {' or '.join(places)}",
            hint="set TMPDIR to a directory with room, or ask for less with --size",
        )
    base = Path(tempfile.mkdtemp(prefix="cachefs-demo-", dir=roomy[0])).resolve()
    try:
        yield base
    finally:
        if not any(Path(point).is_relative_to(base) for point in runfiles.mountpoints()):
            shutil.rmtree(base, ignore_errors=True)


def _signals_interrupt() -> None:
    """Every signal that asks to stop does what Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)
