"""A daemon without a kernel: all its parts on a directory, an honest flusher, a store to play with.

Files are written through the filesystem's own logic, effects go out through the real flusher and
publisher to a directory store. Between them stands `Bucket`, which can hold requests or refuse
keys. `settle` is long, so that what goes out soon was hurried.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import trio

from cachefs import config
from cachefs.cache.filler import Filler, open_filler
from cachefs.daemon.compose import Parts, compose
from cachefs.daemon.handlers import make_handlers
from cachefs.daemon.services import Lanes, Services
from cachefs.daemon.storage import open_storage
from cachefs.daemon.tiering import ReadWarm, read_nothing
from cachefs.errors import CachefsError, StoreError
from cachefs.model.objectmeta import decode
from cachefs.observe.control import Handler
from cachefs.observe.metrics import Metrics
from cachefs.store.crc import ARITHMETIC, crc64_of
from cachefs.store.directory import DirectoryStore
from cachefs.vfs.attributes import ROOT
from cachefs.vfs.namespace import Caller
from tests.support import ramdevice

MOUNTPOINT = "/mnt/ckpt"
ME = Caller(os.getuid(), os.getgid())
SETTLE = 9.0
CHUNK = 4096
"""Bytes of a piece that is fetched at a time."""
T = TypeVar("T")


class Bucket:
    """Carries the flusher's requests out, when it pleases."""

    def __init__(self, root: Path) -> None:
        self._store = DirectoryStore(root)
        self._open = trio.Event()
        self._open.set()
        self._held: str | None = None
        self._free = 0
        self.refused: dict[str, StoreError] = {}
        """Key -> what is raised instead of writing it."""
        self.written: list[str] = []
        self.damage: list[bool] = []
        self.tells = True
        """Whether it tells the checksum of what it sent."""
        self.waiting = 0
        """Requests that are held up."""
        self.read_warm: ReadWarm = read_nothing

    def hold(self, method: str | None = None, *, after: int = 0) -> None:
        """Answer nothing (or no `method` any more, `after` so many) until `let_go`."""
        self._open, self._held, self._free = trio.Event(), method, after

    def let_go(self) -> None:
        self._open.set()

    async def call(self, method: str, /, **arguments: Any) -> Any:
        await self._turn(method)
        key = arguments.get("key") or arguments.get("dst")
        refusal = next(
            (self.refused[k] for k in [key, *arguments.get("keys", ())] if k in self.refused), None
        )
        if refusal is not None and method != "head":
            raise refusal
        if method in ARITHMETIC:
            return ARITHMETIC[method](**arguments)
        result = getattr(self._store, method)(**arguments)
        if key is not None:
            self.written.append(key)
        return result

    async def _turn(self, method: str) -> None:
        await trio.lowlevel.checkpoint()
        if self._held in (None, method):
            self._free -= 1
            if self._free < 0:
                self.waiting += 1
                try:
                    await self._open.wait()
                finally:
                    self.waiting -= 1

    async def fetch(
        self, key: str, path: str, start: int, end: int, if_match: str | None
    ) -> tuple[int, int | None]:
        """As the filler asks for it; `damage` says which of the next pieces come out wrong."""
        if await self.read_warm(key, path, start, end, if_match):
            return end - start, None
        damaged = bool(self.damage and self.damage.pop(0))
        body = await self.call("get_bytes", key=key, start=start, end=end, if_match=if_match)
        if damaged:
            body = bytes(len(body))
        with open(path, "r+b") as file:
            file.seek(start)
            return file.write(body), crc64_of(body) if self.tells else None

    async def restart_clients(self) -> None:
        pass

    def keys(self) -> list[str]:
        """Everything that is visible, without directories' markers."""
        found = [item.key for item in self._store.list("", delimiter=None).objects]
        return sorted(key for key in found if not key.endswith("/"))

    def get(self, key: str) -> bytes:
        return self._store.get_bytes(key)

    def mode(self, key: str) -> int:
        """As the object's metadata has it."""
        return int(self._store.head(key).metadata["mode"])

    def mtime_ns(self, key: str) -> int | None:
        """As the object's metadata has it."""
        return decode(self._store.head(key).metadata).mtime_ns


