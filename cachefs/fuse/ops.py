"""The request handlers: decode, call the filesystem, encode."""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import pyfuse3

from cachefs.fuse.guard import RequestObserver, guarded, once
from cachefs.fuse.listings import Listings
from cachefs.meta import Meta
from cachefs.meta.room import room
from cachefs.meta.rows import InodeRow
from cachefs.model.objectmeta import XATTR_LIMIT, encode_xattrs
from cachefs.vfs.askers import Askers
from cachefs.vfs.clock import bounded, now_ns
from cachefs.vfs.files import Files
from cachefs.vfs.namespace import Caller, Namespace
from cachefs.vfs.opened import Handle
from cachefs.vfs.remote import may_be_symlink
from cachefs.vfs.space import Space
from cachefs.vfs.virtual import PREFIX, Inspector

_READDIR_BATCH = 64
"""Entries read ahead at a time; a kernel takes 20 to 180 of them with one request."""
_DOT, _DOTDOT = 1, 2
"""Cookies of the two entries that every directory has; a dentry's is its number plus 2."""
_UNKNOWN = pyfuse3.ModeT(0)
"""Of an entry in a directory: readers are told DT_UNKNOWN, and Linux asks for it by name when
somebody wants to know more (fuse_direntplus_link)."""
_USER = b"user."
_NAMESPACES = (b"user.", b"trusted.", b"security.", b"system.")


def _nothing(*args: object) -> None:
    """Nobody makes files but the handlers."""


