"""A cache after a power cut, taken up by a daemon without a kernel: recovery, reading, flushing."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import trio

from cachefs import config
from cachefs.cache.filler import open_filler
from cachefs.daemon.compose import Parts, compose
from cachefs.daemon.fetching import fetcher
from cachefs.daemon.storage import open_storage
from cachefs.daemon.tiering import read_nothing
from cachefs.errors import CachefsError
from cachefs.flush.reboot import Reboots
from cachefs.flush.recovery import Recovered
from cachefs.fsck.check import check
from cachefs.meta.rows import InodeRow
from cachefs.observe.metrics import Metrics
from cachefs.store.crc import ARITHMETIC
from cachefs.store.directory import DirectoryStore
from cachefs.vfs.attributes import ROOT
from tests.support import ramdevice

OPTIONS = ["cache.size=128MiB", "cache.meta_reserve=2MiB", "flush.single_put_max=256KiB",
           "flush.settle=20ms"]  # fmt: skip

_AFTERWARDS = partial(Reboots, boot=lambda: "the machine's next run")

_PATIENCE = 40.0
"""Seconds: some of what a dead daemon asked of its store is waited for, lest it come late."""


def carry_out(store: DirectoryStore, method: str, arguments: dict[str, Any]) -> Any:
    """As a mover does it."""
    if method in ARITHMETIC:
        return ARITHMETIC[method](**arguments)
    return getattr(store, method)(**arguments)


class Jobs:
    """A directory store, in threads."""

    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root)

    async def call(self, method: str, /, **arguments: Any) -> Any:
        return await trio.to_thread.run_sync(carry_out, self.store, method, arguments)

    async def restart_clients(self) -> None:
        pass


@dataclass(slots=True)
class View:
    """What there is afterwards."""

    recovered: Recovered
    again: Recovered
    """What a second recovery found to do."""
    shown: dict[str, bytes | str]
    states: dict[str, str]
    after: dict[str, bytes | str]
    """As `shown`, once all that can go out has."""
    bucket: dict[str, bytes]
    left: list[str]
    """Effects that are still pending, with what is in their way."""
    end: dict[str, str] = field(default_factory=dict)
    """States, once all that can go out has."""
    links: set[str] = field(default_factory=set)
    """Symbolic links, which `shown` and `after` have the targets of."""
    leaked: set[int] = field(default_factory=set)
    """Cache files without a generation, and generations without one."""
    offences: list[str] = field(default_factory=list)
    """What `cachefs fsck` says of it in the end."""


def look(cache: Path, store: Path, *, rebooted: bool = True) -> View:
    """Recover a cache (of another run of the machine, if `rebooted`) and let it flush."""
    dirs = ramdevice.directories(cache.parent, ram=(cache.parent / "ram").exists())
    with ramdevice.pretended() if len(dirs) > 1 else nullcontext():
        view = trio.run(_look, dirs, store, rebooted)
    view.offences = [
        f"{each.check}: {each.subject}" for each in check(dirs).findings if each.is_trouble
    ]
    return view


async def _look(dirs: list[Path], store: Path, rebooted: bool) -> View:
    flags = {"store.url": store.as_uri(), "cache.dirs": [str(each) for each in dirs]}
    settings = config.load(None, OPTIONS, flags=flags)
    # What a log lost is no damage after a power cut.
    run = mock.patch("cachefs.daemon.storage.Reboots", _AFTERWARDS) if rebooted else nullcontext()
    with run:
        storage = open_storage(settings, [] if rebooted else [store.parent / "run"])
    for device in storage.devices if not rebooted else ():
        device.keep_closings([store.parent / "run"])
    jobs, metrics = Jobs(store), Metrics()
    client: list[Any] = []

    async def fetch(
        key: str, path: str, start: int, end: int, if_match: str | None
    ) -> tuple[int, int | None]:
        get = fetcher(client[0], metrics, read_nothing)
        return await get(key, path, start, end, if_match)

    def connect(made: Any, _read_warm: Any) -> Any:
        client.append(made)
        return filler

    try:
        async with open_filler(fetch) as filler:
            parts = compose(settings, storage, jobs, connect, None, metrics)  # type: ignore[arg-type]
            if rebooted:
                parts.recovery.reboots = _AFTERWARDS(storage.meta)
            else:
                parts.small.recover()  # The journal of another run counts for nothing.
            parts.namespace.make_root()
            recovered = parts.recovery.run()
            parts.contents.reserve_numbers(recovered.highest_file)
            again = parts.recovery.run()
            view = View(recovered, again, {}, {}, {}, {}, [])
            view.shown, view.states = await _all(parts)
            view.left = await _flush(parts)
            view.after, view.end = await _all(parts)
            view.bucket = _bucket(jobs.store)
            for device in storage.devices:
                await parts.leaving.sweep(device)
            view.links = {p for p, row in await _files(parts, ROOT, "") if row.target is not None}
            for device in storage.devices:
                found, known = set(device.list_generations()), storage.meta.generations.files
                view.leaked |= found ^ known(device.index) if device.healthy else set()
            return view
    finally:
        storage.close()


async def _all(parts: Parts) -> tuple[dict[str, bytes | str], dict[str, str]]:
    """(what each path holds, its state)."""
    files = await _files(parts, ROOT, "")
    states = {path: parts.inspector.describe(row).state for path, row in files}
    return {path: await _read(parts, row) for path, row in files}, states


async def _files(parts: Parts, folder: int, prefix: str) -> list[tuple[str, InodeRow]]:
    await parts.namespace.list_directory(folder)
    found = []
    for _, name, row in parts.storage.meta.inodes.children(folder, 0, 10_000):
        path = prefix + os.fsdecode(name)
        if stat.S_ISDIR(row.mode):
            found += await _files(parts, row.ino, path + "/")
        else:
            found.append((path, await parts.namespace.lookup(folder, name)))
    return found


async def _read(parts: Parts, row: InodeRow) -> bytes | str:
    if row.target is not None:
        return row.target
    try:
        with trio.fail_after(10):
            handle = await parts.files.open(row.ino, os.O_RDONLY)
            try:
                size = parts.files.overlay(row).size
                return bytes(await parts.files.read(handle.fh, 0, size))
            finally:
                parts.files.release(handle.fh)
    except CachefsError as error:
        return str(error)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, '?')} {error.strerror}"


async def _flush(parts: Parts) -> list[str]:
    queue = parts.queue
    queue.settles = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.flusher.run)
        nursery.start_soon(parts.syncer.run)
        with trio.move_on_after(_PATIENCE):
            while queue.has_work():  # noqa: ASYNC110
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    return [f"{queue.target_key(e)}: {e.kind} {e.state} {e.error}" for e in queue.effects.values()]


def _bucket(store: DirectoryStore) -> dict[str, bytes]:
    found, token = {}, None
    while True:
        page = store.list("", delimiter=None, token=token)
        for item in page.objects:
            if not item.key.startswith(".cachefs/") and not item.key.endswith("/"):
                found[item.key] = store.get_bytes(item.key)
        token = page.next_token
        if token is None:
            return found
