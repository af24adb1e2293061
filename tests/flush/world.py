"""A mount without a kernel: the real filesystem and flusher over a store in memory.

Everything runs in one trio task tree on a mock clock, so that hours of patience take no time, and
can be killed at any await: what a dead daemon leaves is its database, its cache files and the
store.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import trio
import trio.testing

from cachefs.cache.apart import Apart
from cachefs.cache.filler import Filler, open_filler
from cachefs.daemon.fetching import checksums
from cachefs.daemon.tasks import release_temporary_names
from cachefs.flush.client import StoreClient
from cachefs.flush.flusher import Flusher
from cachefs.flush.hidden import HiddenSpans
from cachefs.flush.publisher import Publisher
from cachefs.flush.queue import EffectQueue
from cachefs.flush.recovery import Recovered, Recovery
from cachefs.meta import Meta
from cachefs.model.effects import OrderRules
from cachefs.model.plan import Limits
from cachefs.model.survival import Level
from cachefs.store.base import FileRange, Received
from cachefs.vfs.admission import Admission
from cachefs.vfs.contents import Contents
from cachefs.vfs.files import Files
from cachefs.vfs.lanes import TrackedOnly
from cachefs.vfs.namespace import Caller, Namespace
from cachefs.vfs.opened import OpenTable
from cachefs.vfs.remote import RemoteObject, RemoteView
from cachefs.vfs.rewriting import Rewriter
from cachefs.vfs.streaming import Streams
from tests.flush.memory import Killed, MemoryJobs, MemoryStore

OWNER = (1000, 1000)
ME = Caller(*OWNER)
PREFIX = "pre/fix/"
LIMITS = Limits(part_min=16, part_max=256, parts_max=64)
RULES = OrderRules(data_min_size=60)
START_NS = 1_700_000_000_000_000_000


class Device:
    """A directory of cache files, without locks and heartbeats."""

    in_memory = False
    index = 0
    direct_ok = True
    healthy = True
    fine_times = False
    survives = Level.REBOOT

    def __init__(self, directory: Path) -> None:
        self._directory = self.directory = directory
        directory.mkdir(exist_ok=True)

    def path(self, gen: int) -> str:
        return str(self._directory / str(gen))

    def create(self, gen: int) -> int:
        return os.open(self.path(gen), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def open(self, gen: int, flags: int = os.O_RDONLY) -> int:
        return os.open(self.path(gen), flags)

    def remove(self, gen: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path(gen))

    def set_aside(self, gen: int) -> str:
        target = self._directory.parent / f"gen-{gen}"
        os.rename(self.path(gen), target)
        return str(target)

    def stat(self, gen: int) -> os.stat_result:
        return os.stat(self.path(gen))

    def allocated(self, gen: int) -> int:
        try:
            return os.stat(self.path(gen)).st_blocks * 512
        except FileNotFoundError:
            return 0

    def list_generations(self) -> Iterator[int]:
        return (int(name) for name in os.listdir(self._directory))

    def clone(self, source: int, target: int) -> None:
        Path(self.path(target)).write_bytes(Path(self.path(source)).read_bytes())

    def sync_dir(self, gen: int) -> bool:
        return True

    apart = Apart("world", direct=True)

    def let_go(self, fd: int) -> None:
        os.close(fd)

    def note_closed(self, gen: int, fd: int) -> bool:
        return True

    def mark_path(self, gen: int, path: bytes) -> None:
        """Nobody asks."""

    def writer_open(self, gen: int) -> bool:
        self.stat(gen)
        return False

    def was_closed(self, gen: int) -> bool:
        return False

    closings = None

    def written(self, gen: int) -> None:
        """Nobody asks."""


class _Ledger:
    """Room without end."""

    pressure = trio.Event()
    is_tight = False
    wanted = 0

    def __init__(self, device: Device) -> None:
        self.device = device

    def try_admit(self, nbytes: int) -> bool:
        return True

    def settle(self, admitted: int, allocated: int) -> None:
        """Nothing is counted."""

    def headroom(self) -> int:
        return 1 << 40

    def promise(self, nbytes: int) -> None:
        """Nothing is counted."""

    charge = credit = promise


class _Placement:
    def __init__(self, ledger: _Ledger) -> None:
        self._ledger = ledger

    def choose(self, expected: int) -> _Ledger:
        return self._ledger

    def ledger(self, device: Device) -> _Ledger:
        return self._ledger


class _FreeTurns:
    """Requests go out at once."""

    @asynccontextmanager
    async def turn(self, key: str, nbytes: int) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        yield

    def told(self, key: str, error: object) -> None:
        """Nothing is learned."""


class _Reader:
    """See `RemoteReader`."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    async def list_page(
        self, prefix: str, token: str | None
    ) -> tuple[list[RemoteObject], list[str], str | None]:
        page = await self._client.patiently("list", prefix=prefix, delimiter="/", token=token)
        objects = [self._object(info) for info in page.objects]
        return objects, [self._client.relative(each) for each in page.prefixes], None

    async def head(self, key: str) -> RemoteObject:
        return self._object(await self._client.patiently("head", key=key))

    async def read(self, key: str, limit: int) -> bytes:
        data: bytes = await self._client.patiently("get_bytes", key=key, start=0, end=limit)
        return data

    def _object(self, info: Any) -> RemoteObject:
        return RemoteObject(
            self._client.relative(info.key), info.size, info.etag, info.mtime_ns, info.crc64,
            tuple(info.metadata.items()),
        )  # fmt: skip