class CacheOperations(pyfuse3.Operations):
    """One mount, as pyfuse3 calls it."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        meta: Meta,
        namespace: Namespace,
        files: Files,
        inspector: Inspector,
        space: Space,
        observer: RequestObserver,
        listings: Listings,
        *,
        attr_timeout: float,
        announce: Callable[[Handle], bool] = lambda handle: True,
        current_request: Callable[[], int] | None = None,
        times_of_now: Callable[[], tuple[bool, bool]] | None = None,
        gather: Callable[[], None] = _nothing,
        on_created: Callable[[int, bytes], None] = _nothing,
    ) -> None:
        """`attr_timeout` in seconds: how long the kernel may believe names and attributes.
        `announce` is told of each handle before its open is answered, and says whether the kernel
        may keep the pages it has cached. `current_request` numbers the request being handled, so
        that one that is sent again after a takeover is known. `times_of_now` tells which times
        (access, change of content) the request being handled sets to that of now. `gather` is
        called before every request, `on_created` with directory and name of each new file (see
        `fuse.smallfiles`).
        """
        super().__init__()
        self._meta = meta
        self._namespace = namespace
        self._files = files
        self._inspector = inspector
        self._space = space
        self._timeout = attr_timeout
        self._announce = announce
        self.current_request = current_request if current_request is not None else _no_request
        self._times_of_now = times_of_now if times_of_now is not None else _given_times
        self._listings = listings
        self.settle = files.table.settle
        self.gather = gather
        self.room = partial(room, meta.db)
        self._on_created = on_created
        self.before_open: Callable[[int, int], Awaitable[None]] = _at_once
        """Awaited with inode and flags before a file is opened; returns without having waited when
        it is to be written to."""
        self.applied: set[int] = set()
        self.observer = observer
        self.askers = Askers()
        self.durations: dict[str, Callable[[float], None]] = _Durations(observer.seconds)

    def remember_applied(self, *, taken_over: bool) -> None:
        """Know which requests of a predecessor were applied; forget them on a new connection."""
        if taken_over:
            self.applied = self._meta.applied.all()
        else:
            self._meta.applied.clear()

    # -- encoding -----------------------------------------------------------------------------

    def _entry(self, row: InodeRow) -> pyfuse3.EntryAttributes:
        self._files.overlay(row)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(row.ino)
        entry.st_mode = pyfuse3.ModeT(row.mode)
        entry.st_nlink = row.nlink
        entry.st_uid = row.uid
        entry.st_gid = row.gid
        entry.st_size = row.size
        entry.st_blocks = row.blocks
        entry.st_atime_ns = row.atime_ns
        entry.st_mtime_ns = row.mtime_ns
        entry.st_ctime_ns = row.ctime_ns
        entry.attr_timeout = entry.entry_timeout = self._timeout if row.attrs_known else 0
        return entry

    def _entry_of(self, ino: int) -> pyfuse3.EntryAttributes:
        return self._entry(self._namespace.get(ino))

    # -- looking ------------------------------------------------------------------------------

    @guarded
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(await self._namespace.lookup(parent_inode, name, ctx.pid))

    @guarded
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._entry_of(inode)

    async def forget(self, inode_list: Any) -> None:
        """Inodes live as long as they have a name or a handle, whatever the kernel remembers."""

    @guarded
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        target = self._namespace.get(inode).target
        if target is None:
            raise OSError(errno.EINVAL, "not a symbolic link")
        return target

    @guarded
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        self._namespace.directory(inode)
        fh = self._files.table.number()
        self._files.table.directories[fh] = inode
        self._listings.opened(fh, inode, is_old=self._namespace.views.is_old(inode))
        return fh

    @guarded
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        ino = self._files.table.directories.get(fh)
        if ino is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if start_id < _DOTDOT:
            await self._namespace.begin_listing(ino)
            if not await self._reply_dots(ino, start_id, token):
                return
        after = max(start_id - _DOTDOT, 0)
        while True:
            batch = await self._namespace.entries(ino, after, _READDIR_BATCH)
            for cookie, name, row in batch:
                entry = self._entry(row)
                if may_be_symlink(row):
                    entry.st_mode = _UNKNOWN
                if not pyfuse3.readdir_reply(
                    token, pyfuse3.FileNameT(name), entry, cookie + _DOTDOT
                ):
                    return
            if len(batch) < _READDIR_BATCH:
                return
            after = batch[-1][0]

    async def _reply_dots(self, ino: int, start_id: int, token: pyfuse3.ReaddirToken) -> bool:
        for cookie, name in ((_DOT, b"."), (_DOTDOT, b"..")):
            if start_id < cookie:
                row = await self._namespace.lookup(ino, name)
                if not pyfuse3.readdir_reply(
                    token, pyfuse3.FileNameT(name), self._entry(row), cookie
                ):
                    return False
        return True

    @guarded
    async def releasedir(self, fh: int) -> None:
        ino = self._files.table.directories.pop(fh, None)
        if ino is not None and ino not in self._files.table.directories.values():
            self._namespace.directory_released(ino)

    @guarded
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._files.sync_metadata()

    @guarded
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        usage = self._space.usage()
        stats = pyfuse3.StatvfsData()
        stats.f_bsize = stats.f_frsize = usage.block_size
        stats.f_blocks = usage.size // usage.block_size
        stats.f_bfree = stats.f_bavail = usage.free // usage.block_size
        stats.f_files = usage.files + usage.files_free
        stats.f_ffree = stats.f_favail = usage.files_free
        stats.f_namemax = 255
        return stats

    # -- names --------------------------------------------------------------------------------

    @guarded
    @once
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(await self._namespace.mkdir(parent_inode, name, mode, _caller(ctx)))

    @guarded
    @once
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if not stat.S_ISREG(mode):
            raise OSError(errno.EPERM, "no device nodes, sockets or pipes here")
        handle, row = await self._files.create(parent_inode, name, mode, os.O_WRONLY, _caller(ctx))
        self._files.release(handle.fh)
        return self._entry_of(row.ino)

    @guarded
    @once
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        row = await self._namespace.symlink(parent_inode, name, target, _caller(ctx))
        return self._entry(row)

    @guarded
    @once
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(await self._namespace.link(inode, new_parent_inode, new_name))

    @guarded
    @once
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._namespace.unlink(parent_inode, name)

    @guarded
    @once
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._namespace.before_rmdir(parent_inode, name)
        self._namespace.rmdir(parent_inode, name)

    @guarded
    @once
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        await self._namespace.before_rename(parent_inode_old, name_old, parent_inode_new, name_new)
        self._namespace.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    # -- requests sent again that were applied already --------------------------------------------

    async def _again_entry(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        return self._entry(await self._namespace.lookup(parent, name))

    async def _again_mkdir(
        self, parent: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return await self._again_entry(parent, name)

    async def _again_mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return await self._again_entry(parent, name)

    async def _again_symlink(
        self, parent: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return await self._again_entry(parent, name)

    async def _again_link(
        self, inode: int, parent: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return await self._again_entry(parent, name)

    async def _again_create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        row = await self._namespace.lookup(parent, name)
        # Held by recovery, since nobody had it open: opened for writing it goes on, to be sealed.
        flags &= ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        handle = await self._files.open(row.ino, flags)
        return self._opened(handle), self._entry(row)

    async def _again_unlink(self, *request: object) -> None:
        """It is gone."""

    async def _again_rmdir(self, *request: object) -> None:
        """It is gone."""

    async def _again_rename(self, *request: object) -> None:
        """It bears its new name."""

    async def _again_removexattr(self, *request: object) -> None:
        """It is gone."""

    # -- attributes ---------------------------------------------------------------------------

    @guarded
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        atime_now, mtime_now = self._times_of_now()
        await self.room()
        if _is_empty(fields):
            self._namespace.touch(inode, ctx.uid, ctx.pid)
            self._files.mode_changed(inode)
        if fields.update_size:
            await self._files.truncate(inode, attr.st_size, fh)
        if fields.update_atime or fields.update_mtime or _names_owner_or_mode(fields):
            await self._set_attributes(inode, attr, fields, atime_now, mtime_now)
        return self._entry_of(inode)

    async def _set_attributes(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        atime_now: bool,
        mtime_now: bool,
    ) -> None:
        now = now_ns()
        atime = now if atime_now else bounded(attr.st_atime_ns) if fields.update_atime else None
        mtime = now if mtime_now else bounded(attr.st_mtime_ns) if fields.update_mtime else None
        if mtime is not None:
            await self._files.set_mtime(inode, mtime, atime if atime is not None else mtime)
        self._namespace.set_attributes(
            inode,
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            atime_ns=atime,
            mtime_ns=mtime,
            ctime_ns=now,
        )
        self._files.mode_changed(inode)

    @guarded
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if name.startswith(PREFIX):
            value = self._inspector.xattr(self._namespace.get(inode), name)
        elif name.startswith(_USER):
            row = self._namespace.get(inode)
            if not row.attrs_known:
                await self._namespace.know(row)
            value = self._meta.inodes.get_xattr(inode, name)
        else:
            value = None
        if value is None:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        return value

    @guarded
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        return [name for name, _ in self._meta.inodes.xattrs(inode)]

    @guarded
    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        _require_user(name)
        await self.room()
        row = self._namespace.get(inode)
        others = [pair for pair in self._meta.inodes.xattrs(inode) if pair[0] != name]
        if len(encode_xattrs([*others, (name, value)])) > XATTR_LIMIT:
            raise OSError(errno.E2BIG, "extended attributes do not fit an object's metadata")
        self._namespace.set_xattr(row, name, value)

    @guarded
    @once
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        _require_user(name)
        if not self._namespace.remove_xattr(self._namespace.get(inode), name):
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    # -- files --------------------------------------------------------------------------------

    @guarded
    @once
    async def create(
        self,
        parent_inode: int,
        name: bytes,
        mode: int,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        handle, row = await self._files.create(parent_inode, name, mode, flags, _caller(ctx))
        self._on_created(parent_inode, name)
        return self._opened(handle), self._entry(row)

    @guarded
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        await self.before_open(inode, flags)
        return self._opened(await self._files.open(inode, flags))

    def _opened(self, handle: Handle) -> pyfuse3.FileInfo:
        keep = self._announce(handle)
        fh = pyfuse3.FileHandleT(handle.fh)
        return pyfuse3.FileInfo(fh=fh, direct_io=handle.direct, keep_cache=keep)

    @guarded
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return cast("bytes", await self._files.read(fh, off, size))  # any buffer will do

    @guarded
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._files.write(fh, off, buf)

    @guarded
    async def flush(self, fh: int) -> None:
        """Not the last close: a forked child's exit sends one while its parent writes on."""
        await self._files.closing(fh)

    @guarded
    async def release(self, fh: int) -> None:
        self._files.release(fh)

    @guarded
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._files.fsync(fh)


