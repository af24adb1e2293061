"""Directories and files that so far exist only in the bucket.

A directory is listed when something in it is first asked for; from then on the database answers,
misses included, without a request, and `refreshing` keeps up with the bucket. An entry from a
listing has a name, a size and a time; owner, mode and the rest need a request for its metadata,
made when the entry is first looked at. Whether a small object stands for a file or a symlink is not
known before, so who reads a directory is told neither (`may_be_symlink`).

Whatever the bucket says may be hostile: names that no filesystem could have are passed over, and a
key that is a directory's name as well is hidden behind the directory.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import trio

from cachefs.cache.filler import Fill
from cachefs.errors import NotFound, StoreError
from cachefs.failpoints import Change, Point, reach
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, InodeRow, ObjectRow
from cachefs.model import objectmeta
from cachefs.model.extents import ExtentSet
from cachefs.model.names import NAME_LIMIT, is_reserved

SYMLINK_MAX = 4095
"""Bytes in a symlink's target (PATH_MAX); larger objects are no symlinks."""

_HEADS_AT_ONCE = 32
_AHEAD = 64
"""Entries that are asked for together by who goes through a directory."""
_STEP = 4
"""Numbers that its entries may lie apart."""
_WALKS = 1000
_BLOCK = 512
_RESUMED = 30.0
"""Seconds after which a listing that nobody went on with is begun anew."""
_HOPELESS = 1.0
"""Seconds for which a failed listing answers for others."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object as a listing or a request for its metadata shows it; key below the prefix."""

    key: str
    size: int
    etag: str
    mtime_ns: int
    crc64: int | None = None
    metadata: tuple[tuple[str, str], ...] | None = None


class RemoteReader(Protocol):
    """What the filesystem may ask of the bucket. Raises StoreError."""

    async def list_page(
        self, prefix: str, token: str | None
    ) -> tuple[Sequence[RemoteObject], Sequence[str], str | None]:
        """(objects, common prefixes, next token) one level below `prefix`."""

    async def head(self, key: str) -> RemoteObject:
        """One object with its metadata. Raises NotFound."""

    async def read(self, key: str, limit: int) -> bytes:
        """The first `limit` bytes of an object."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object with, if it stands for a symlink, what that points to."""

    item: RemoteObject
    target: bytes | None


@dataclass(slots=True)
class _Begun:
    """The listing of a directory of which some pages are known."""

    prefix: str
    began_ns: int
    token: str | None = None
    valid_until: float = 0.0


