"""A daemon without a kernel that lives and dies on command, in a process of its own.

Run as a program: for each line of JSON on standard input (`Life`) it forks a child that opens the
cache, recovers, and carries out the calls, telling of each in a file before and after it. The
child's exit status (negative: the signal that ended it) is one line on standard output.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trio

from cachefs import config
from cachefs.cache.device import CacheDevice
from cachefs.cache.filler import open_filler
from cachefs.cache.journal import CREATED, RELEASED, START, Record
from cachefs.cache.system import sync_filesystem
from cachefs.daemon.adopting import Adoption
from cachefs.daemon.compose import Parts, compose
from cachefs.daemon.fetching import fetcher
from cachefs.daemon.resolving import Decision
from cachefs.daemon.storage import open_storage
from cachefs.daemon.tiering import read_nothing
from cachefs.errors import CachefsError, Refused
from cachefs.flush.superseding import Superseder
from cachefs.meta.rows import GenerationRow, UploadRow
from cachefs.observe.metrics import Metrics
from cachefs.store.directory import DirectoryStore
from cachefs.vfs.attributes import ROOT
from cachefs.vfs.namespace import RENAME_EXCHANGE, Caller
from cachefs.vfs.opened import Lane
from tests.crash.streams import StreamCalls
from tests.cuts.recovered import carry_out
from tests.cuts.writer import block
from tests.daemon.lab import MOUNTPOINT, _services
from tests.daemon.test_journal import packed
from tests.support import ramdevice

ME = Caller(os.getuid(), os.getgid())
OPTIONS = ["cache.size=200MiB", "cache.meta_reserve=1MiB", "flush.settle=1h", "flush.settle_max=1h",
           "flush.single_put_max=1MiB", "flush.part_size=5MiB", "node.id=n1"]  # fmt: skip
PATIENCE = 20.0


class Jobs:
    """The store; some keys may be refused."""

    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root)
        self.refused: dict[str, int] = {}

    async def call(self, method: str, /, **arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        key = str(arguments.get("key"))
        if self.refused.get(key, 0) > 0 and method in ("put", "complete_upload"):
            self.refused[key] -= 1
            raise Refused(f"{key} is refused by the test")
        return carry_out(self.store, method, arguments)

    async def restart_clients(self) -> None:
        pass


class Stage(StreamCalls):
    """The parts of one daemon, and calls on them by name: `do_NAME(*words)`."""

    def __init__(self, settings: Any, parts: Parts, jobs: Jobs, plan: str) -> None:
        self.settings, self.parts, self.jobs, self.plan = settings, parts, jobs, plan
        self.meta = parts.storage.meta
        self.elsewhere = parts.storage.home.directory.parent / "elsewhere"
        parts.rescuer.find = self.find
        self.handles: dict[str, int] = {}
        self.records: list[Record] = []

    async def find(self, row: GenerationRow, path: str) -> bool:
        """In another tier."""
        if not self.elsewhere.exists():
            return False
        shutil.copy(self.elsewhere, path)
        os.chmod(path, 0o600)
        return True

    async def do_again(self, name: str, *words: Any) -> None:
        """What may or may not have been done before the daemon died."""
        try:
            await getattr(self, f"do_{name}")(*words)
        except (OSError, CachefsError):
            pass

    # ---- as programs do ------------------------------------------------------------------------

    async def handle(self, path: str) -> int:
        """Of a file that is open; a program whose daemon died opens it again."""
        if path not in self.handles:
            await self.do_open(path)
        return self.handles[path]

    async def place(self, path: str) -> tuple[int, bytes]:
        folder, _, name = path.rpartition("/")
        parent = ROOT
        for each in folder.split("/") if folder else ():
            parent = (await self.parts.namespace.lookup(parent, each.encode())).ino
        return parent, name.encode()

    async def ino(self, path: str) -> int:
        return (await self.parts.namespace.lookup(*await self.place(path))).ino if path else ROOT

    async def do_create(self, path: str) -> None:
        parent, name = await self.place(path)
        handle, _ = await self.parts.files.create(parent, name, 0o644, os.O_RDWR, ME)
        self.handles[path] = handle.fh

    async def do_open(self, path: str, flags: int = os.O_RDWR) -> None:
        self.handles[path] = (await self.parts.files.open(await self.ino(path), flags)).fh

    async def do_write(self, path: str, at: int, length: int, seed: int) -> None:
        await self.parts.files.write(await self.handle(path), at, block(seed, length))

    async def do_read(self, path: str) -> None:
        fh = (await self.parts.files.open(await self.ino(path), os.O_RDONLY)).fh
        await self.parts.files.read(fh, 0, 1 << 20)
        self.parts.files.release(fh)

    async def do_fsync(self, path: str) -> None:
        await self.parts.files.fsync(await self.handle(path))

    async def do_truncate(self, path: str, size: int) -> None:
        await self.parts.files.truncate(await self.ino(path), size, None)

    async def do_utime(self, path: str) -> None:
        await self.parts.files.set_mtime(await self.ino(path), 10**18, 10**18)

    async def do_close(self, path: str) -> None:
        fh = await self.handle(path)
        del self.handles[path]
        await self.parts.files.closing(fh)
        self.parts.files.release(fh)

    async def do_mkdir(self, path: str) -> None:
        await self.parts.namespace.mkdir(*await self.place(path), 0o755, ME)

    async def do_symlink(self, path: str, target: str) -> None:
        await self.parts.namespace.symlink(*await self.place(path), target.encode(), ME)

    async def do_link(self, old: str, new: str) -> None:
        await self.parts.namespace.link(await self.ino(old), *await self.place(new))

    async def do_unlink(self, path: str) -> None:
        self.parts.namespace.unlink(*await self.place(path))

    async def do_rmdir(self, path: str) -> None:
        where = await self.place(path)
        await self.parts.namespace.before_rmdir(*where)
        self.parts.namespace.rmdir(*where)

    async def do_rename(self, old: str, new: str) -> None:
        places = (*await self.place(old), *await self.place(new))
        await self.parts.namespace.before_rename(*places)
        self.parts.namespace.rename(*places, 0)

    async def do_exchange(self, one: str, other: str) -> None:
        places = (*await self.place(one), *await self.place(other))
        self.parts.namespace.rename(*places, RENAME_EXCHANGE)

    async def do_chmod(self, path: str, mode: int) -> None:
        self.parts.namespace.set_attributes(await self.ino(path), mode=mode)

    async def do_setxattr(self, path: str, value: str) -> None:
        row = self.parts.namespace.get(await self.ino(path))
        self.parts.namespace.set_xattr(row, b"user.note", value.encode())

    async def do_adopt(self, path: str, length: int, seed: int) -> None:
        """A file from outside, on the same disk."""
        source = self.parts.storage.devices[0].directory.parent / "outside"
        source.write_bytes(block(seed, length))
        services = _services(self.settings, self.parts, Metrics())
        words = {"src": str(source), "dst": f"{MOUNTPOINT}/{path}"}
        await Adoption(services).adopt(words, _ignore)

    async def do_small(self, path: str, length: int, seed: int) -> None:
        """A file that the tap makes by itself: the database hears of it later."""
        (spare,) = await self.parts.small.make(1)
        parent, name = await self.place(path)
        os.write(spare.fd, block(seed, length))
        first = self.parts.small.folded + 1 + len(self.records)
        for seq, kind in ((first, CREATED), (first + 1, RELEASED)):
            record = Record(
                seq, kind, seq, spare.fh, parent, spare.ino, spare.gen, spare.file, time.time_ns(),
                0, 0o100644, ME.uid, ME.gid, os.O_RDWR, name if kind == CREATED else b"",
            )  # fmt: skip
            self.records.append(record)
        journal = self.parts.small.journal
        text = b"".join(packed(each, journal.seed) for each in self.records)
        os.pwrite(journal.fd, text, START)

    async def do_fold(self) -> None:
        """The database hears of it."""
        records, self.records = self.records, []
        if records:  # else a daemon that died had them folded by the next one
            self.parts.small.settle(self.parts.small.store(records))
            await self.parts.small.close_done()

    async def do_list(self, path: str) -> None:
        await self.parts.namespace.list_directory(await self.ino(path))

    # ---- as the daemon's own tasks do ----------------------------------------------------------

    async def do_arm(self, plans: list[dict[str, Any]]) -> None:
        """From here on failpoints are looked at."""
        Path(self.plan).write_text(json.dumps(plans))

    async def do_flush(self, patience: float = PATIENCE) -> None:
        """Until nothing moves any more."""
        queue = self.parts.queue
        queue.settles = False
        queue.kick()
        with trio.move_on_after(patience):
            while queue.has_work():  # noqa: ASYNC110
                await trio.sleep(0.005)
        queue.settles = True

    async def do_sync(self, path: str) -> None:
        """As soon as a closed file's turn has come."""
        gen = self.meta.generations.current(await self.ino(path))
        assert gen is not None
        await self.parts.syncer._sync([gen.gen])

    async def do_sweep(self) -> None:
        await self.parts.flusher.sweep_now()

    async def do_leave(self) -> None:
        for device in self.parts.contents.devices:
            await self.parts.leaving.sweep(device)

    async def do_evict(self, path: str) -> None:
        gen = self.meta.generations.current(await self.ino(path))
        if gen is not None:
            await self.parts.eviction.evict(gen.gen)

    async def do_snapshot(self, path: str) -> None:
        self.parts.snapshots.take(self.parts.files.handle(await self.handle(path)).inode)

    async def do_uses(self) -> None:
        self.parts.files.record_uses()

    async def do_checkpoint(self) -> None:
        await trio.to_thread.run_sync(self.meta.db.checkpoint)

    async def do_full(self) -> None:
        """As if the database had met a full disk; later there is room again."""
        self.parts.storage.ledgers[0].release_reserve()
        await self.parts.storage.ledgers[0].mend_reserve()

    async def do_crowd(self, path: str, length: int, seed: int) -> None:
        """A write that must wait for room."""
        ledger = self.parts.storage.ledgers[0]
        limit, ledger.limit = ledger.limit, ledger.used + length
        assert ledger.try_admit(length // 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.do_write, path, 0, length, seed)
            await trio.sleep(0.02)
            ledger.limit = limit
            ledger.settle(length // 2, 0)

    async def do_passthrough(self, path: str) -> None:
        """As if the kernel moved this open file's bytes."""
        self.parts.files.handle(await self.handle(path)).inode.lane = Lane.PASSTHROUGH

    async def do_foreign(self, key: str, length: int, seed: int) -> None:
        """Another machine writes an object."""
        self.jobs.store.put(key, block(seed, length), metadata={})

    async def do_usurp(self, key: str, length: int, seed: int) -> None:
        """Another machine writes where this one does."""
        await self.do_foreign(key, length, seed)

    async def do_foreign_link(self, key: str) -> None:
        self.jobs.store.put(key, b"target", metadata={"mode": str(0o120777)})

    async def do_foreign_delete(self, key: str) -> None:
        self.jobs.store.delete([key])

    async def do_round(self, path: str) -> None:
        await self.parts.refresher.rounds.run(await self.ino(path))

    async def do_refuse(self, key: str, times: int) -> None:
        self.jobs.refused[key] = times

    async def do_retry(self) -> None:
        """The pause after what was refused is over."""
        for each in self.parts.flusher._trouble.values():
            each.until = 0.0
        self.parts.queue.kick()
        await trio.sleep(0.1)

    async def do_resolve(self, path: str, decision: str) -> None:
        entry = self.parts.namespace.require(*await self.place(path))
        await self.parts.resolver.decide(entry, Decision(decision))

    async def do_show(self, key: str) -> None:
        await self.parts.resolver.show(ROOT, key)

    async def do_release(self, path: str) -> None:
        gen = self.meta.generations.current(await self.ino(path))
        assert gen is not None
        self.parts.recovery.release(gen)

    async def do_supersede(self) -> None:
        settings = config.load(None, OPTIONS, flags={"store.url": "file:///", "cache.dirs": ["/"]})
        superseder = Superseder(
            self.meta, self.parts.queue, patterns=settings.checkpoint.patterns,
            markers=settings.order.barrier, temps=settings.flush.temp_patterns,
            open_keys=lambda: (),
        )  # fmt: skip
        superseder.look()

    async def do_lost_upload(self, key: str) -> None:
        """An upload that was begun a while ago, and whose id never arrived."""
        self.jobs.store.create_upload(key, {})
        note = UploadRow(0, 0, key, "", 0, None, time.time_ns() - 100 * 10**9)
        self.meta.uploads.add(note, ())

    async def do_lose_cache(self, path: str) -> None:
        """Somebody removes a cache file."""
        gen = self.meta.generations.current(await self.ino(path))
        assert gen is not None
        os.unlink(self.parts.storage.devices[gen.device].path(gen.file))

    async def do_lose_ram(self) -> None:
        """The machine's memory goes, and comes back empty."""
        shutil.rmtree(self.parts.storage.devices[0].directory)

    async def do_notice(self) -> None:
        """That the machine's memory has gone."""
        self.parts.storage.devices[0].look()

    async def do_flee(self) -> None:
        await self.parts.spiller.flee()
        self.parts.files.retry_seals()

    async def do_spill(self) -> None:
        await self.parts.spiller.round()

    async def do_spill_in_vain(self) -> None:
        """The disk fails while it is written to."""
        with patch("cachefs.vfs.spilling.bring", _fail):
            await self.parts.spiller.round()

    async def do_begin_copy(self, path: str) -> None:
        """As far as a spill gets before it has copied anything."""
        gen = self.meta.generations.current(await self.ino(path))
        assert gen is not None
        await self.parts.spiller._begin(gen.gen, self.parts.storage.devices[1])

    async def do_move(self, path: str) -> None:
        """There is no room in RAM for what this open file is to get."""
        opened = self.parts.files.handle(await self.handle(path)).inode
        await self.parts.spiller.move_open(opened)
        assert opened.device.index == 1

    async def do_keep_elsewhere(self, path: str) -> None:
        """Another tier has a copy."""
        gen = self.meta.generations.current(await self.ino(path))
        assert gen is not None
        source = self.parts.storage.devices[gen.device].path(gen.file)
        shutil.copy(source, self.elsewhere)

    async def do_read_at(self, path: str, at: int) -> None:
        fh = await self.handle(path)
        data = await self.parts.files.read(fh, at, 1 << 20)
        assert bytes(data) == block(7, 60 << 20)[at : at + (1 << 20)]

    async def do_trim(self) -> None:
        """There is no room, and a huge file is being read."""
        await self.parts.eviction.trim(0, 1 << 20)

    async def do_trim_closed(self, path: str) -> None:
        gen = self.meta.generations.current(await self.ino(path))
        trimmer = self.parts.eviction._trimmer
        assert gen is not None
        assert trimmer is not None
        await trimmer.trim_closed(gen.gen, 1 << 20, lambda row: None)

    async def do_stray(self) -> None:
        """A cache file of which no database knows."""
        fd = self.parts.storage.devices[0].create(self.parts.contents.new_file_number() + 50)
        os.write(fd, bytes(5000))
        os.close(fd)

    async def do_sync_all(self) -> None:
        await trio.to_thread.run_sync(sync_filesystem, self.parts.storage.devices[0].directory)


async def _ignore(values: Any, /) -> None:
    """Nobody asks how far it has come."""


def _fail(reader: int, device: CacheDevice, copy: int) -> tuple[int, int]:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def live(life: dict[str, Any]) -> None:
    """Recover, then do what is asked, telling of it."""
    told = os.open(life["told"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    root = Path(life["root"])
    dirs = ramdevice.directories(root, ram=life["ram"])
    flags = {"store.url": (root / "store").as_uri(), "cache.dirs": [str(each) for each in dirs]}
    settings = config.load(None, [*OPTIONS, *life.get("options", ())], flags=flags)
    storage = open_storage(settings, [root / "run"])
    for device in storage.devices:
        device.keep_closings([root / "run"])
    jobs, metrics = Jobs(root / "store"), Metrics()
    clients: list[Any] = []

    async def fetch(
        key: str, path: str, start: int, end: int, if_match: str | None
    ) -> tuple[int, int | None]:
        get = fetcher(clients[0], metrics, read_nothing)
        return await get(key, path, start, end, if_match)

    def connect(client: Any, *_: Any) -> Any:
        clients.append(client)
        return filler

    async with open_filler(fetch) as filler, trio.open_nursery() as nursery:
        parts = compose(settings, storage, jobs, connect, None, metrics)  # type: ignore[arg-type]
        await parts.session.open()
        parts.namespace.make_root()
        parts.small.recover()
        recovered = parts.recovery.run()
        parts.contents.reserve_numbers(recovered.highest_file)
        parts.small.journal.begin()
        for task in (parts.flusher.run, parts.syncer.run, parts.leaving.run):
            nursery.start_soon(task)
        stage = Stage(settings, parts, jobs, life["plan"])
        for number, (name, *words) in enumerate(life["calls"]):
            os.write(told, json.dumps(["begin", number]).encode() + b"\n")
            await getattr(stage, f"do_{name}")(*words)
            os.write(told, json.dumps(["end", number]).encode() + b"\n")
        if not life.get("orderly"):
            os._exit(0)  # The life ends as abruptly as by a signal, but nobody reached a point.
        nursery.cancel_scope.cancel()
    await parts.sync_meta()
    storage.close()


def main() -> None:
    for line in sys.stdin:
        life = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            os.dup2(2, 1)  # logs
            try:
                with ramdevice.pretended():
                    trio.run(partial(live, life))
                code = 0
            finally:
                sys.stderr.flush()
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
