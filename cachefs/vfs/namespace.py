"""Names: lookup, directories, links, renames, attributes.

Each mutation is one transaction that changes inodes and dentries and queues its effects. Checks
come first, so that what fails changes nothing. Permission checks are the kernel's
(default_permissions).
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass

from cachefs.errors import StoreError
from cachefs.failpoints import Change, Point, reach
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, InodeRow
from cachefs.model.names import KEY_LIMIT, NAME_LIMIT, decode_name, is_reserved
from cachefs.vfs.attributes import ROOT, Attributes
from cachefs.vfs.clock import now_ns
from cachefs.vfs.intent import is_creating
from cachefs.vfs.remote import RemoteView
from cachefs.vfs.views import AsListed, Views

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
SYMLINK_LIMIT = 4095
_GONE_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    uid: int
    gid: int
    pid: int = 0


class Namespace(Attributes):
    """The tree of names of one mount."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        remote: RemoteView,
        *,
        prefix_bytes: int,
        uid: int,
        gid: int,
    ) -> None:
        """`prefix_bytes`: length of the store's prefix, which counts towards a key's limit; `uid`,
        `gid`: owner of a directory that needs no marker of its own."""
        super().__init__(meta, queue, remote)
        self._key_limit = KEY_LIMIT - prefix_bytes
        self._owner = (uid, gid)
        self.views: Views = AsListed()
        """Keeps what others do in the bucket in view."""
        self.on_unlinked: Callable[[int], None] = lambda ino: None
        """Called when an inode lost its last name."""
        self.is_open_directory: Callable[[int], bool] = lambda ino: False
        """Whether the kernel holds a handle of a directory."""

    def make_root(self) -> None:
        """The root directory, at the first mount of a cache."""
        if self._meta.inodes.get(ROOT) is None:
            now = now_ns()
            uid, gid = self._owner
            self._meta.inodes.add(
                InodeRow(ROOT, stat.S_IFDIR | 0o755, uid, gid, 2, 4096, now, now, now)
            )

    # -- looking ------------------------------------------------------------------------------

    def directory(self, ino: int) -> InodeRow:
        """ENOTDIR when it is something else."""
        row = self.get(ino)
        if not stat.S_ISDIR(row.mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return row

    async def lookup(self, parent: int, name: bytes, pid: int = 0) -> InodeRow:
        """The inode that `name` names. ENOENT; while the store would have to be asked and cannot,
        ENOENT for a caller (`pid`) that is about to make the name, and what the store says else.
        """
        if name in (b".", b".."):
            return self._dots(parent, name)
        if len(name) > NAME_LIMIT:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        row = self._meta.inodes.lookup(parent, name)
        if row is None:
            try:
                await self._listed_for(parent, name)
            except StoreError:
                if not is_creating(pid):
                    raise
            row = self._meta.inodes.lookup(parent, name)
        # A directory seldom becomes another; what it holds is asked of it.
        if self.views.is_old(parent) and not (row is not None and stat.S_ISDIR(row.mode)):
            row = await self._renewed(parent, name, pid)
        if row is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not row.attrs_known:
            entry = self._meta.dentries.get(parent, name)
            await self._remote.know_next(parent, entry.id if entry is not None else 0, row)
        return row

    async def _renewed(self, parent: int, name: bytes, pid: int) -> InodeRow | None:
        """As a new listing has it, but for those who make the name and need to wait for nothing."""
        if not is_creating(pid):
            await self.views.renew(parent)
        return self._meta.inodes.lookup(parent, name)

    def _dots(self, parent: int, name: bytes) -> InodeRow:
        if name == b"." or parent == ROOT:
            return self.directory(parent)
        names = self._meta.dentries.of_inode(parent)
        return self.directory(names[0].parent if names else parent)

    async def _listed_for(self, parent: int, name: bytes) -> None:
        directory = self.directory(parent)
        if directory.listed_ns is None and not self._hidden(parent, name):
            await self._remote.ensure_listed(directory)

    def _hidden(self, parent: int, name: bytes) -> bool:
        return parent == ROOT and is_reserved(name.decode("utf-8", "replace") + "/")

    async def list_directory(self, ino: int) -> None:
        """Make sure that everything in the bucket is known before a directory is read."""
        await self._remote.ensure_listed(self.directory(ino))
        if self.views.is_old(ino):
            await self.views.renew(ino)

    async def begin_listing(self, ino: int) -> None:
        """As `list_directory`, for who reads the entries from the first one on: those that were
        never listed are asked for as they are read (`entries`)."""
        if self.directory(ino).listed_ns is not None and self.views.is_old(ino):
            await self.views.renew(ino)

    async def entries(self, ino: int, after: int, limit: int) -> list[tuple[int, bytes, InodeRow]]:
        """Up to `limit` entries with cookies above `after`, as (cookie, name, inode).

        Cookies are dentry numbers: they stay valid whatever comes and goes in between, and what is
        listed later has higher ones.
        """
        while True:
            directory = self.directory(ino)
            rows = self._meta.inodes.children(ino, after, limit)
            if len(rows) >= limit or directory.listed_ns is not None:
                break
            await self._remote.list_more(directory)
        return rows

    async def known_entries(
        self, ino: int, after: int, limit: int
    ) -> list[tuple[int, bytes, InodeRow]]:
        """As `entries`, of which no symlink is taken for a file."""
        rows = await self.entries(ino, after, limit)
        await self._remote.know_all(row for _, _, row in rows)
        return rows

    # -- checks -------------------------------------------------------------------------------

    def check_new_name(self, parent: int, name: bytes, below: int = 0) -> str:
        """The path that `name` in `parent` would have; `below`: bytes of the longest path under it.

        EILSEQ, ENAMETOOLONG, EPERM (reserved).
        """
        text = decode_name(name)
        if self._hidden(parent, name):
            raise OSError(errno.EPERM, "this name is reserved")
        base = self._meta.dentries.directory_path(parent).decode()
        path = f"{base}/{text}" if base else text
        # One byte is kept for the slash of a directory's marker.
        if len(path.encode()) + (below + 1 if below else 0) + 1 > self._key_limit:
            raise OSError(errno.ENAMETOOLONG, "the object key would be longer than S3 allows")
        return path

    def name_room(self, parent: int) -> int:
        """Bytes that a name in directory `parent` may have."""
        base = self._meta.dentries.directory_path(parent)
        return min(NAME_LIMIT, self._key_limit - len(base) - bool(base) - 1)

    def _add_dentry(self, parent: int, name: bytes, ino: int) -> int:
        try:
            return self._meta.dentries.add(parent, name, ino)
        except sqlite3.IntegrityError:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST)) from None

    def require(self, parent: int, name: bytes) -> DentryRow:
        """The entry. ENOENT when there is none."""
        dentry = self._meta.dentries.get(parent, name)
        if dentry is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return dentry

    # -- making -------------------------------------------------------------------------------

    def new_inode(self, parent: InodeRow, mode: int, caller: Caller) -> InodeRow:
        """A row for a new inode in `parent`, not yet stored; set-gid directories hand on."""
        gid = caller.gid
        if parent.mode & stat.S_ISGID:
            gid = parent.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        now = now_ns()
        is_dir = stat.S_ISDIR(mode)
        return InodeRow(
            0, mode, caller.uid, gid, 2 if is_dir else 1, 4096 if is_dir else 0, now, now, now,
            listed_ns=time.time_ns() if is_dir else None,
        )  # fmt: skip

    def link_new(self, parent: int, name: bytes, row: InodeRow) -> DentryRow:
        """Store a new inode under a new name. Inside a transaction."""
        self._meta.inodes.add(row)
        dentry = self._add_dentry(parent, name, row.ino)
        self._meta.inodes.touch_directory(parent, now_ns(), int(stat.S_ISDIR(row.mode)))
        return DentryRow(dentry, parent, name, row.ino)

    async def prepare_create(self, parent: int, name: bytes) -> tuple[InodeRow, str]:
        """What can refuse a new name, before anything changes, but that it is taken; returns the
        directory and the path."""
        directory = self.directory(parent)
        if directory.nlink == 0:
            raise OSError(errno.ENOENT, "the directory was removed")
        path = self.check_new_name(parent, name)
        return directory, path

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> InodeRow:
        """A new directory."""
        directory, _ = await self.prepare_create(parent, name)
        row = self.new_inode(directory, stat.S_IFDIR | stat.S_IMODE(mode), caller)
        with self._meta.transaction(Change.MKDIR):
            dentry = self.link_new(parent, name, row)
            self._queue.publish(dentry, None, 0)
        return row

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> InodeRow:
        """A new symbolic link to `target`, kept verbatim."""
        if len(target) > SYMLINK_LIMIT:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        directory, _ = await self.prepare_create(parent, name)
        row = self.new_inode(directory, stat.S_IFLNK | 0o777, caller)
        row.target, row.size = target, len(target)
        with self._meta.transaction(Change.SYMLINK):
            dentry = self.link_new(parent, name, row)
            self._queue.publish(dentry, None, len(target), symlink=True)
        return row

    async def link(self, ino: int, parent: int, name: bytes) -> InodeRow:
        """A further name for a file."""
        row = self.get(ino)
        if stat.S_ISDIR(row.mode):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        if row.nlink == 0:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        await self.prepare_create(parent, name)
        with self._meta.transaction(Change.LINK):
            self._meta.inodes.add_link(ino, 1, now_ns())
            dentry = self._add_dentry(parent, name, ino)
            self._meta.inodes.touch_directory(parent, now_ns())
            self._publish_link(DentryRow(dentry, parent, name, ino), row)
        return self.get(ino)

    def _publish_link(self, dentry: DentryRow, row: InodeRow) -> None:
        gen = self._meta.generations.get(row.gen) if row.gen is not None else None
        if gen is not None and gen.state == "open":
            return  # Sealing publishes it under every name.
        self._queue.publish(
            dentry, gen.gen if gen else None, row.size, symlink=row.target is not None
        )

    # -- removing -----------------------------------------------------------------------------

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name. ENOENT, EISDIR."""
        dentry = self.require(parent, name)
        row = self.get(dentry.ino)
        if stat.S_ISDIR(row.mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        with self._meta.transaction(Change.UNLINK):
            self._queue.removed(dentry.id)
            self._drop_name(dentry)
            self._meta.inodes.touch_directory(parent, now_ns())
            self._keep_directory(parent)

    def _drop_name(self, dentry: DentryRow) -> None:
        """Remove a non-directory's entry and, with its last one, the inode."""
        self._meta.dentries.remove(dentry.id)
        if self._meta.inodes.add_link(dentry.ino, -1, now_ns()) == 0:
            self.on_unlinked(dentry.ino)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. ENOENT, ENOTDIR, ENOTEMPTY."""
        dentry = self.require(parent, name)
        self.directory(dentry.ino)
        if self._meta.dentries.has_children(dentry.ino):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        now = now_ns()
        with self._meta.transaction(Change.RMDIR):
            self._remove_directory(dentry)
            self._meta.inodes.touch_directory(parent, now, -1)
            self._keep_directory(parent)

    def _remove_directory(self, dentry: DentryRow) -> None:
        self._queue.removed(dentry.id)
        self._meta.dentries.remove(dentry.id, dentry.ino)
        self._drop_directory(dentry.ino)

    def _drop_directory(self, ino: int) -> None:
        """A directory that lost its name lives on, empty, while it is open."""
        if self.is_open_directory(ino):
            self._meta.inodes.set_links(ino, 0, now_ns())
        else:
            self._meta.inodes.remove(ino)

    def directory_released(self, ino: int) -> None:
        """The last handle of a directory is gone."""
        row = self._meta.inodes.get(ino)
        if row is not None and row.nlink == 0:
            self._meta.inodes.remove(ino)

    def _keep_directory(self, ino: int) -> None:
        """An empty directory exists in the bucket only by its marker."""
        if ino == ROOT or self._meta.dentries.has_children(ino):
            return
        for dentry in self._meta.dentries.of_inode(ino):
            key = self._queue.key_of(dentry)
            if all(row.key != key for row in self._meta.objects.of_dentry(dentry.id)):
                self._queue.publish(dentry, None, 0)

    def vanished(self, entry: DentryRow) -> None:
        """Somebody else took it out of the bucket: it goes, and nothing is published. Who has it
        open keeps it. Inside a transaction."""
        self.gone[entry.ino] = None
        while len(self.gone) > _GONE_REMEMBERED:
            del self.gone[next(iter(self.gone))]
        is_dir = stat.S_ISDIR(self.get(entry.ino).mode)
        if is_dir:
            self._meta.dentries.remove(entry.id, entry.ino)
            self._drop_directory(entry.ino)
        else:
            self._drop_name(entry)
        self._meta.inodes.touch_directory(entry.parent, now_ns(), -int(is_dir))

    # -- renaming -----------------------------------------------------------------------------

    async def before_rmdir(self, parent: int, name: bytes) -> None:
        """A directory that was never listed may only look empty."""
        row = self._meta.inodes.lookup(parent, name)
        if row is not None and stat.S_ISDIR(row.mode):
            await self._remote.ensure_listed(row)

    async def before_rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes
    ) -> None:
        """List what a rename needs to know: a directory moves with all that the bucket has below,
        and replaces only an empty one."""
        row = self._meta.inodes.lookup(parent, name)
        if row is not None and stat.S_ISDIR(row.mode):
            await self.list_tree(row)
        await self.before_rmdir(new_parent, new_name)
        reach(Point.RENAME_AFTER_LISTING)

    async def list_tree(self, directory: InodeRow) -> None:
        """Know all that the bucket holds below a directory."""
        await self._remote.ensure_listed(directory)
        after = 0
        while True:
            children = self._meta.inodes.children(directory.ino, after, 1000)
            for _, _, row in children:
                if stat.S_ISDIR(row.mode):
                    await self.list_tree(row)
            if len(children) < 1000:
                return
            after = children[-1][0]

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename in all its forms; errors as rename(2). EINVAL for flags that are unknown."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == 3:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        moved = self.require(parent, name)
        self.directory(new_parent)
        target = self._meta.dentries.get(new_parent, new_name)
        if flags & RENAME_EXCHANGE:
            self._exchange(moved, self.require(new_parent, new_name))
            return
        if target is not None and flags & RENAME_NOREPLACE:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._check_move(moved, new_parent, new_name)
        if target is not None and target.ino == moved.ino:
            return  # Two names of one file: POSIX has rename do nothing.
        if target is not None:
            self._check_replace(moved, target)
        self._move(moved, target, new_parent, new_name)

    def _check_move(self, moved: DentryRow, new_parent: int, new_name: bytes) -> None:
        below = 0
        if stat.S_ISDIR(self.get(moved.ino).mode):
            if self._meta.dentries.is_below(new_parent, moved.ino):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            below = self._meta.dentries.longest_below(moved.ino)
        self.check_new_name(new_parent, new_name, below)

    def _check_replace(self, moved: DentryRow, target: DentryRow) -> None:
        moved_is_dir = stat.S_ISDIR(self.get(moved.ino).mode)
        target_is_dir = stat.S_ISDIR(self.get(target.ino).mode)
        if moved_is_dir and not target_is_dir:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if target_is_dir and not moved_is_dir:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target_is_dir and self._meta.dentries.has_children(target.ino):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    def _move(
        self, moved: DentryRow, target: DentryRow | None, new_parent: int, new_name: bytes
    ) -> None:
        now = now_ns()
        is_dir = stat.S_ISDIR(self.get(moved.ino).mode)
        with self._meta.transaction(Change.RENAME):
            replaced_dir = self._drop_target(target)
            self._meta.dentries.move(moved.id, new_parent, new_name)
            here = DentryRow(moved.id, new_parent, new_name, moved.ino)
            self._queue.renamed(here, replaced=target)
            self._meta.inodes.add_link(moved.ino, 0, now_ns())
            crossing = int(is_dir and moved.parent != new_parent)
            self._meta.inodes.touch_directory(moved.parent, now, -crossing)
            self._meta.inodes.touch_directory(new_parent, now, crossing - replaced_dir)
            self._keep_directory(moved.parent)

    def _drop_target(self, target: DentryRow | None) -> int:
        """Remove the entry that is renamed over; 1 when it was a directory."""
        if target is None:
            return 0
        if stat.S_ISDIR(self.get(target.ino).mode):
            self._meta.dentries.remove(target.id, target.ino)
            self._drop_directory(target.ino)
            return 1
        self._drop_name(target)
        return 0

    def _exchange(self, one: DentryRow, other: DentryRow) -> None:
        if one.id == other.id:
            return
        rows = self.get(one.ino), self.get(other.ino)
        self._check_exchange(one, other, rows)
        now = now_ns()
        with self._meta.transaction(Change.EXCHANGE):
            self._meta.dentries.swap(one, other)
            self._queue.exchanged(
                DentryRow(one.id, other.parent, other.name, one.ino),
                DentryRow(other.id, one.parent, one.name, other.ino),
            )
            delta = int(stat.S_ISDIR(rows[1].mode)) - int(stat.S_ISDIR(rows[0].mode))
            same = one.parent == other.parent
            self._meta.inodes.touch_directory(one.parent, now, 0 if same else delta)
            self._meta.inodes.touch_directory(other.parent, now, 0 if same else -delta)
            for ino in (one.ino, other.ino):
                self._meta.inodes.add_link(ino, 0, now_ns())

    def _check_exchange(
        self, one: DentryRow, other: DentryRow, rows: tuple[InodeRow, InodeRow]
    ) -> None:
        directories = [stat.S_ISDIR(row.mode) for row in rows]
        pairs = ((one, other, rows[0]), (other, one, rows[1]))
        for (moved, place, row), is_dir in zip(pairs, directories, strict=True):
            if not is_dir and any(directories) and self._queue.may_show(moved.id):
                # A store of files could show what is below the name only once the file has gone.
                raise OSError(errno.EINVAL, "what the bucket holds cannot be exchanged")
            if is_dir and self._meta.dentries.is_below(place.parent, moved.ino):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            below = self._meta.dentries.longest_below(moved.ino) if is_dir else 0
            self.check_new_name(place.parent, place.name, below)
            if not self._can_exchange(moved, row):
                raise OSError(errno.EINVAL, "what the bucket holds cannot be exchanged")

    def _can_exchange(self, moved: DentryRow, row: InodeRow) -> bool:
        """The bucket cannot swap two keys: both are uploaded anew, so the bytes must be here."""
        if stat.S_ISDIR(row.mode):
            below = self._meta.dentries.below(moved.ino)
            return not any(self._meta.objects.of_dentry(each) for each in (moved.id, *below))
        if not self._meta.objects.of_dentry(moved.id) or row.target is not None:
            return True
        gen = self._meta.generations.get(row.gen) if row.gen is not None else None
        return gen is not None and gen.present is None