@dataclass
class Lab:
    """One daemon's parts and shortcuts to use them."""

    parts: Parts
    services: Services
    bucket: Bucket
    nursery: trio.Nursery
    handlers: dict[str, Handler] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    progress: list[dict[str, Any]] = field(default_factory=list)

    # ---- as programs do --------------------------------------------------------------------------

    async def folder(self, path: str) -> int:
        """The inode of a directory, made with its parents if need be."""
        ino = ROOT
        for name in os.fsencode(path).split(b"/") if path else ():
            known = self.services.meta.dentries.get(ino, name)
            ino = known.ino if known else (await self._mkdir(ino, name))
        return ino

    async def _mkdir(self, parent: int, name: bytes) -> int:
        return (await self.services.namespace.mkdir(parent, name, 0o755, ME)).ino

    async def open(self, path: str, flags: int = os.O_WRONLY | os.O_CREAT) -> int:
        """A handle; the file is made if it is not there."""
        folder, _, name = path.rpartition("/")
        parent = await self.folder(folder)
        known = self.services.meta.dentries.get(parent, name.encode())
        if known is not None:
            return (await self.services.files.open(known.ino, flags & ~os.O_CREAT)).fh
        handle, _ = await self.services.files.create(parent, name.encode(), 0o644, flags, ME)
        return handle.fh

    async def put(self, fh: int, data: bytes, offset: int = 0) -> None:
        await self.services.files.write(fh, offset, data)

    def close(self, fh: int) -> None:
        self.services.files.release(fh)

    async def write(self, path: str, data: bytes = b"x") -> None:
        """Open, truncate, write, close."""
        fh = await self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        await self.put(fh, data)
        self.close(fh)

    async def store_only(self, path: str, data: bytes) -> int:
        """A file that the store has and the cache has not; its inode."""
        await self.write(path, data)
        await self.wait(path)
        return await self.evict(path)

    async def evict(self, path: str) -> int:
        """What the store has of a file leaves the cache; its inode."""
        folder, _, name = path.rpartition("/")
        found = self.services.meta.dentries.get(await self.folder(folder), name.encode())
        assert found is not None
        row = self.services.meta.generations.current(found.ino)
        assert row is not None
        assert await self.services.eviction.evict(row.gen)
        return found.ino

    async def rename(self, old: str, new: str) -> None:
        sources, targets = old.rpartition("/"), new.rpartition("/")
        parents = await self.folder(sources[0]), await self.folder(targets[0])
        name, new_name = sources[2].encode(), targets[2].encode()
        self.services.namespace.rename(parents[0], name, parents[1], new_name, 0)

    async def remove(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        parent = await self.folder(folder)
        if self.services.meta.inodes.lookup(parent, name.encode()).mode & 0o040000:  # type: ignore[union-attr]
            self.services.namespace.rmdir(parent, name.encode())
        else:
            self.services.namespace.unlink(parent, name.encode())

    # ---- as the command line does ----------------------------------------------------------------

    async def ask(self, op: str, **args: Any) -> Any:
        """One request; paths are given below the mountpoint."""
        for name in ("path", "paths"):
            if name in args:
                args[name] = absolute(args[name])

        async def progress(values: Mapping[str, Any], /) -> None:
            self.progress.append(dict(values))

        return await self.handlers[op](args, progress)

    async def wait(self, *paths: str, **args: Any) -> dict[str, Any]:
        told: dict[str, Any] = await self.ask("wait", paths=list(paths) or [""], **args)
        return told

    def asking(self, call: Callable[[], Awaitable[T]]) -> Answer[T]:
        """A request that runs beside the test."""
        answer: Answer[T] = Answer(call)
        self.nursery.start_soon(answer.run)
        return answer


class Answer(Generic[T]):
    """What comes of a request that was started."""

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._done = trio.Event()
        self._result: T | None = None
        self._error: Exception | None = None

    async def run(self) -> None:
        try:
            self._result = await self._call()
        except Exception as error:
            self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def __await__(self) -> Any:
        return self._outcome().__await__()

    async def _outcome(self) -> T:
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def absolute(path: Any) -> Any:
    if isinstance(path, list):
        return [absolute(each) for each in path]
    return f"{MOUNTPOINT}/{path}".rstrip("/")


@asynccontextmanager
async def lab(
    tmp_path: Path,
    *options: str,
    flusher: bool = True,
    syncer: bool = False,
    ram: bool = False,
    more: int = 0,
) -> AsyncIterator[Lab]:
    """A daemon that works while the block runs; `ram`: with a device in RAM before the disk (see
    `ramdevice.pretended`); `more`: devices after it."""
    store, dirs = tmp_path / "store", ramdevice.directories(tmp_path, ram=ram)
    dirs += [tmp_path / f"more{number}" for number in range(more)]
    store.mkdir()
    mine = ["cache.size=256MiB", "cache.meta_reserve=0", f"flush.settle={SETTLE}s", "node.id=n1"]
    flags = {"store.url": store.as_uri(), "cache.dirs": [str(each) for each in dirs]}
    settings = config.load(None, [*mine, *options], flags=flags)
    storage = open_storage(settings)
    bucket = Bucket(store)
    metrics = Metrics()

    def connect(_: object, read_warm: ReadWarm) -> Filler:
        bucket.read_warm = read_warm
        return filler

    try:
        async with open_filler(bucket.fetch, chunk=CHUNK) as filler, trio.open_nursery() as nursery:
            parts = compose(settings, storage, bucket, connect, None, metrics)  # type: ignore[arg-type]
            parts.namespace.make_root()
            parts.storage.meta.inodes.set_listed(ROOT, 1)
            services = _services(settings, parts, metrics)
            made = Lab(parts, services, bucket, nursery)
            made.handlers = make_handlers(services, made.ended.append)
            if flusher:
                nursery.start_soon(parts.flusher.run)
            if syncer:
                nursery.start_soon(parts.syncer.run)
            try:
                with trio.fail_after(30):
                    yield made
            finally:
                bucket.let_go()  # A request that shows something is never abandoned.
                nursery.cancel_scope.cancel()
    finally:
        storage.close()


def _services(settings: config.Settings, parts: Parts, metrics: Metrics) -> Services:
    return Services(
        settings=settings,
        mountpoint=MOUNTPOINT,
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
        metrics=metrics,
        started_at=time.monotonic(),
        lanes=lambda: Lanes(False, "no kernel here"),
        takeovers=lambda: 2,
        degraded=lambda: False,
        metrics_address=None,
        sync_meta=parts.sync_meta,
        tiering=parts.tiering,
    )


def in_lab(
    *options: str, flusher: bool = True, syncer: bool = False, more: int = 0
) -> Callable[[Callable[[Lab], Awaitable[None]]], Callable[[Path], None]]:
    """Make a test of an async function that is given a lab."""

    def wrap(test: Callable[[Lab], Awaitable[None]]) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def main() -> None:
                async with lab(
                    tmp_path, *options, flusher=flusher, syncer=syncer, more=more
                ) as made:
                    await test(made)

            trio.run(main)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return wrap


async def fails(answer: Awaitable[Any], exit_code: int) -> str:
    """The message of the error that a request must end with."""
    try:
        result = await answer
    except CachefsError as error:
        assert error.exit_code == exit_code, (error.exit_code, str(error))
        return str(error)
    raise AssertionError(f"no error but {result}")


async def until(condition: Callable[[], Any], timeout: float = 5.0) -> None:
    """Poll for what has no event of its own."""
    with trio.fail_after(timeout):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)