class RemoteView:
    """Brings what the bucket holds into the namespace."""

    def __init__(
        self, meta: Meta, reader: RemoteReader, *, uid: int, gid: int, umask: int = 0o022
    ) -> None:
        """`uid`, `gid`, `umask`: owner and mode of objects that name none."""
        self._meta = meta
        self._reader = reader
        self._uid = uid
        self._gid = gid
        self._umask = umask
        self._listing: dict[int, trio.Lock] = {}
        self._begun: dict[int, _Begun] = {}
        self._looked_at: dict[int, int] = {}
        """Directory -> the entry in it that was asked for last."""
        self._trouble: StoreError | None = None
        self._trouble_until = 0.0
        self.while_wanted: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around what is waited for: EINTR when who asks is being killed."""

    # -- directories --------------------------------------------------------------------------

    async def ensure_listed(self, directory: InodeRow) -> None:
        """Return once the directory's entries in the bucket are in the database.

        EIO and the like when the store cannot be asked.
        """
        row: InodeRow | None = directory
        while row is not None and row.listed_ns is None:
            await self.list_more(row)
            row = self._meta.inodes.get(directory.ino)

    async def list_more(self, directory: InodeRow) -> None:
        """Return once more of a directory's entries are in the database, or all are. Who reads it
        from its beginning gets what is there before the rest was asked for.

        ENOENT: it is gone. EIO and the like when the store cannot be asked.
        """
        lock = self._listing.setdefault(directory.ino, trio.Lock())
        with self.while_wanted():
            async with lock:
                current = self._meta.inodes.get(directory.ino)
                if current is None:
                    raise OSError(errno.ENOENT, "the directory is gone")
                if current.listed_ns is None:
                    await self._list_unless_hopeless(current)
        if directory.ino not in self._begun:
            self._listing.pop(directory.ino, None)

    async def _list_unless_hopeless(self, directory: InodeRow) -> None:
        """A store that was out of reach a moment ago is not waited for again by every lookup."""
        if self._trouble is not None and trio.current_time() < self._trouble_until:
            raise self._trouble
        try:
            await self._list(directory)
        except StoreError as error:
            self._begun.pop(directory.ino, None)
            self._trouble, self._trouble_until = error, trio.current_time() + _HOPELESS
            raise
        self._trouble = None

    async def _list(self, directory: InodeRow) -> None:
        """One page, the one after the last."""
        path = self._meta.dentries.directory_path(directory.ino).decode()
        prefix = path + "/" if path else ""
        begun = self._begun.get(directory.ino)
        if begun is None or begun.prefix != prefix or trio.current_time() > begun.valid_until:
            begun = _Begun(prefix, time.time_ns())
        objects, prefixes, begun.token = await self._reader.list_page(prefix, begun.token)
        self._begun.pop(directory.ino, None)
        reach(Point.LIST_AFTER_PAGE)
        with self._meta.transaction(Change.LIST):
            for each in prefixes:
                self.add_directory(directory.ino, prefix, each)
            for item in objects:
                self.add_object(directory.ino, prefix, item)
        if begun.token is not None:
            begun.valid_until = trio.current_time() + _RESUMED
            self._begun[directory.ino] = begun
            return
        self._meta.inodes.set_listed(directory.ino, begun.began_ns)
        reach(Point.LIST_AFTER_MARK)

    def add_directory(self, parent: int, prefix: str, key: str) -> bool:
        """Show a common prefix as a directory, if its name is free. Inside a transaction."""
        name = name_below(prefix, key.rstrip("/"))
        if name is None:
            return False
        existing = self._meta.dentries.get(parent, name)
        if existing is not None:
            inode = self._meta.inodes.get(existing.ino)
            if inode is None or stat.S_ISDIR(inode.mode) or not self._is_remote(existing):
                return False
            self._hide(existing)
        now = time.time_ns()
        row = InodeRow(
            0,
            stat.S_IFDIR | (0o777 & ~self._umask),
            self._uid,
            self._gid,
            2,
            4096,
            now,
            now,
            now,
            attrs_known=0,
        )
        self._meta.inodes.add(row)
        self._meta.dentries.add(parent, name, row.ino)
        self._meta.inodes.touch_directory(parent, now, 1)
        return True

    def _is_remote(self, dentry: DentryRow) -> bool:
        inode = self._meta.inodes.get(dentry.ino)
        return inode is not None and inode.gen is None and not stat.S_ISDIR(inode.mode)

    def _hide(self, dentry: DentryRow) -> None:
        """The bucket holds both `foo` and `foo/bar`: only the directory can be shown."""
        self._meta.dentries.remove(dentry.id)
        self._meta.inodes.remove(dentry.ino)
        for row in self._meta.objects.of_dentry(dentry.id):
            self._meta.objects.remove(row.key)

    def add_object(self, parent: int, prefix: str, item: RemoteObject) -> InodeRow | None:
        """Show an object as a file, if its name is free: the new inode. Inside a transaction."""
        if item.key == prefix:
            self._add_marker(parent, item)
            return None
        name = name_below(prefix, item.key)
        if name is None or self._meta.objects.get(item.key) is not None:
            return None
        if self._meta.dentries.get(parent, name) is not None:
            return None
        row = InodeRow(
            0, stat.S_IFREG | (0o666 & ~self._umask), self._uid, self._gid, 1, item.size,
            item.mtime_ns, item.mtime_ns, item.mtime_ns,
            blocks=-(-item.size // _BLOCK), attrs_known=0,
        )  # fmt: skip
        self._meta.inodes.add(row)
        dentry = self._meta.dentries.add(parent, name, row.ino)
        self._meta.objects.put(object_row(item, dentry))
        return row

    def _add_marker(self, directory: int, item: RemoteObject) -> None:
        """The directory's own object, `dir/`."""
        names = self._meta.dentries.of_inode(directory)
        if names and self._meta.objects.get(item.key) is None:
            self._meta.objects.put(object_row(item, names[0].id))

    async def look(self, key: str) -> Found | None:
        """What the store holds under a key now; None when there is nothing. StoreError."""
        try:
            item = await self._reader.head(key)
        except NotFound:
            return None
        return Found(item, await self._target(item))

    def replace(self, row: InodeRow, found: Found) -> None:
        """A file is what the store holds from now on, nothing of its own is left."""
        row.gen, row.mtime_ns, row.ctime_ns = None, found.item.mtime_ns, time.time_ns()
        self._apply(row, found.item, found.target)

    def describe(self, row: InodeRow, found: Found) -> None:
        """What a request for an object's metadata has told of a file that a listing showed."""
        self._apply(row, found.item, found.target)

    async def page(
        self, prefix: str, token: str | None
    ) -> tuple[Sequence[RemoteObject], Sequence[str], str | None]:
        """A piece of a directory's listing. Raises StoreError."""
        return await self._reader.list_page(prefix, token)

    def appear(self, parent: int, found: Found) -> None:
        """Show an object in the directory that it belongs to, if its name is free."""
        path = self._meta.dentries.directory_path(parent).decode()
        with self._meta.transaction(Change.APPEAR):
            self.add_object(parent, path + "/" if path else "", found.item)

    # -- attributes ---------------------------------------------------------------------------

    async def know_all(self, rows: Iterable[InodeRow]) -> None:
        """Ask for the metadata of those that may be symlinks, some at a time."""
        with self.while_wanted():
            await self._know_each(row for row in rows if may_be_symlink(row))

    async def know_next(self, parent: int, dentry: int, row: InodeRow) -> None:
        """As `know`, for an entry that somebody looks at by name. Who goes through a directory
        entry by entry (`ls -l`) finds the next ones known."""
        before, self._looked_at[parent] = self._looked_at.pop(parent, None), dentry
        while len(self._looked_at) > _WALKS:
            del self._looked_at[next(iter(self._looked_at))]
        if before is None or not before < dentry <= before + _STEP:
            await self.know(row)
            return
        entries = self._meta.inodes.children(parent, dentry - 1, _AHEAD)
        with self.while_wanted():
            others = (other for _, _, other in entries if other.ino != row.ino)
            await self._know_each([row, *others])
        self._looked_at[parent] = max(dentry, entries[-1][0] if entries else 0)

    async def _know_each(self, rows: Iterable[InodeRow]) -> None:
        unknown = [row for row in rows if not row.attrs_known]
        limit = trio.CapacityLimiter(_HEADS_AT_ONCE)

        async def one(row: InodeRow) -> None:
            async with limit:
                await self.know(row)

        async with trio.open_nursery() as nursery:
            for row in unknown:
                nursery.start_soon(one, row)

    async def know(self, row: InodeRow) -> None:
        """Fill in mode, owner, times and attributes from the object's metadata.

        Keeps what the listing said when the store cannot be asked now: a later look asks again.
        """
        if row.attrs_known:
            return
        try:
            with self.while_wanted():
                item = await self._head(row)
                target = await self._target(item) if item is not None else None
        except StoreError:
            return
        current = self._meta.inodes.get(row.ino)
        if current is not None and not current.attrs_known:
            self._apply(current, item, target)
        if current is not None:
            _assign(row, current)

    async def _head(self, row: InodeRow) -> RemoteObject | None:
        key = self._key(row)
        if key is None:
            return None
        try:
            return await self._reader.head(key)
        except NotFound:
            return None

    def _key(self, row: InodeRow) -> str | None:
        if stat.S_ISDIR(row.mode):
            return self._meta.dentries.directory_path(row.ino).decode() + "/"
        known = self._meta.objects.of_inode(row.ino)
        return known[0].key if known else None

    async def _target(self, item: RemoteObject) -> bytes | None:
        attributes = objectmeta.decode(dict(item.metadata or ()))
        if attributes.mode is None or not stat.S_ISLNK(attributes.mode):
            return None
        target = await self._reader.read(item.key, SYMLINK_MAX + 1)
        return target if 0 < len(target) <= SYMLINK_MAX and b"\0" not in target else None

    def _apply(self, row: InodeRow, item: RemoteObject | None, target: bytes | None) -> None:
        row.attrs_known = 1
        with self._meta.transaction(Change.KNOW):
            if item is not None:
                self._apply_metadata(row, item, target)
            self._meta.inodes.save(row)

    def _apply_metadata(self, row: InodeRow, item: RemoteObject, target: bytes | None) -> None:
        attributes = objectmeta.decode(dict(item.metadata or ()))
        is_dir = stat.S_ISDIR(row.mode)
        if attributes.mode is not None:
            kind = stat.S_IFDIR if is_dir else stat.S_IFLNK if target else stat.S_IFREG
            row.mode = kind | stat.S_IMODE(attributes.mode)
        row.target = target
        row.uid = attributes.uid if attributes.uid is not None else row.uid
        row.gid = attributes.gid if attributes.gid is not None else row.gid
        if attributes.mtime_ns is not None:
            row.mtime_ns = attributes.mtime_ns
        for name, value in attributes.xattrs:
            self._meta.inodes.set_xattr(row.ino, name, value)
        known = self._meta.objects.get(item.key)
        dentry = known.dentry if known else None
        if dentry is None:
            names = self._meta.dentries.of_inode(row.ino)
            dentry = names[0].id if names else None
        self._meta.objects.put(object_row(item, dentry))
        if not is_dir:
            row.size = item.size
            row.blocks = 0 if target else -(-item.size // _BLOCK)

    # -- content ------------------------------------------------------------------------------

    def object_of(self, inode: InodeRow) -> ObjectRow:
        """The object that holds a file's bytes. EIO when none is known."""
        for row in self._meta.objects.of_inode(inode.ino):
            if not row.stale:
                return row
        raise OSError(errno.EIO, "no object is known to hold this file")

    def is_now(self, source: ObjectRow, gen: int) -> None:
        """Generation `gen` stands for the object's bytes, and for those of copies elsewhere."""
        if source.gen is not None:
            self._meta.warm.hand_on(source.gen, gen)
        source.gen = gen
        self._meta.objects.put(source)

    def fill(self, inode: InodeRow, path: str, present: bytes) -> Fill:
        """What the filler needs to bring the object's bytes into the cache file at `path`."""
        source = self.object_of(inode)
        return Fill(
            path=path, key=source.key, etag=source.etag, size=source.size,
            present=ExtentSet.unpack(present), crc64=source.crc64,
        )  # fmt: skip


def may_be_symlink(row: InodeRow) -> bool:
    """Whether only the object's metadata can tell what a listed entry is."""
    return not row.attrs_known and stat.S_ISREG(row.mode) and 0 < row.size <= SYMLINK_MAX


def name_below(prefix: str, key: str) -> bytes | None:
    """The name of a key's entry in the directory `prefix`; None if no filesystem could have it."""
    if not key.startswith(prefix) or is_reserved(key):
        return None
    name = key[len(prefix) :]
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return None
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        return None
    return raw if len(raw) <= NAME_LIMIT else None


def object_row(item: RemoteObject, dentry: int | None) -> ObjectRow:
    """What is known of an object that another program may have made, as the entry `dentry`."""
    return ObjectRow(
        item.key, dentry, item.etag, item.size, item.crc64, None, None, None, item.mtime_ns
    )


def _assign(row: InodeRow, source: InodeRow) -> None:
    for name in InodeRow.__slots__:
        setattr(row, name, getattr(source, name))
