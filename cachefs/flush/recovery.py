"""After a daemon ended without saying so: what was under way, and what becomes of it.

Run once at start, before the first request. Idempotent, and quick however much is dirty: it looks
at rows and at the names of cache files, never at content.

- uploads that were under way wait as sealed generations again; their journals go on from there;
- effects that were blocked get another try;
- generations that were open and have no handle any more are *held*: kept, visible, reported, not
  published, since nobody can say whether they are whole, until they are opened for writing and
  closed again. Sealed instead are those whose last event was a close
  (only its release was not seen), logs, and all with `flush.held = "publish"`; but none that a
  process still writes to, past the end of its mount (passthrough goes on without a connection);
- effects whose generation is being rewritten stay blocked until it is sealed;
- a generation in RAM that is lost goes on with its copy on a disk, if it has one; but what was
  written to since that was made is held;
- after the machine went down, what was never synced is held as well, or told to be lost, and copies
  of what the store has are read again (see `flush.reboot`);
- cache files without a row belong to creations that were never answered, or to generations whose
  row went first: removed. But what the database should know and does not, because it lost what was
  committed last, is set aside (`salvaged/`), never removed;
- inodes without a name lived only through handles that are gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

from cachefs.cache.absent import AbsentDevice
from cachefs.cache.device import CacheDevice
from cachefs.cache.fresh import write_time
from cachefs.cache.lease import LeaseUnsupported
from cachefs.cache.system import boot_id
from cachefs.errors import Refused
from cachefs.failpoints import Change, Point, reach
from cachefs.flush import copies, orphans
from cachefs.flush.queue import BLOCKED, PENDING, EffectQueue
from cachefs.flush.reboot import NOT_ON_DISK, Reboots
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow, GenerationRow, InodeRow
from cachefs.model.states import (
    DAMAGED,
    DIRTY,
    NEVER_ON_DISK,
    TRANSITIONS,
    Event,
    GenState,
    advance,
)
from cachefs.model.survival import Level

log = structlog.get_logger("cachefs.recovery")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found: counts of generations."""

    dirty: int
    held: int
    missing: int
    """Dirty generations whose cache file is gone, and should not be."""
    lost: int
    """Those that never had one on the disk when the machine went down."""
    highest_file: int


