"""Open files: creating, opening, reading, writing, syncing, closing."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.system import RWF_NOWAIT, read_cached, write_all
from cachefs.failpoints import Point, reach
from cachefs.meta import Meta
from cachefs.meta.rows import InodeRow
from cachefs.model.states import GenState
from cachefs.vfs.admission import Admission, Asker
from cachefs.vfs.contents import Contents
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.lingering import Lingering
from cachefs.vfs.namespace import Caller, Namespace
from cachefs.vfs.opened import Handle, Lane, OpenInode, OpenTable
from cachefs.vfs.overlaying import PRIVILEGES, Overlay
from cachefs.vfs.rewriting import Rewriter
from cachefs.vfs.streaming import Streams
from cachefs.vfs.syncing import sync_file

log = structlog.get_logger("cachefs.vfs")

_COUNT_EVERY = 4 << 20
"""Bytes written to a file between two looks at what it allocates."""


class Files(Overlay):
    """The regular files of one mount that are open, and how they come to be so."""

    def __init__(
        self,
        meta: Meta,
        namespace: Namespace,
        contents: Contents,
        rewriter: Rewriter,
        lanes: LaneKeeper,
        table: OpenTable,
        ledgers: list[SpaceLedger],
        *,
        admission: Admission,
        streams: Streams,
        sync_meta: Callable[[], Awaitable[None]],
    ) -> None:
        """`sync_meta` makes all commits so far survive a power cut, sharing one sync."""
        super().__init__(namespace, lanes, table)
        self._meta = meta
        self._contents = contents
        self._rewriter = rewriter
        self._ledgers = ledgers
        self.admission = admission
        self._streams = streams
        streams.before_begin = self._count_unseen
        self._sync_meta = sync_meta
        self._opening: dict[int, trio.Lock] = {}
        self._unsealed: list[OpenInode] = []
        self._used: dict[int, int] = {}
        self.shelter: Callable[[OpenInode], Awaitable[None]] = _nothing
        """Awaited with a file that is synced: its bytes are to be where a power cut leaves them."""
        self.must_move: Callable[[OpenInode], bool] = lambda opened: False
        """Whether the bytes of a closed file have to be saved to another device first."""
        self.before_rewrite: Callable[[OpenInode], Awaitable[None]] = _nothing
        """Awaited before bytes change that a snapshot has promised to the store."""
        self.is_log: Callable[[str], bool] = lambda path: False
        """Whether a path is a log's, which must be tracked to be uploaded while it grows."""
        self.kills_privileges: Callable[[], bool] = lambda: True
        """Whether the request at hand is to clear set-user-id and set-group-id. Asked before its
        handler awaits anything."""
        self.on_written: Callable[[Lane, int], None] = lambda lane, nbytes: None
        """Called with the bytes that programs wrote, as far as they are seen."""
        self.on_read: Callable[[int], None] = lambda nbytes: None
        """Called with the bytes that programs were given."""
        self.lingering = Lingering(table, self._finish)
        namespace.on_unlinked = self._unlinked
        namespace.is_open_directory = lambda ino: ino in table.directories.values()

    # -- opening ------------------------------------------------------------------------------

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Handle, InodeRow]:
        """A new regular file, open."""
        wanted = self._lanes.wants(stat.S_IMODE(mode), flags)
        async with self._contents.fresh_file(parent, passthrough=wanted) as fresh:
            directory, path = await self._namespace.prepare_create(parent, name)
            row = self._namespace.new_inode(directory, stat.S_IFREG | stat.S_IMODE(mode), caller)
            opened = self._contents.create(
                row,
                parent,
                lambda: self._namespace.link_new(parent, name, row),
                fresh,
                passthrough=wanted and not self.is_log(path),
            )
        opened.privileged = bool(row.mode & PRIVILEGES)
        opened.unasked = not (opened.privileged or self.is_log(path))
        return self.table.add(opened, flags), row

    async def open(self, ino: int, flags: int) -> Handle:
        """Open an existing file. EISDIR, ELOOP, ENOENT, EIO and what the store says."""
        kills = self.kills_privileges()
        row = self._namespace.get(ino)
        if stat.S_ISDIR(row.mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(row.mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        writing = flags & os.O_ACCMODE != os.O_RDONLY
        if flags & os.O_TRUNC and not writing:  # Linux truncates even then
            self._close((await self.open(ino, os.O_WRONLY | os.O_TRUNC)).fh)
            flags &= ~os.O_TRUNC
        lock = self._opening.setdefault(ino, trio.Lock())
        async with lock:
            opened = await self._opened(ino, flags, writing)
            reach(Point.OPEN_AFTER_INODE)
            opened.privileged = bool(self._namespace.get(ino).mode & PRIVILEGES)
            handle = self.table.add(opened, flags)
            if writing:
                self.table.lingering.pop(ino, None)
        if not lock.statistics().tasks_waiting:
            self._opening.pop(ino, None)
        try:
            if writing:
                await self._start_writing(opened, flags, kills=kills)
        except BaseException:
            self._close(handle.fh)
            raise
        return handle

    async def _opened(self, ino: int, flags: int, writing: bool) -> OpenInode:
        """The open inode: the one that is there, or a new one."""
        row = self._namespace.get(ino)  # as it is now: we may have waited
        opened = self.table.inodes.get(ino)
        if opened is not None:
            if opened.lane is Lane.PASSTHROUGH:
                self._lanes.join(ino, opened.fd)
            return opened
        wanted = self._lanes.wants(row.mode, flags) and not (writing and self.names_log(ino))
        if writing and flags & os.O_TRUNC:
            return await self._emptied(ino, passthrough=wanted)
        opened = await self._contents.open_current(row)
        if wanted and not writing:
            self._contents.try_reading_passthrough(opened)
        return opened

    async def _emptied(self, ino: int, *, passthrough: bool) -> OpenInode:
        parent = self._parent(ino)
        async with self._contents.fresh_file(parent, passthrough=passthrough) as fresh:
            row = self._namespace.get(ino)
            return self._contents.create(
                row, parent, lambda: self._meta.inodes.save(row), fresh, passthrough=passthrough
            )

    def names_log(self, ino: int) -> bool:
        """Whether a file has a log's name."""
        names = self._meta.dentries.of_inode(ino)
        paths = (self._meta.dentries.path(name.parent, name.name) for name in names)
        return any(self.is_log(path.decode()) for path in paths)

    def _parent(self, ino: int) -> int:
        names = self._meta.dentries.of_inode(ino)
        return names[0].parent if names else 0

    async def _start_writing(self, opened: OpenInode, flags: int, *, kills: bool) -> None:
        if flags & os.O_TRUNC:
            await self._truncate_open(opened, 0, kills=kills)
        elif (
            opened.lane is Lane.PASSTHROUGH  # the kernel will not say when
            or flags & os.O_ACCMODE == os.O_WRONLY  # so that fallocate works from the start
            or opened.gen.state == GenState.HELD  # reopened and closed: held no more
        ):
            await self._begin_write(opened)

    async def _begin_write(self, opened: OpenInode) -> None:
        await self._rewriter.begin_write(opened)
        reach(Point.OPEN_AFTER_BEGIN)
        for handle in self.table.handles.values():
            if handle.inode is opened and handle.writable:
                self._lanes.now_writable(handle)

    # -- data ---------------------------------------------------------------------------------

    def handle(self, fh: int) -> Handle:
        """EBADF for a handle that is not there."""
        handle = self.table.handles.get(fh)
        if handle is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return handle

    async def read(self, fh: int, offset: int, size: int) -> bytes | memoryview:
        """Up to `size` bytes from `offset` on, fewer at the end of the file."""
        handle = self.handle(fh)
        trims = -1
        while trims != (trims := handle.inode.trims):  # Nothing of it left the cache meanwhile.
            data = await self._read(handle.inode, offset, size)
        self._lanes.now_readable(handle)
        self.on_read(len(data))
        return data

    async def _read(self, opened: OpenInode, offset: int, size: int) -> bytes | memoryview:
        if opened.stream is not None:
            away = await self._streams.read(opened, offset, size)
            if away is not None:
                return away
        if opened.fill is not None:
            unkept = await self._contents.read(opened, offset, offset + size)
            if unkept is not None:
                return unkept
        if RWF_NOWAIT:
            data = read_cached(opened.fd, offset, size)
            if data is not None and len(data) < size:
                opened.refresh()
            if data is not None and (len(data) == size or offset + len(data) >= opened.size):
                return data
        if opened.device.apart.direct:
            return os.pread(opened.fd, size, offset)
        return await trio.to_thread.run_sync(os.pread, opened.fd, size, offset)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        """Write all of `data` at `offset`; none: only get ready for it (fallocate). ENOSPC, EIO."""
        handle, asker = self.handle(fh), self.admission.asker()
        opened = handle.inode
        kills = opened.privileged and self.kills_privileges()
        if not opened.writing:
            await self._begin_write(opened)
        if kills:
            self.clear_privileges(opened.ino)
        if not data:
            await opened.settled()
            return 0
        end = offset + len(data)
        ledger = await self._room_for(opened, offset, end, asker)
        while offset < opened.snapshot_size:  # which may be taken while room is waited for
            ledger.settle(len(data), 0)
            await self.before_rewrite(opened)
            ledger = await self._room_for(opened, offset, end, asker)
        try:
            with opened.written_to():
                await opened.device.apart.run(write_all, opened.fd, data, offset)
        finally:
            ledger.settle(len(data), 0)
        reach(Point.WRITE_AFTER_BYTES)
        opened.wrote(offset, end)
        opened.seen += len(data)
        self.on_written(Lane.TRACKED, len(data))
        self._account_growth(handle, len(data))
        if handle.synchronous:
            await self._sync(opened)
        return len(data)

    async def _room_for(self, opened: OpenInode, start: int, end: int, asker: Asker) -> SpaceLedger:
        """The ledger that the bytes of a write were promised on. They may be written at once."""
        while True:
            if opened.stream is not None:
                await self._streams.before_write(opened, start, end, asker)
            ledger = self._ledgers[opened.gen.device]
            if opened.moving is not None or not ledger.try_admit(end - start):
                ledger = await self.admission.admit(opened, end - start, asker)
                reach(Point.WRITE_AFTER_ROOM)
            if self._streams.may_write(opened, start, end):
                return ledger
            ledger.settle(end - start, 0)

    def _count_unseen(self, opened: OpenInode) -> None:
        """Bytes of a file that were written without asking, before all are asked for."""
        self.note_changes()
        opened.refresh()
        if opened.unasked:
            self.on_written(Lane.TRACKED, max(0, opened.size - opened.seen))
            opened.seen = opened.size

    def clear_privileges(self, ino: int) -> None:
        """Take set-user-id and set-group-id from a file, open or not, that is written to."""
        self._namespace.kill_privileges(ino)
        self.mode_changed(ino)

    def _account_growth(self, handle: Handle, written: int) -> None:
        """Count growth now and then; sealing corrects it. Asking for each write would cost more
        than the small ones themselves."""
        opened = handle.inode
        opened.uncounted += written
        more = self._lanes.used_up(handle)
        if more or self._ledgers[opened.gen.device].is_tight or opened.uncounted >= _COUNT_EVERY:
            opened.uncounted = 0
            self._contents.account(opened)
        if more:
            self._lanes.renew(handle)

    async def truncate(self, ino: int, size: int, fh: int | None) -> None:
        """Set a file's size, open or not."""
        kills = self.kills_privileges()
        if fh is not None and fh in self.table.handles:
            await self._truncate_open(self.table.handles[fh].inode, size, kills=kills)
            return
        # Without a handle: opened for the moment, so that sealing follows as for any writer. The
        # times of a file that has the size already move all the same, as on a disk.
        emptied = size == 0 and self.overlay(self._namespace.get(ino)).size > 0
        handle = await self.open(ino, os.O_WRONLY | (os.O_TRUNC if emptied else 0))
        try:
            if not emptied:
                await self._truncate_open(handle.inode, size, kills=kills)
        finally:
            self._close(handle.fh)

    async def _truncate_open(self, opened: OpenInode, size: int, *, kills: bool) -> None:
        if not opened.writing:
            await self._begin_write(opened)
        if kills and opened.privileged:
            self.clear_privileges(opened.ino)
        if size < opened.snapshot_size:
            await self.before_rewrite(opened)
        await opened.settled()
        await self._streams.truncate(opened, size)
        self._contents.account(opened)

    # -- syncing and closing ------------------------------------------------------------------

    async def fsync(self, fh: int) -> None:
        """Bytes, directory entry and metadata survive a power cut once this returns."""
        await self._sync(self.handle(fh).inode)

    async def _sync(self, opened: OpenInode) -> None:
        await sync_file(opened, self._contents, self._meta, self._sync_meta, self.shelter)

    async def sync_metadata(self) -> None:
        """fsync of a directory: every name so far survives a power cut."""
        await self._sync_meta()

    def release(self, fh: int) -> None:
        """The kernel's last reference to a handle is gone. Atomic: numbers follow arrival order."""
        self.note_changes()
        self._close(fh)

    def note_changes(self) -> None:
        """Take in what the kernel's requests did without passing here."""
        if read := self._lanes.take_read():
            self.on_read(read)
        for change in self._lanes.changes():
            handle = self.table.handles.get(change.fh)
            if change.abandoned:
                self._close(change.fh)
            elif change.flushed:
                self.flushed(change.fh)
            elif handle is not None:
                opened = handle.inode
                size = os.fstat(opened.fd).st_size
                if change.start < size:  # it may have been cut since
                    opened.wrote(change.start, min(change.end, size))
                opened.size = size

    def _close(self, fh: int) -> None:
        self.table.settle()
        handle = self.table.remove(fh)
        if handle is None:
            return
        opened = handle.inode
        self._lanes.closed(handle)
        try:
            # The only handle of a new file may be a reader's: open(O_CREAT | O_RDONLY).
            done = (handle.writable or not opened.handles) and not opened.writers
            if done and opened.writing and not self.lingering.keep(opened):
                self._last_writer_gone(opened)
        finally:
            if opened.lane is Lane.PASSTHROUGH:
                self._lanes.leave(opened.ino)
            if not opened.handles and opened.ino not in self.table.lingering:
                self._last_handle_gone(opened)

    def _finish(self, opened: OpenInode) -> None:
        """The last mapping of a closed file is gone."""
        try:
            self._last_writer_gone(opened)
        finally:
            if not opened.handles:
                del self.table.inodes[opened.ino]
                self._last_handle_gone(opened)

    def resume(self, opened: OpenInode) -> None:
        """Take up a file that another daemon of this mount had opened."""
        if opened.lane is Lane.PASSTHROUGH and opened.writing:
            parent = self._parent(opened.ino)
            self._lanes.resume_writer(opened.device, opened.gen.file, parent)

    def _last_writer_gone(self, opened: OpenInode) -> None:
        opened.refresh()
        if opened.lane is Lane.PASSTHROUGH:
            counted = self._lanes.writer_gone(opened.device, opened.gen.file)
            opened.accounted = opened.accounted if counted is None else counted
            self.on_written(opened.lane, max(0, opened.size - opened.gen.size))
        elif opened.unasked:
            self.on_written(opened.lane, max(0, opened.size - opened.seen))
        if opened.orphaned:
            return
        try:
            if self.must_move(opened):
                raise OSError(errno.EIO, "its cache device has failed: it is saved first")
            self._seal(opened)
        except (OSError, sqlite3.Error) as error:
            # Nobody hears an error of release: the file counts as open until it works.
            log.error("a closed file could not be recorded", inode=opened.ino, reason=str(error))
            self._unsealed.append(opened)
            opened.handles, opened.writers = opened.handles + 1, opened.writers + 1
            self.table.inodes[opened.ino] = opened

    def _seal(self, opened: OpenInode) -> None:
        try:
            self._contents.seal(opened)
        except sqlite3.Error:
            self._contents.seal(opened)  # on a full disk the first one made the database room

    def retry_seals(self) -> None:
        """Record closed files that the database refused before. Raises as it does."""
        for opened in [each for each in self._unsealed if not self.must_move(each)]:
            if not opened.orphaned and opened.writers == 1:
                self._contents.seal(opened)
            self._unsealed.remove(opened)
            opened.handles, opened.writers = opened.handles - 1, opened.writers - 1
            if not opened.handles:
                self.table.inodes.pop(opened.ino, None)
                self._last_handle_gone(opened)

    def record_uses(self) -> None:
        """Write down when generations were last used, which eviction goes by."""
        used, self._used = self._used, {}
        self._meta.generations.touch((when, gen) for gen, when in used.items())

    def flushed(self, fh: int) -> None:
        """A descriptor of the handle was closed; its duplicates may still be open."""
        handle = self.table.handles.get(fh)
        if handle is not None and handle.writable:
            handle.inode.flushed_ns = time.time_ns()

    async def closing(self, fh: int) -> None:
        """As `flushed`, before close(2) returns and where the tap has not noted it on the file."""
        self.flushed(fh)
        handle = self.table.handles.get(fh)
        if handle is None or not handle.writable or not handle.inode.writing:
            return
        opened = handle.inode
        if not opened.device.note_closed(opened.gen.file, opened.fd):
            await opened.device.apart.run(opened.device.mark_closed, opened.gen.file, opened.fd)
        reach(Point.FILE_AFTER_CLOSED_MARK)

    def all_released(self, before_ns: int) -> bool:
        """False while a file that was closed before `before_ns` still waits for its release.

        Closed, or only one of several descriptors? In passthrough the lease on the cache file
        tells: no writer left means that the release is on its way (its effect must come first);
        one that is left has not finished and holds up nobody.
        """
        self.note_changes()
        suspects = (
            opened
            for opened in self.table.inodes.values()
            if opened.lane is Lane.PASSTHROUGH and 0 < opened.flushed_ns <= before_ns
        )
        return all(
            not opened.writing or not opened.writers or self._writes_on(opened)
            for opened in suspects
        )

    def _writes_on(self, opened: OpenInode) -> bool:
        try:
            return opened.device.writer_open(opened.gen.file)
        except OSError:
            return True

    def _last_handle_gone(self, opened: OpenInode) -> None:
        try:
            self._contents.account(opened)
            self._contents.save_progress(opened)
        finally:
            opened.device.let_go(opened.fd)
            self._contents.unkept.forget(opened.device.path(opened.gen.file))
        self._used[opened.gen.gen] = time.time_ns()
        if opened.orphaned:
            self._contents.forget_inode(opened.ino)

    def _unlinked(self, ino: int) -> None:
        """The inode lost its last name: it lives on only through its handles."""
        opened = self.table.inodes.get(ino)
        if opened is not None:
            opened.orphaned = True
        else:
            self._contents.forget_inode(ino)


async def _nothing(opened: OpenInode) -> None:
    """Nothing is to be done."""