async def _at_once(inode: int, flags: int) -> None:
    """Nothing has to be done before."""


def _no_request() -> int:
    return 0


class _Durations(defaultdict[str, Callable[[float], None]]):
    """Observer of each operation, made at its first use."""

    def __init__(self, make: Callable[[str], Callable[[float], None]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, op: str) -> Callable[[float], None]:
        self[op] = observe = self._make(op)
        return observe


def _caller(ctx: pyfuse3.RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid)


def _given_times() -> tuple[bool, bool]:
    """Without a tap nobody tells: a time of now looks like one that was given."""
    return False, False


def _names_owner_or_mode(fields: pyfuse3.SetattrFields) -> bool:
    return bool(fields.update_mode or fields.update_uid or fields.update_gid)


def _is_empty(fields: pyfuse3.SetattrFields) -> bool:
    """Whether nothing is to be set: chown(-1, -1), or what the kernel sends before somebody without
    CAP_FSETID writes to a file with set-user-id. Either takes that away, and is a change."""
    wanted = (
        fields.update_size, fields.update_mode, fields.update_uid, fields.update_gid,
        fields.update_atime, fields.update_mtime, fields.update_ctime,
    )  # fmt: skip
    return not any(wanted)


def _require_user(name: bytes) -> None:
    if name.startswith(PREFIX):
        raise OSError(errno.EPERM, "these attributes are read-only")
    if not name.startswith(_USER):
        raise OSError(errno.EOPNOTSUPP, "only user attributes")
