"""A toy filesystem over a directory, served through the tap.

    python toyfs.py SOURCE FUSE_FD STATE_FD OPTIONS.json

Files whose names begin with "t-" use the tracked lane, all others passthrough. Inode numbers are
those of the source directory's filesystem, handle numbers hold the epoch, and everything a daemon
has to know after a takeover is read from the tap. `getxattr(root, "user.toy")` answers with what
the tap knows, as JSON, `getxattr(file, "user.toy")` with the requests for that file,
`getxattr(root, "user.leaked")` with the number of backing ids that only the kernel knows of.
SIGUSR1: pause, and die as soon as nothing is in flight.
Options (all may be missing): passthrough, takeover (bool), stack_depth, ttl (seconds), crash_on
(name: a handler that meets it kills the process), sleep_on (name that create sleeps on, or *),
sleep (seconds), log_creates, acl (bool: negotiate otherwise).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cachefs.fuse import tap as tap_module

SOURCE, FUSE_FD, STATE_FD = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
OPTIONS: dict[str, Any] = json.loads(Path(sys.argv[4]).read_text(encoding="utf-8"))
_loaded = tap_module.load(
    STATE_FD,
    OPTIONS.get("passthrough", True),
    OPTIONS.get("stack_depth", 1),
    want_takeover=OPTIONS.get("takeover", True),
    by_hook=OPTIONS.get("by_hook", False),
)
if isinstance(_loaded, tap_module.Reason):
    sys.exit(f"no tap: {_loaded}")
TAP = _loaded

import pyfuse3  # noqa: E402
import trio  # noqa: E402

ROOT = pyfuse3.ROOT_INODE
_STAT = (
    "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blocks",
    "st_atime_ns", "st_mtime_ns", "st_ctime_ns",
)  # fmt: skip


class Handle:
    """One open file: `fd` O_RDONLY in the passthrough lane, O_RDWR in the tracked one."""

    def __init__(self, inode: int, fd: int, passthrough: bool) -> None:
        self.inode, self.fd, self.passthrough = inode, fd, passthrough


class Toy(pyfuse3.Operations):  # type: ignore[misc, unused-ignore]
    """Path based, one directory deep and below."""

    def __init__(self) -> None:
        super().__init__()
        self.enable_acl = OPTIONS.get("acl", False)
        self.paths: dict[int, str] = {ROOT: SOURCE}
        self.handles: dict[int, Handle] = {}
        self.events: list[Any] = []
        self.killed: list[bool] = []
        self._last = 0

    # -- names --

    def path(self, inode: int) -> str:
        path = self.paths.get(inode)
        if path is None or (inode != ROOT and not self._is(path, inode)):
            path = self._search(inode)
        return path

    @staticmethod
    def _is(path: str, inode: int) -> bool:
        try:
            return os.lstat(path).st_ino == inode
        except FileNotFoundError:
            return False

    def _search(self, inode: int) -> str:
        for directory, dirs, files in os.walk(SOURCE):
            for name in dirs + files:
                path = os.path.join(directory, name)
                if self._is(path, inode):
                    self.paths[inode] = path
                    return path
        raise pyfuse3.FUSEError(errno.ENOENT)

    def child(self, parent: int, name: bytes) -> str:
        if os.fsdecode(name) == OPTIONS.get("crash_on"):
            os.kill(os.getpid(), signal.SIGABRT)
        return os.path.join(self.path(parent), os.fsdecode(name))

    def attributes(self, st: os.stat_result, root: bool = False) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        for name in _STAT:
            setattr(entry, name, getattr(st, name))
        entry.st_ino = ROOT if root else st.st_ino
        entry.st_blksize = 4096
        entry.attr_timeout = entry.entry_timeout = OPTIONS.get("ttl", 0)
        return entry

    def known(self, path: str) -> pyfuse3.EntryAttributes:
        st = os.lstat(path)
        self.paths[st.st_ino] = path
        return self.attributes(st)

    # -- handles --

    def new_fh(self) -> int:
        self._last += 1
        return (TAP.info()["epoch"] << 40) + (os.getpid() << 16) + self._last

    def register(self, fh: int, path: str, inode: int, passthrough: bool, count: bool) -> None:
        fd = os.open(path, os.O_RDONLY if passthrough else os.O_RDWR)
        try:
            if passthrough and count:
                TAP.set_passthrough(fh, TAP.acquire(inode, fd))
        except OSError:
            os.close(fd)
            raise
        TAP.set_handle_fd(fh, fd)
        self.handles[fh] = Handle(inode, fd, passthrough)

    def adopt(self) -> None:
        """After a takeover: every handle that the kernel still holds."""
        for entry in TAP.open_handles():
            if not entry.is_dir:
                path = self.path_or_memory(entry.nodeid)
                self.register(entry.fh, path, entry.nodeid, entry.passthrough, False)

    def path_or_memory(self, inode: int) -> str:
        try:
            return self.path(inode)
        except pyfuse3.FUSEError:  # unlinked while open: the toy forgets its content
            return "/dev/null"

    def lane(self, name: str) -> bool:
        return TAP.passthrough_ok and not os.path.basename(name).startswith("t-")

    # -- requests --

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
        return self.run(lambda: self.known(self.child(parent, name)))

    def run(self, call: Any) -> Any:
        try:
            return call()
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        return self.run(lambda: self.attributes(os.lstat(self.path(inode)), inode == ROOT))

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> Any:
        path = self.path(inode)
        if fields.update_size:
            self.run(lambda: os.truncate(path, attr.st_size))
        if fields.update_mode:
            self.run(lambda: os.chmod(path, attr.st_mode & 0o7777))
        if fields.update_mtime:
            self.run(lambda: os.utime(path, ns=(attr.st_atime_ns, attr.st_mtime_ns)))
        return await self.getattr(inode)

    async def getxattr(self, inode: int, name: bytes, ctx: Any) -> bytes:
        if name == b"user.leaked":
            return b"%d" % self.leaked()
        if name != b"user.toy":
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        if inode != ROOT:
            TAP.watch(inode)
            return json.dumps({op.name: n for op, n in TAP.counts(inode).items()}).encode()
        self.events += [(e.kind.name, *e[1:]) for e in TAP.drain_events()]
        return json.dumps(self.report()).encode()

    def leaked(self) -> int:
        """Closes every id up to a new one that is not in the table; how many there were."""
        fd = os.open(SOURCE + "/.probe", os.O_CREAT | os.O_RDONLY)
        last, found = TAP.open_backing(fd), 0
        TAP.close_backing(last)
        os.close(fd)
        os.unlink(SOURCE + "/.probe")
        known = {number for number, _ in TAP.backings().values()}
        for number in set(range(1, last)) - known:
            try:
                TAP.close_backing(number)
                found += 1
            except FileNotFoundError:
                pass
        return found

    def report(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "info": TAP.info(),
            "passthrough": [TAP.passthrough_ok, TAP.passthrough_reason],
            "takeover": [TAP.takeover_possible, TAP.is_takeover],
            "handles": [list(entry) for entry in TAP.open_handles()],
            "inflight": [[r.opcode.name, r.nodeid, r.charge] for r in TAP.inflight()],
            "poisoned": [[p.opcode.name, *map(os.fsdecode, p.names)] for p in TAP.poisoned()],
            "backings": {str(inode): list(entry) for inode, entry in TAP.backings().items()},
            "counts": {op.name: n for op, n in TAP.counts().items()},
            "events": self.events,
            "killed": self.killed[:100],
        }

    async def opendir(self, inode: int, ctx: Any) -> int:
        return self.new_fh()

    async def readdir(self, fh: int, start: int, token: Any) -> None:
        """Root only: the toy does not keep which directory a handle is for."""
        for index, name in enumerate(sorted(os.listdir(SOURCE))):
            if index < start:
                continue
            try:
                entry = self.known(os.path.join(SOURCE, name))
            except FileNotFoundError:
                continue
            if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, index + 1):
                break

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        path, fh = self.path(inode), self.new_fh()
        if flags & os.O_TRUNC:
            self.run(lambda: os.truncate(path, 0))
        self.run(lambda: self.register(fh, path, inode, self.lane(path), True))
        return pyfuse3.FileInfo(fh=fh)

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        path, fh = self.child(parent, name), self.new_fh()
        if OPTIONS.get("log_creates"):
            print("create", os.fsdecode(name), flush=True)
        if OPTIONS.get("sleep_on") in ("*", os.fsdecode(name)):
            await trio.sleep(OPTIONS["sleep"])
        self.run(lambda: os.close(os.open(path, os.O_CREAT | (flags & os.O_TRUNC), mode)))
        entry = self.run(lambda: self.known(path))
        self.run(lambda: self.register(fh, path, entry.st_ino, self.lane(path), True))
        return pyfuse3.FileInfo(fh=fh), entry

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        return os.pread(self.handles[fh].fd, size, offset)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        self.killed.append(TAP.kills_privileges())
        return os.pwrite(self.handles[fh].fd, data, offset)

    async def flush(self, fh: int) -> None:
        pass

    async def fsync(self, fh: int, datasync: bool) -> None:
        os.fsync(self.handles[fh].fd)

    async def release(self, fh: int) -> None:
        handle = self.handles.pop(fh, None)
        if handle is None:  # this RELEASE had been carried out by the daemon before
            return
        if handle.passthrough:
            TAP.release(handle.inode)
        os.close(handle.fd)

    async def releasedir(self, fh: int) -> None:
        pass

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> Any:
        path = self.child(parent, name)
        self.repeatable(lambda: os.mkdir(path, mode), errno.EEXIST)
        return self.known(path)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        path = self.child(parent, name)
        self.repeatable(lambda: os.unlink(path), errno.ENOENT)

    async def rmdir(self, parent: int, name: bytes, ctx: Any) -> None:
        path = self.child(parent, name)
        self.repeatable(lambda: os.rmdir(path), errno.ENOENT)

    async def rename(
        self, parent: int, old: bytes, new_parent: int, new: bytes, flags: int, ctx: Any
    ) -> None:
        source, target = self.child(parent, old), self.child(new_parent, new)
        self.repeatable(lambda: os.rename(source, target), errno.ENOENT)

    @staticmethod
    def repeatable(call: Any, done: int) -> None:
        """A mutation sent again may be there already: `done` is what it then fails with."""
        try:
            call()
        except OSError as error:
            if error.errno != done:
                raise pyfuse3.FUSEError(error.errno or errno.EIO) from None


async def pause_when_told() -> None:
    """The planned restart: nothing is left for the next daemon to do again."""
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        async for _ in signals:
            TAP.pause(True)
            while TAP.inflight():  # noqa: ASYNC110 (the tap has no event to wait for)
                await trio.sleep(0.001)
            print(f"paused with {len(TAP.inflight())} in flight", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


async def serve() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_when_told)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def main() -> None:
    toy = Toy()
    options = (set(pyfuse3.default_options) | {"fsname=toy"}) - {"default_permissions"}
    try:
        pyfuse3.init(toy, f"/dev/fd/{FUSE_FD}", options)
    except RuntimeError:
        sys.exit(f"refused: {TAP.refusal}")
    if TAP.is_takeover:
        toy.adopt()
    print(f"up {os.getpid()}", flush=True)
    trio.run(serve)


if __name__ == "__main__":
    main()