async def _no_sync() -> None:
    await trio.lowlevel.checkpoint()


class World:
    """One daemon's parts. Use `running`; after `kill` make another one on the same directory."""

    def __init__(
        self,
        directory: Path,
        store: MemoryStore,
        jobs: MemoryJobs,
        filler: Filler | None = None,
        boot: str = "boot 1",
    ) -> None:
        self.store = store
        self.jobs = jobs
        self.directory = directory
        self.meta = meta = Meta(directory / "db")
        self.device = Device(directory / "files")
        self.queue = EffectQueue(
            meta, RULES, settle=1.0, settle_max=10.0, temp_hold=1e6, large_from=40, clock=now_ns
        )
        self.client = StoreClient(jobs, _FreeTurns(), PREFIX)
        self.remote = RemoteView(meta, _Reader(self.client), uid=OWNER[0], gid=OWNER[1])
        ledger = _Ledger(self.device)
        devices = cast(Any, [self.device])
        self.contents = Contents(
            meta, self.queue, devices, cast(Any, _Placement(ledger)), cast(Any, filler),
            self.remote, TrackedOnly(),
        )  # fmt: skip
        self.contents.checksum = lambda path, size: self.client.checksum(FileRange(path, 0, size))
        self.contents.fetched = checksums(self.client)
        self.rewriter = Rewriter(
            meta, self.queue, self.contents, preserve_limit=1 << 20, sync_meta=_no_sync
        )
        self.namespace = Namespace(
            meta, self.queue, self.remote, prefix_bytes=len(PREFIX), uid=OWNER[0], gid=OWNER[1]
        )
        self.table = OpenTable()
        ledgers, admission = cast(Any, [ledger]), Admission(meta, [], timeout=0.0)
        streams = Streams(
            meta, self.table, self.contents, TrackedOnly(), ledgers, admission,
            HiddenSpans(meta, self.client, "node1"), sync_meta=_no_sync,
        )  # fmt: skip
        self.files = Files(
            meta, self.namespace, self.contents, self.rewriter, TrackedOnly(), self.table,
            ledgers, admission=admission, streams=streams, sync_meta=_no_sync,
        )  # fmt: skip
        self.publisher = Publisher(
            meta, self.queue, self.client, lambda gen: self.device.path(gen.file),
            part_size=24, single_put_max=40, owner=OWNER, limits=LIMITS,
        )  # fmt: skip
        self.flusher = Flusher(
            meta, self.queue, self.publisher, self.client, tasks=16, node="node1"
        )
        self.recovery = Recovery(
            meta, self.queue, devices, publish_held=False,
            forget_inode=self.contents.forget_inode, boot=lambda: boot,
        )  # fmt: skip

    # -- life ---------------------------------------------------------------------------------

    @classmethod
    @asynccontextmanager
    async def running(
        cls, directory: Path, store: MemoryStore, jobs: MemoryJobs, boot: str = "boot 1"
    ) -> AsyncIterator[World]:
        """A daemon from recovery on, with its flusher at work."""
        worlds: list[World] = []

        async def fetch(
            key: str, path: str, start: int, end: int, if_match: str | None
        ) -> tuple[int, int | None]:
            got: Received = await worlds[0].client.patiently(
                "get_into", key=key, path=path, start=start, end=end, if_match=if_match
            )
            return got.size, None  # checksums here are of a kind that cannot be combined

        async with open_filler(fetch) as filler:
            world = cls(directory, store, jobs, filler, boot)
            worlds.append(world)
            try:
                world.namespace.make_root()
                found = world.recover()
                world.contents.reserve_numbers(found.highest_file)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(world.flusher.run)
                    nursery.start_soon(world.flusher.sweep)
                    nursery.start_soon(release_temporary_names, world.queue)
                    yield world
                    nursery.cancel_scope.cancel()
            finally:
                world.close()

    def recover(self) -> Recovered:
        """What a daemon does first."""
        return self.recovery.run()

    def kill(self) -> None:
        """From now on nothing of this daemon reaches the database or the store. Raises Killed."""

        def dead(*args: object, **kwargs: object) -> Any:
            raise Killed

        self.jobs.dead = True
        self.meta.db.execute = dead
        self.meta.db.transaction = dead  # type: ignore[method-assign]
        raise Killed

    def close(self) -> None:
        for opened in list(self.table.inodes.values()):
            with suppress(OSError):
                os.close(opened.fd)
        self.meta.close()

    # -- acts ---------------------------------------------------------------------------------

    def find(self, path: str) -> tuple[int, bytes]:
        """(inode of the directory, name) of a path."""
        parts = path.split("/")
        parent = 1
        for part in parts[:-1]:
            row = self.meta.inodes.lookup(parent, part.encode())
            assert row is not None, path
            parent = row.ino
        return parent, parts[-1].encode()

    def ino(self, path: str) -> int:
        row = self.meta.inodes.lookup(*self.find(path))
        assert row is not None, path
        return row.ino

    async def create(self, path: str, data: bytes = b"") -> int:
        """A new open file; returns its handle."""
        parent, name = self.find(path)
        handle, _ = await self.files.create(parent, name, 0o644, os.O_RDWR, ME)
        if data:
            await self.files.write(handle.fh, 0, data)
        return handle.fh

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace, and close."""
        parent, name = self.find(path)
        if self.meta.dentries.get(parent, name) is None:
            fh = await self.create(path, data)
        else:
            handle = await self.files.open(self.ino(path), os.O_WRONLY | os.O_TRUNC)
            fh = handle.fh
            if data:
                await self.files.write(fh, 0, data)
        self.files.release(fh)

    async def edit(self, path: str, offset: int, data: bytes) -> None:
        """Write into a file, and close."""
        handle = await self.files.open(self.ino(path), os.O_RDWR)
        await self.files.write(handle.fh, offset, data)
        self.files.release(handle.fh)

    async def read(self, path: str) -> bytes:
        handle = await self.files.open(self.ino(path), os.O_RDONLY)
        try:
            return bytes(await self.files.read(handle.fh, 0, 1 << 20))
        finally:
            self.files.release(handle.fh)

    async def mkdir(self, path: str) -> None:
        await self.namespace.mkdir(*self.find(path), 0o755, ME)

    async def symlink(self, path: str, target: str) -> None:
        await self.namespace.symlink(*self.find(path), target.encode(), ME)

    async def link(self, path: str, new: str) -> None:
        await self.namespace.link(self.ino(path), *self.find(new))

    def unlink(self, path: str) -> None:
        self.namespace.unlink(*self.find(path))

    def rmdir(self, path: str) -> None:
        self.namespace.rmdir(*self.find(path))

    async def rename(self, path: str, new: str, flags: int = 0) -> None:
        await self.namespace.before_rename(*self.find(path), *self.find(new))
        self.namespace.rename(*self.find(path), *self.find(new), flags)

    def chmod(self, path: str, mode: int) -> None:
        self.namespace.set_attributes(self.ino(path), mode=mode)

    def evict(self, path: str) -> None:
        """Drop a durable file's bytes from the cache."""
        row = self.meta.inodes.get(self.ino(path))
        gen = self.meta.generations.get(row.gen or 0) if row is not None else None
        assert row is not None and gen is not None and gen.state == "durable", path
        with self.meta.transaction():
            self.meta.inodes.set_gen(row.ino, None)
            self.contents.drop(gen)

    # -- looks --------------------------------------------------------------------------------

    def is_durable(self, path: str) -> bool:
        """Whether the store is said to have a file under its name."""
        dentry = self.meta.dentries.get(*self.find(path))
        pending = dentry is None or self.queue.of_dentry(dentry.id)
        return not pending and self.state_of(path) in ("durable", "remote")

    async def settle(self, seconds: float = 3600.0) -> None:
        """Until nothing is pending but what is held or in trouble."""
        with trio.fail_after(seconds):
            while self.queue.has_work():  # noqa: ASYNC110 - what is not settled yet is work too
                await trio.sleep(0.5)

    @property
    def shown(self) -> dict[str, bytes]:
        """What the bucket shows below the prefix."""
        return {
            key.removeprefix(PREFIX): each.data for key, each in sorted(self.store.objects.items())
        }

    def metadata(self, key: str) -> dict[str, str]:
        return dict(self.store.objects[PREFIX + key].metadata)

    def state_of(self, path: str) -> str:
        row = self.meta.inodes.get(self.ino(path))
        gen = self.meta.generations.get(row.gen or 0) if row is not None else None
        return gen.state if gen is not None else "remote"


def now_ns() -> int:
    """The time of day on the mock clock."""
    return START_NS + int(trio.current_time() * 1e9)


async def _inline(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return call(*args)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run on a clock that jumps to whatever is next, with no thread that would not jump."""
    with (
        patch("trio.to_thread.run_sync", _inline),
        patch("time.time_ns", now_ns),
        patch("time.monotonic", trio.current_time),
        patch("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True),
    ):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def seeded(seed: int) -> random.Random:
    """Chance that comes out the same each time, trio's own included."""
    trio._core._run._r.seed(seed)
    random.seed(seed)
    return random.Random(seed)
