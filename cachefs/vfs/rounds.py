"""One more listing of a directory that is known already: what others have done to it since.

What is here and not in the bucket yet wins, always: an entry is left alone while it, its key or its
content has anything pending, is open for writing, or changed after the round began, since a listing
may be older than the change. A file that others replaced becomes a new inode under its name, so
that whoever has the old one open keeps the old bytes or gets ESTALE. What a listing does not show,
or shows with another etag, is asked for by its key before anything is done: only a 404 means that
it is gone. A directory is gone when a complete listing of it shows nothing at all and nothing is
left in it here.

Memory: eight bytes and a little for each entry of the directory while its round lasts.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import trio

from cachefs.failpoints import Change
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, InodeRow, ObjectRow
from cachefs.model.states import GenState
from cachefs.vfs.attributes import ROOT
from cachefs.vfs.namespace import Namespace
from cachefs.vfs.opened import OpenTable
from cachefs.vfs.remote import Found, RemoteObject, RemoteView, name_below

_BATCH = 1000
_LOOKS_AT_ONCE = 16

Changed = dict[int, list[bytes]]
"""Directory -> names that stand for something else than before."""


@dataclass(slots=True)
class _Round:
    """What one listing has shown so far."""

    ino: int
    prefix: str
    began_ns: int
    touched: set[str]
    """Keys that something happened to here since it began."""
    ours: set[str]
    """Those among them that the round itself has changed."""
    seen: set[int] = field(default_factory=set)
    """Hashes of the names that it shows."""
    doubtful: list[str] = field(default_factory=list)
    """Keys that are to be asked for."""
    is_empty: bool = True


class Rounds:
    """Takes over what the bucket shows."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        table: OpenTable,
        namespace: Namespace,
        remote: RemoteView,
    ) -> None:
        self._meta = meta
        self._queue = queue
        self._table = table
        self._namespace = namespace
        self._remote = remote
        self.hold: Callable[[int], AbstractContextManager[object]] = nullcontext
        """Entered for a directory: meanwhile only requests that are handled here change it."""
        self.on_change: Callable[[str], None] = lambda kind: None
        """Called with `appeared`, `replaced` or `vanished` for each entry."""

    async def run(self, ino: int) -> Changed:
        """List directory `ino` and take over what is new. Raises StoreError; what was taken over
        before that stays."""
        changed: Changed = {}
        await self._list(ino, changed, set())
        return changed

    async def _list(self, ino: int, changed: Changed, ours: set[str]) -> None:
        prefix = self._prefix(ino)
        if prefix is None:
            return
        with self.hold(ino), self._meta.objects.watched() as touched:
            this = _Round(ino, prefix, time.time_ns(), touched, ours)
            token: str | None = None
            while True:
                objects, prefixes, token = await self._remote.page(prefix, token)
                if self._prefix(ino) != prefix:
                    return  # It was renamed or removed meanwhile.
                self._merge(this, objects, prefixes, changed)
                if token is None:
                    break
            missing = self._missing(this)
            await self._look(this, changed)
            for folder in missing:
                await self._list(folder, changed, ours)
            self._end(this, changed)

    def _prefix(self, ino: int) -> str | None:
        row = self._meta.inodes.get(ino)
        if row is None or row.nlink == 0 or row.listed_ns is None:
            return None
        try:
            path = self._meta.dentries.directory_path(ino).decode()
        except LookupError:
            return None
        return path + "/" if path else ""

    # -- what is there ------------------------------------------------------------------------

    def _merge(
        self,
        this: _Round,
        objects: Sequence[RemoteObject],
        prefixes: Iterable[str],
        changed: Changed,
    ) -> None:
        known = self._meta.objects.among([item.key for item in objects])
        with self._meta.transaction(Change.ROUND_LISTING):
            for each in prefixes:
                self._merge_directory(this, each, changed)
            for item in objects:
                self._merge_object(this, item, known.get(item.key), changed)

    def _merge_directory(self, this: _Round, key: str, changed: Changed) -> None:
        this.is_empty = False
        name = name_below(this.prefix, key.rstrip("/"))
        if name is None:
            return
        this.seen.add(hash(name))
        entry = self._meta.dentries.get(this.ino, name)
        if entry is not None and (
            entry.ino in self._table.inodes or self._queue.of_dentry(entry.id)
        ):
            return
        if entry is None and self._is_leaving(this, key):
            return
        if self._remote.add_directory(this.ino, this.prefix, key):
            self._note(this.ino, name, "appeared", changed)

    def _is_leaving(self, this: _Round, prefix: str) -> bool:
        """Whether what the bucket shows below a prefix may be what was removed or moved here."""
        return self._meta.objects.any_below(prefix) or any(
            key.startswith(prefix) for key in this.touched
        )

    def _merge_object(
        self, this: _Round, item: RemoteObject, known: ObjectRow | None, changed: Changed
    ) -> None:
        this.is_empty = False
        name = name_below(this.prefix, item.key)
        if name is None:
            return
        this.seen.add(hash(name))
        if known is not None:
            if known.etag != item.etag and item.key not in this.touched:
                this.doubtful.append(item.key)
            return
        leaving = item.key in this.touched or self._queue.unpublish_of(item.key) is not None
        if not leaving and self._remote.add_object(this.ino, this.prefix, item) is not None:
            self._note(this.ino, name, "appeared", changed)

    # -- what is not --------------------------------------------------------------------------

    def _missing(self, this: _Round) -> list[int]:
        """Directories that the listing does not show; files become doubtful."""
        folders = []
        after = 0
        while children := self._meta.inodes.children(this.ino, after, _BATCH):
            after = children[-1][0]
            for dentry, name, row in children:
                if hash(name) in this.seen or self._queue.of_dentry(dentry):
                    continue
                if stat.S_ISDIR(row.mode):
                    folders.append(row.ino)
                else:
                    this.doubtful.append(this.prefix + name.decode())
        return [ino for ino in folders if self._may_be_gone(ino)]

    def _may_be_gone(self, ino: int) -> bool:
        """False for a directory with something in it that is not in the bucket yet."""
        children = self._meta.inodes.children(ino, 0, _BATCH)
        return not any(self._queue.of_dentry(dentry) for dentry, _, _ in children)

    def _end(self, this: _Round, changed: Changed) -> None:
        row = self._meta.inodes.get(this.ino)
        if row is None or self._prefix(this.ino) != this.prefix:
            return
        if this.is_empty and self._is_gone(this, row):
            self._remove_directory(this, changed)
        else:
            self._meta.inodes.set_listed(this.ino, this.began_ns)

    def _is_gone(self, this: _Round, row: InodeRow) -> bool:
        names = self._meta.dentries.of_inode(row.ino)
        return (
            row.ino != ROOT
            and not self._meta.dentries.has_children(row.ino)
            and not any(self._queue.of_dentry(name.id) for name in names)
            and not any(key.startswith(this.prefix) for key in this.touched - this.ours)
            and row.ino not in self._table.directories.values()
        )

    def _remove_directory(self, this: _Round, changed: Changed) -> None:
        this.ours.add(this.prefix)
        for name in self._meta.dentries.of_inode(this.ino):
            with self.hold(name.parent), self._meta.transaction(Change.ROUND_DIRECTORY):
                self._meta.objects.remove(this.prefix)
                self._namespace.vanished(name)
            self._note(name.parent, name.name, "vanished", changed)

    # -- what is to be asked for --------------------------------------------------------------

    async def _look(self, this: _Round, changed: Changed) -> None:
        failed: list[Exception] = []
        keys = iter(this.doubtful)

        async def look_at_some() -> None:
            for key in keys:
                await trio.lowlevel.checkpoint()  # there may be very many, and none to ask for
                if failed:
                    return
                if self._subject(this, key) is None:
                    continue
                try:
                    found = await self._remote.look(key)
                except Exception as error:
                    failed.append(error)
                    return
                self._settle(this, key, found, changed)

        async with trio.open_nursery() as nursery:
            for _ in range(_LOOKS_AT_ONCE):
                nursery.start_soon(look_at_some)
        if failed:
            raise failed[0]

    def _subject(self, this: _Round, key: str) -> tuple[ObjectRow, DentryRow] | None:
        """What is known under a key, if it is as the bucket showed it and nothing is to come."""
        row = self._meta.objects.get(key)
        if row is None or row.stale or not row.etag or row.dentry is None:
            return None
        entry = self._meta.dentries.by_id(row.dentry)
        if entry is None or entry.parent != this.ino or self._queue.key_of(entry) != key:
            return None
        return (row, entry) if self._is_settled(this, key, entry) else None

    def _is_settled(self, this: _Round, key: str, entry: DentryRow) -> bool:
        if key in this.touched or self._queue.unpublish_of(key) is not None:
            return False
        opened = self._table.inodes.get(entry.ino)
        if opened is not None and (opened.writers or opened.writing):
            return False
        gen = self._meta.generations.current(entry.ino)
        return not self._queue.of_dentry(entry.id) and (
            gen is None or gen.state == GenState.DURABLE
        )

    def _settle(self, this: _Round, key: str, found: Found | None, changed: Changed) -> None:
        subject = self._subject(this, key)
        if subject is None:
            return
        row, entry = subject
        if found is not None and found.item.etag == row.etag:
            return  # The listing was late.
        with self._meta.transaction(Change.ROUND_ENTRY):
            self._meta.objects.remove(key)
            self._namespace.vanished(entry)
            new = self._remote.add_object(this.ino, this.prefix, found.item) if found else None
            if found is not None and new is not None:
                self._remote.describe(new, found)
        this.ours.add(key)
        self._note(this.ino, entry.name, "vanished" if new is None else "replaced", changed)

    def _note(self, parent: int, name: bytes, kind: str, changed: Changed) -> None:
        changed.setdefault(parent, []).append(name)
        self.on_change(kind)
