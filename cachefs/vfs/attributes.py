"""Modes, owners, times and extended attributes of inodes; what changes is published in time."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from cachefs.failpoints import Change
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import InodeRow
from cachefs.vfs.clock import now_ns
from cachefs.vfs.intent import is_changing_owner
from cachefs.vfs.remote import RemoteView

ROOT = 1


class Attributes:
    """Inodes, whatever their names."""

    def __init__(self, meta: Meta, queue: EffectQueue, remote: RemoteView) -> None:
        self._meta = meta
        self._queue = queue
        self._remote = remote
        self.gone: dict[int, None] = {}
        """Inodes that others' changes of the bucket have removed lately."""

    def get(self, ino: int) -> InodeRow:
        """ENOENT when the inode is gone; ESTALE, upon which the kernel looks its name up again,
        when it went without the kernel's doing."""
        row = self._meta.inodes.get(ino)
        if row is None and ino in self.gone:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if row is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return row

    def set_attributes(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        ctime_ns: int | None = None,
    ) -> InodeRow:
        """Change what is given; `ctime_ns`: when that is, a time of `clock.now_ns`. Published
        objects get their new attributes in time."""
        row = self.get(ino)
        if mode is not None:
            row.mode = stat.S_IFMT(row.mode) | stat.S_IMODE(mode)
        if (uid is not None or gid is not None) and stat.S_ISREG(row.mode):
            row.mode = without_privileges(row.mode)
        row.uid = uid if uid is not None else row.uid
        row.gid = gid if gid is not None else row.gid
        row.atime_ns = atime_ns if atime_ns is not None else row.atime_ns
        row.mtime_ns = mtime_ns if mtime_ns is not None else row.mtime_ns
        row.ctime_ns = ctime_ns if ctime_ns is not None else now_ns()
        row.attrs_known = 1
        with self._meta.transaction(Change.SETATTR):
            self._meta.inodes.save(row)
            if atime_ns is None or mtime_ns is not None or mode is not None or uid is not None:
                self.publish_attributes(row)
        return row

    def touch(self, ino: int, uid: int, pid: int) -> None:
        """Change nothing but ctime and set-user-id: chown(-1, -1), or somebody without CAP_FSETID
        is about to write. EPERM for the former by `uid` (thread `pid`) on another's file."""
        row = self.get(ino)
        loses = stat.S_ISREG(row.mode) and without_privileges(row.mode) != row.mode
        if loses and uid not in (0, row.uid) and is_changing_owner(pid):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self.set_attributes(ino, uid=row.uid)

    def publish_attributes(self, row: InodeRow) -> None:
        """Queue the new attributes under every name that the bucket shows or will show."""
        if row.ino == ROOT:
            return
        gen = self._meta.generations.get(row.gen) if row.gen is not None else None
        if gen is not None and gen.state == "open":
            return  # They go out with the content.
        for dentry in self._meta.dentries.of_inode(row.ino):
            self._queue.publish(dentry, None, row.size, symlink=row.target is not None)

    async def know(self, row: InodeRow) -> None:
        """Complete a row that came from a listing."""
        await self._remote.know(row)

    def set_xattr(self, row: InodeRow, name: bytes, value: bytes) -> None:
        """Set an extended attribute; objects follow."""
        self._change_xattr(row, lambda: self._meta.inodes.set_xattr(row.ino, name, value))

    def remove_xattr(self, row: InodeRow, name: bytes) -> bool:
        """Remove an extended attribute; False when there is none of that name."""
        if self._meta.inodes.get_xattr(row.ino, name) is None:
            return False
        self._change_xattr(row, lambda: self._meta.inodes.remove_xattr(row.ino, name))
        return True

    def _change_xattr(self, row: InodeRow, change: Callable[[], object]) -> None:
        row.ctime_ns = now_ns()
        with self._meta.transaction(Change.SETXATTR):
            change()
            self._meta.inodes.save(row)
            self.publish_attributes(row)

    def kill_privileges(self, ino: int) -> None:
        """A write by anybody clears set-user-id and set-group-id (HANDLE_KILLPRIV_V2)."""
        row = self.get(ino)
        mode = without_privileges(row.mode)
        if mode != row.mode:
            row.mode, row.ctime_ns = mode, now_ns()
            self._meta.inodes.save(row)


def has_privileges(mode: int) -> bool:
    """Whether a mode has set-user-id or set-group-id."""
    return bool(mode & (stat.S_ISUID | stat.S_ISGID))


def without_privileges(mode: int) -> int:
    """A mode without set-user-id, and without set-group-id where that means privilege."""
    mode &= ~stat.S_ISUID
    if mode & stat.S_IXGRP:
        mode &= ~stat.S_ISGID
    return mode