class Recovery:
    """Puts the database and the cache devices in order."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        devices: Sequence[CacheDevice],
        *,
        publish_held: bool = False,
        is_log: Callable[[str], bool] = lambda path: False,
        forget_inode: Callable[[int], None],
        on_freed: Callable[[CacheDevice, int], None] = lambda device, nbytes: None,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        """`forget_inode`: removes an inode with all that was its own. `is_log(path)`: a prefix of
        such a file makes sense. `on_freed` is told of the bytes of cache files that were removed.
        """
        self._on_freed = on_freed
        self.settle_spans: Callable[[], None] = lambda: None
        """Called first: puts in order what of open files is in the store only."""
        self.reboots = Reboots(meta, boot)
        self._rebooted = False
        self._forgetful = False
        self._last_file = 0
        self._mount_lives = False
        self._publish_held = publish_held
        self._is_log = is_log
        self._meta = meta
        self._queue = queue
        self._devices = devices
        self._forget_inode = forget_inode

    def run(self, open_inodes: Collection[int] = (), *, mount_lives: bool = False) -> Recovered:
        """`open_inodes`: those that programs still have open, or are about to (takeover).

        `mount_lives`: it was taken over, so all others were closed in the ordinary way.
        """
        self._mount_lives = mount_lives
        self.settle_spans()
        self._rebooted = self.reboots.happened()
        self._forgetful = self._has_forgotten()
        self._last_file = self._meta.generations.last_file()
        generations = self._meta.generations
        with self._meta.transaction(Change.RECOVER):
            for row in generations.in_states(GenState.UPLOADING):
                generations.set_state(row.gen, advance(GenState.UPLOADING, Event.PAUSE))
            for row in generations.in_states(GenState.STALLED):
                generations.set_state(row.gen, advance(GenState.STALLED, Event.RESOLVE))
            for effect in list(self._queue.effects.values()):
                if effect.state == BLOCKED and not self._is_rewritten(effect):
                    self._queue.set_state(effect, PENDING, None)
            if self._rebooted:
                self.reboots.forget_copies()
                self._doubt_unsynced()
            self.reboots.remember()
        reach(Point.RECOVER_AFTER_REMEMBER)
        self._drop_snapshots()
        reach(Point.RECOVER_AFTER_SNAPSHOTS)
        copies.settle(self._meta, self._queue, self._devices, publish_held=self._publish_held)
        reach(Point.RECOVER_AFTER_COPIES)
        held = self._settle_open(open_inodes)
        reach(Point.RECOVER_AFTER_OPEN)
        for ino in self._meta.inodes.unlinked():
            if ino not in open_inodes:
                self._forget_inode(ino)
        reach(Point.RECOVER_AFTER_UNLINKED)
        highest, gone = self._match_files()
        reach(Point.RECOVER_AFTER_FILES)
        self._forget_closes()
        dirty = len(generations.in_states(GenState.SEALED))
        lost = sum(row.error == NEVER_ON_DISK for row in gone)
        return Recovered(dirty, held, len(gone) - lost, lost, highest)

    def _forget_closes(self) -> None:
        """When a file was closed matters until it is sealed."""
        unsealed = self._meta.generations.in_states(GenState.OPEN, GenState.HELD)
        for device in self._devices:
            if device.closings is not None:
                files = {row.file for row in unsealed if row.device == device.index}
                device.closings.keep_only(files)

    def _has_forgotten(self) -> bool:
        """Whether the database may lack what was committed to it: its WAL file is gone, or ends
        before its last commit (a power cut does that to what was not synced), or the memory where
        commits and new small files wait is (a container that ends takes its own along)."""
        db = self._meta.db
        if db.lost_commits:
            log.warning("changes were lost with the machine's memory", count=db.lost_commits)
            db.start_wal_anew()
        return bool(db.lost_commits or db.note) or (not db.had_wal and self.reboots.in_use())

    def _doubt_unsynced(self) -> None:
        """What the machine may have lost goes out only when somebody says that it is whole. Noted
        at once: no later daemon will know that the machine went down."""
        generations = self._meta.generations
        for row in generations.in_states(*DIRTY, GenState.SUPERSEDED):
            if row.synced or row.grows:
                continue
            why = NEVER_ON_DISK if self._never_was(row) else NOT_ON_DISK
            if row.state == GenState.SEALED and not self._publish_held:
                generations.set_state(row.gen, advance(GenState.SEALED, Event.HOLD), why)
                for effect in self._queue.of_gen(row.gen):
                    self._queue.set_state(effect, BLOCKED, why)
            elif why == NEVER_ON_DISK or self._may_be_sealed(row):
                generations.set_state(row.gen, row.state, why)

    def _may_be_sealed(self, row: GenerationRow) -> bool:
        """Whether it is settled later, by what its cache file is like."""
        damaged = row.error is not None and row.error.startswith(DAMAGED)
        return row.state in (GenState.OPEN, GenState.HELD) and not damaged

    def _never_was(self, row: GenerationRow) -> bool:
        """Whether a power cut explains that there is no cache file. (That it takes what is in RAM
        along is told as such.)"""
        device = self._devices[row.device]
        if row.anchored or row.copy_size is not None or device.survives <= Level.PROCESS:
            return False
        try:
            device.stat(row.file)
        except FileNotFoundError:
            return device.healthy
        return False

    def _drop_snapshots(self) -> None:
        """Uploads of files as far as they had grown: begun anew from what the files hold now."""
        for row in self._meta.generations.in_states(*GenState):
            if row.grows:
                with self._meta.transaction(Change.DROP_SNAPSHOT):
                    for effect in self._queue.of_gen(row.gen):
                        self._queue.cancel(effect)
                    self._meta.generations.remove(row.gen)

    def _is_rewritten(self, effect: EffectRow) -> bool:
        gen = self._meta.generations.get(effect.gen) if effect.gen is not None else None
        return gen is not None and gen.state in (GenState.OPEN, GenState.HELD)

    def _settle_open(self, open_inodes: Collection[int]) -> int:
        """What becomes of generations that were open; how many are held."""
        held = 0
        for row in self._meta.generations.in_states(GenState.OPEN):
            if row.ino not in open_inodes:
                held += not self._settle(row)
        return held

    def settle_held(self) -> int:
        """Seal the held generations whose last writer has ended by now; how many are left."""
        held = self._meta.generations.in_states(GenState.HELD)
        return sum(not self._settle(row) for row in held)

    def release(self, row: GenerationRow) -> None:
        """Somebody says that a held generation is whole. Raises Refused if it is lost, or while a
        process still writes to it."""
        device = self._devices[row.device]
        try:
            written = device.writer_open(row.file)
        except LeaseUnsupported:
            written = False
        except FileNotFoundError:
            why = row.error or "its cache file is gone"
            raise Refused(why, hint="discard it, or write it anew") from None
        if written:
            raise Refused(row.error or "a process still writes to it", hint="end that process")
        with self._meta.transaction(Change.RELEASE_HELD):
            self._seal(row, self._meta.inodes.get(row.ino))

    def _settle(self, row: GenerationRow) -> bool:
        """Seal a generation that the daemon lost sight of; False if it must be held instead."""
        inode = self._meta.inodes.get(row.ino)
        why = self._why_held(row)
        with self._meta.transaction(Change.SETTLE_OPEN):
            if why is None:
                self._seal(row, inode)
            elif (row.state, row.error) != (GenState.HELD, why):
                self._measure(row, inode)
                row.state, row.error, row.dirty = GenState.HELD, why, None
                self._meta.generations.save(row)
        return why is None

    def _measure(self, row: GenerationRow, inode: InodeRow | None) -> None:
        """Size and time are the cache file's, whatever the database says."""
        try:
            status = self._devices[row.device].stat(row.file)
        except OSError:
            return  # Held for that reason.
        row.size = status.st_size
        if inode is not None and inode.gen == row.gen:
            self._meta.inodes.set_content(
                inode.ino, status.st_size, status.st_blocks, write_time(status, inode.mtime_ns)
            )

    def _seal(self, row: GenerationRow, inode: InodeRow | None) -> None:
        """As the last close would have done."""
        self._measure(row, inode)
        row.state, row.error, row.dirty = GenState.SEALED, None, None
        row.sealed_ns = time.time_ns()
        self._meta.generations.save(row)
        if inode is None or inode.gen != row.gen:
            return
        for dentry in self._meta.dentries.of_inode(row.ino):
            self._queue.publish(dentry, row.gen, row.size)
        for effect in self._queue.of_gen(row.gen):
            if effect.state == BLOCKED:  # It was being rewritten.
                self._queue.set_state(effect, PENDING, None)

    def _why_held(self, row: GenerationRow) -> str | None:
        """Why a generation may not be sealed (yet): the lease on its cache file tells."""
        try:
            if not self._devices[row.device].writer_open(row.file):
                return self._why_unfinished(row)
        except LeaseUnsupported:
            return self._why_unfinished(row)  # Nobody can tell on such a filesystem.
        except OSError as error:
            if row.error == NEVER_ON_DISK:
                return NEVER_ON_DISK
            return f"its cache file cannot be used: {error.strerror}"
        pids = " ".join(map(str, orphans.holders(row.ino)))
        return f"a process that outlived its mount still writes to it (pid {pids or 'unknown'})"

    def _why_unfinished(self, row: GenerationRow) -> str | None:
        """None for a file that is whole, or wanted as it is."""
        if self._mount_lives and row.state == GenState.OPEN and row.error != NOT_ON_DISK:
            return None
        if self._publish_held or self._names_log(row.ino):
            return None
        if (self._rebooted and not row.synced) or row.error == NOT_ON_DISK:
            return NOT_ON_DISK
        if row.error is not None and row.error.startswith(DAMAGED):
            return row.error
        if self._was_closed(row):
            return None
        return "it was open for writing when the mount ended; open it for writing and close it"

    def _was_closed(self, row: GenerationRow) -> bool:
        """Nothing was written after a program closed it. Any other descriptor is gone as well."""
        return self._devices[row.device].was_closed(row.file)

    def _names_log(self, ino: int) -> bool:
        names = self._meta.dentries.of_inode(ino)
        paths = (self._meta.dentries.path(name.parent, name.name) for name in names)
        return any(self._is_log(path.decode()) for path in paths)

    def _match_files(self) -> tuple[int, list[GenerationRow]]:
        """(highest number of a cache file, dirty generations without one)."""
        highest, gone = 0, list[GenerationRow]()
        for device in self._devices:
            found = set(device.list_generations())
            known = self._meta.generations.files(device.index)
            highest = max([highest, *found])
            for number in found - known:
                self._clear(
                    device, number, known_once=number <= self._last_file and not self._forgetful
                )
            gone += self._note_missing(device, known - found)
        return highest, gone

    def _clear(self, device: CacheDevice, number: int, *, known_once: bool) -> None:
        """Remove a cache file that no generation has, unless it may hold what nothing else does."""
        allocated = device.allocated(number)
        self._on_freed(device, allocated)
        if known_once or not allocated:
            device.remove(number)
        else:
            moved = device.set_aside(number)
            log.warning("recovered a cache file that nobody knows, set aside", file=moved)

    def _note_missing(self, device: CacheDevice, numbers: set[int]) -> list[GenerationRow]:
        gone = []
        for row in self._meta.generations.in_states(*GenState) if numbers else ():
            if row.device != device.index or row.file not in numbers:
                continue
            if row.state != GenState.DURABLE:
                gone.append(row)
                self._lose(row, device)
            elif not isinstance(device, AbsentDevice):  # That may come back, with its copies.
                with self._meta.transaction(Change.FORGET_MISSING):
                    self._meta.generations.remove(row.gen)
                    self._meta.inodes.clear_gen(row.ino, row.gen)
        return gone

    def _lose(self, row: GenerationRow, device: CacheDevice) -> None:
        """A dirty cache file is not where it should be: told, and what waits for it is stopped. It
        is looked for again at each start."""
        names = self._meta.dentries.of_inode(row.ino)
        paths = [self._meta.dentries.path(name.parent, name.name).decode() for name in names]
        path = paths[0] if paths else f"inode {row.ino}"
        reason = f"{DAMAGED}: it is gone with {device.directory}"
        if isinstance(device, AbsentDevice):
            reason = f"{DAMAGED}: {device.directory} is missing: {device.failure}"
        if row.error == NEVER_ON_DISK:
            reason = row.error
            log.warning("a file that was never synced is lost with the power", path=path)
        else:
            log.error("a dirty cache file is missing", path=path, device=str(device.directory))
        after = TRANSITIONS[GenState(row.state)].get(Event.REFUSE)
        if after is None and row.state != GenState.HELD:
            return
        with self._meta.transaction(Change.LOSE):
            self._meta.generations.set_state(row.gen, after or row.state, reason)
            for effect in self._queue.of_gen(row.gen):
                self._queue.set_state(effect, BLOCKED, reason)
