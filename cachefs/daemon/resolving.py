"""What a person decided about a file that does not go on by itself.

- keep: our version is the one. A held file counts as closed, a refused one is tried again at once,
  a conflicting one takes the key from the other writer's object (which must not change meanwhile).
- discard: the store's version is the one; without any, the name goes.
- detach: the first half of publishing a conflicting file under another name. The key is the other
  writer's from now on, so that renaming our version away leaves their object alone.
"""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from cachefs.daemon.trouble import Troubles
from cachefs.errors import NotFound, UsageError
from cachefs.flush.flusher import Flusher
from cachefs.flush.queue import CONFLICTED, PENDING, EffectQueue
from cachefs.flush.recovery import Recovery
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, EffectRow, InodeRow
from cachefs.model.effects import EffectKind
from cachefs.model.states import TROUBLED, Event, GenState, advance
from cachefs.vfs.contents import Contents
from cachefs.vfs.namespace import Namespace
from cachefs.vfs.opened import OpenTable
from cachefs.vfs.remote import RemoteView, object_row


class Decision(StrEnum):
    """What is to become of our version."""

    KEEP = "keep"
    DISCARD = "discard"
    DETACH = "detach"


@dataclass(frozen=True, slots=True)
class Trouble:
    """One file that waits for a decision."""

    key: str
    state: str
    """`held`, `stalled`, `conflicted` or `superseded`."""
    reason: str


class Resolver:
    """Finds what is in trouble, and carries decisions out. On the trio thread."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        flusher: Flusher,
        recovery: Recovery,
        contents: Contents,
        namespace: Namespace,
        remote: RemoteView,
        table: OpenTable,
    ) -> None:
        self._meta = meta
        self._queue = queue
        self._flusher = flusher
        self._recovery = recovery
        self._contents = contents
        self._namespace = namespace
        self._remote = remote
        self._table = table
        self._troubles = Troubles(meta, queue)
        self.on_shown: Callable[[int], None] = lambda directory: None
        """Called with a directory in which an entry appeared."""
        self.on_changed: Callable[[int, bytes, int], Awaitable[None]] = _nothing
        """Awaited with directory, name and inode of an entry that is not what the kernel thinks."""

    def trouble(self, entry: DentryRow) -> Trouble | None:
        """Why an entry does not go on by itself; None when it does."""
        key = self._queue.key_of(entry)
        for effect in self._stuck(entry):
            return Trouble(key, self._troubles.word(effect) or "", effect.error or "")
        gen = self._meta.generations.current(entry.ino)
        if gen is not None and gen.state in (*TROUBLED, GenState.SUPERSEDED):
            return Trouble(key, str(gen.state), gen.error or "")
        return None

    async def decide(self, entry: DentryRow, decision: Decision) -> None:
        """Carry a decision out. Raises UsageError when the file is in use, StoreError, OSError."""
        if entry.ino in self._table.inodes:
            raise UsageError(f"{self._queue.key_of(entry)} is open: close it first")
        if decision is Decision.KEEP:
            await self._keep(entry)
        elif decision is Decision.DISCARD:
            await self._discard(entry)
        else:
            self._detach(entry)

    async def show(self, parent: int, key: str) -> None:
        """Let an object that the store holds appear under its name in directory `parent`."""
        found = await self._remote.look(key)
        if found is not None:
            self._remote.appear(parent, found)
            self.on_shown(parent)

    # -- keep ---------------------------------------------------------------------------------

    async def _keep(self, entry: DentryRow) -> None:
        stuck = self._stuck(entry)
        if any(effect.state == CONFLICTED for effect in stuck):
            await self._take_key(entry)
        gen = self._meta.generations.current(entry.ino)
        if gen is not None and gen.state == GenState.HELD:
            self._recovery.release(gen)
        elif gen is not None and gen.state == GenState.SUPERSEDED:
            with self._meta.transaction():
                self._contents.publish(entry.ino, gen)
            self._queue.insist(self._queue.of_gen(gen.gen))
        for effect in self._stuck(entry):
            with self._meta.transaction():
                self._queue.set_state(effect, PENDING, None)
                self._resolve(effect)
            self._flusher.retry(effect.id)

    def _resolve(self, effect: EffectRow) -> None:
        gen = self._meta.generations.get(effect.gen) if effect.gen is not None else None
        if gen is not None and gen.state in (GenState.STALLED, GenState.CONFLICTED):
            state = advance(GenState(gen.state), Event.RESOLVE)
            self._meta.generations.set_state(gen.gen, state)

    async def _take_key(self, entry: DentryRow) -> None:
        """What the key holds at this moment may be overwritten, and nothing else."""
        key = self._queue.key_of(entry)
        found = await self._remote.look(key)
        with self._meta.transaction():
            if found is None:
                self._meta.objects.remove(key)
            else:
                row = object_row(found.item, entry.id)
                row.stale = 1
                self._meta.objects.put(row)

    # -- discard ------------------------------------------------------------------------------

    async def _discard(self, entry: DentryRow) -> None:
        inode = self._inode(entry)
        if inode.nlink > 1 and not stat.S_ISDIR(inode.mode):
            raise UsageError(f"{self._queue.key_of(entry)} has other names: remove them first")
        found = await self._remote.look(self._queue.key_of(entry))
        with self._meta.transaction():
            self._forget_ours(entry, inode)
            if found is None:
                self._namespace.unlink(entry.parent, entry.name)
            else:
                self._remote.replace(self._inode(entry), found)
        await self.on_changed(entry.parent, entry.name, entry.ino)

    def _forget_ours(self, entry: DentryRow, inode: InodeRow) -> None:
        for effect in self._queue.of_dentry(entry.id):
            if effect.kind != EffectKind.UNPUBLISH:
                self._queue.cancel(effect)
        self._meta.inodes.set_gen(inode.ino, None)
        for row in self._meta.generations.of_inode(inode.ino):
            self._contents.unreferenced(row.gen)
        for known in self._meta.objects.of_dentry(entry.id):
            self._meta.objects.remove(known.key)

    # -- under another name -------------------------------------------------------------------

    def _detach(self, entry: DentryRow) -> None:
        if any(effect.state == CONFLICTED for effect in self._stuck(entry)):
            self._meta.objects.remove(self._queue.key_of(entry))

    # -- rows ---------------------------------------------------------------------------------

    def _stuck(self, entry: DentryRow) -> list[EffectRow]:
        rows = self._queue.of_dentry(entry.id)
        return [row for row in rows if self._troubles.word(row) is not None]

    def _inode(self, entry: DentryRow) -> InodeRow:
        inode = self._meta.inodes.get(entry.ino)
        if inode is None:
            raise NotFound(f"{self._queue.key_of(entry)} is gone")
        return inode


async def _nothing(parent: int, name: bytes, ino: int) -> None:
    """Nobody else remembers entries."""
