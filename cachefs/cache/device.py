"""A cache device: one directory on a local filesystem, one cache file per generation.

    <directory>/LOCK                 exclusive flock, pid of the owner
    <directory>/device               its name, by which the database knows it
    <directory>/heartbeat            a few bytes, written to see whether the device answers
    <directory>/meta/                first device only: database, reserve, journal of small files
    <directory>/salvaged/            what was set aside, for a person to look at; never counted
    <directory>/files/<xx>/<gen>     cache file of generation <gen>; <xx> is its low byte in hex

Every call is a plain system call or two, made at once, and raises OSError. What may wait for the
disk, which is all but the `fstat` of a descriptor, the event loop makes by `apart`. Only the
constructor raises `CacheError`, a message for people; `DeviceMissing` where its disk seems not to
be there.

Threads: any. The one piece of shared state, which directory entries are not yet synced, has a lock
that is never held over a system call.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from cachefs.cache import identity, lease, marks, system
from cachefs.cache.apart import Apart
from cachefs.cache.claiming import claim, make_top, unusable
from cachefs.cache.clone import CloneMethod, clone_file
from cachefs.cache.closings import Closed, Closings, open_table
from cachefs.cache.heartbeat import Heartbeat
from cachefs.cache.system import DeviceKind
from cachefs.failpoints import Point, reach
from cachefs.model.survival import Level

AdoptMethod = Literal["link", "reflink", "copy"]

SALVAGED = "salvaged"
"""Directory for what no metadata describes and what may be data all the same."""
BLOCK_UNIT = 512
"""Bytes per unit of `st_blocks`, whatever the filesystem's own block size."""

_SURVIVES = {
    DeviceKind.RAM: Level.PROCESS,
    DeviceKind.DISK: Level.REBOOT,
    DeviceKind.NETWORK: Level.INSTANCE,
}
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


class CacheDevice:
    """Owns a cache directory until `close`. `index` is its number in the configuration.

    `size_limit` is what the configuration allows here in bytes, None for no limit of its own;
    `survives` overrides what the filesystem's type suggests (a network block device looks like a
    disk).
    """

    def __init__(
        self,
        index: int,
        path: str | Path,
        size_limit: int | None = None,
        *,
        survives: Level | None = None,
    ) -> None:
        self.index = index
        self.directory = Path(path).absolute()
        self.size_limit = size_limit
        self._survives = survives
        self._files = f"{self.directory}/files"
        self.closings: Closings | None = None
        self.write_speed: float | None = None
        """Bytes a second, as it was measured; None: it was not."""
        make_top(self.directory)
        self._lock = claim(self.directory)
        try:
            self._prepare()
        except OSError as err:
            self._lock.release()
            raise unusable(self.directory, err) from err
        self._sync_state = threading.Lock()
        self._unsynced: set[int] = set()
        self._clean_shards: set[str] = set()
        # New shards made, and how many of them the last sync of `files` covered; those found at the
        # start count as one that was not.
        self._shards_made, self._shards_synced = 1, 0

    def _prepare(self) -> None:
        if not os.path.isdir(self._files):
            self.meta_dir.mkdir(_DIRECTORY_MODE, exist_ok=True)
            reach(Point.DEVICE_AFTER_META_DIR)
            os.mkdir(self._files, _DIRECTORY_MODE)
            reach(Point.DEVICE_AFTER_FILES_DIR)
            _fsync_directory(str(self.directory))
            _fsync_directory(str(self.directory.parent))
            reach(Point.DEVICE_AFTER_SYNC)
        self._fs_type = system.filesystem_type(self.directory)
        self.in_memory = self.kind is DeviceKind.RAM
        """Reading waits for no disk."""
        self.spins = system.is_spinning(self.directory)
        """It is a disk of the slow kind."""
        self.fine_times = system.has_fine_times(self._files)
        status = self.directory.stat()
        self._identity = (status.st_dev, status.st_ino)
        self._heartbeat = Heartbeat(self.directory / "heartbeat", self._check_present)
        self.apart = Apart(f"apart {self.directory}", direct=self.in_memory)
        """Makes the calls that may wait for the disk."""

    def close(self) -> None:
        """Give the directory up; never waits for the device. Idempotent."""
        self._heartbeat.stop()
        self.apart.stop()
        if self.closings is not None:
            self.closings.close()
        self._lock.release()

    def __repr__(self) -> str:
        return f"CacheDevice({self.index}, {str(self.directory)!r})"

    # What it is

    @property
    def meta_dir(self) -> Path:
        """Where the metadata database lives when this is the first device."""
        return self.directory / "meta"

    @property
    def kind(self) -> DeviceKind:
        """RAM, disk or network, by the filesystem's type."""
        return system.device_kind(self._fs_type)

    @property
    def filesystem(self) -> str:
        """Name of the filesystem, for status and messages."""
        return system.filesystem_name(self._fs_type)

    @property
    def forgets(self) -> bool:
        """Whether the bytes here end with the machine's memory."""
        return self.survives <= Level.PROCESS

    @property
    def survives(self) -> Level:
        """What the bytes here outlive.

        RAM the process, a disk a reboot, a network volume the instance.
        """
        if self._survives is not None:
            return self._survives
        return _SURVIVES[self.kind]

    @property
    def stack_depth(self) -> int:
        """`max_stack_depth` that passthrough needs for files here.

        1, or 2 on a stacked filesystem.
        """
        return system.stack_depth(self._fs_type)

    @property
    def total(self) -> int:
        """Size of the whole filesystem in bytes."""
        status = os.statvfs(self.directory)
        return status.f_blocks * status.f_frsize

    def free_bytes(self) -> int:
        """Bytes that an unprivileged writer could still take from the filesystem."""
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize

    # How it is

    @property
    def direct_ok(self) -> bool:
        """Whether it has answered quickly of late: nobody is to be kept from it.

        That tells nothing of the next call, which may be the first one to hang.
        """
        quick = self._heartbeat.quick
        return self.healthy if self.in_memory else quick  # memory never stalls, processors do

    @property
    def stalled(self) -> bool:
        """Whether it is known to be slow.

        Unlike `direct_ok` this does not keep an idle disk awake.
        """
        return self._heartbeat.stalled

    @property
    def healthy(self) -> bool:
        """False once the device has failed or its directory has gone from under the daemon."""
        return self._heartbeat.failure is None

    @property
    def failure(self) -> str | None:
        """Why it is not healthy."""
        return self._heartbeat.failure

    def look(self) -> None:
        """Find out whether it is still there, though nobody uses it. Blocks; for a thread."""
        self._heartbeat.check_now()

    @property
    def slow_total(self) -> int:
        """Beats that were too slow so far."""
        return self._heartbeat.slow_total

    def _check_present(self) -> None:
        """ENODEV when the path no longer leads to the locked directory (unmounted, replaced)."""
        status = os.stat(self.directory)
        if (status.st_dev, status.st_ino) != self._identity:
            raise OSError(
                errno.ENODEV, "the cache directory was replaced or its filesystem unmounted"
            )

    # Cache files

    def path(self, gen: int) -> str:
        """Where the cache file of a generation is, whether or not it exists."""
        return f"{self._files}/{gen & 0xFF:02x}/{gen}"

    def create(self, gen: int) -> int:
        """A new empty cache file.

        Returns a descriptor open for reading and writing. EEXIST, ENOSPC.
        """
        path = self.path(gen)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _ALWAYS
        with self._sync_state:
            self._unsynced.add(gen)
        try:
            fd = os.open(path, flags, _FILE_MODE)
        except FileNotFoundError:
            self._make_shard(gen)
            fd = os.open(path, flags, _FILE_MODE)
        reach(Point.FILE_AFTER_CREATE)
        return fd

    def open(self, gen: int, flags: int = os.O_RDONLY) -> int:
        """A descriptor of an existing cache file.

        ENOENT when it was removed behind the daemon's back.
        """
        return os.open(self.path(gen), (flags & ~(os.O_CREAT | os.O_EXCL)) | _ALWAYS)

    def remove(self, gen: int) -> None:
        """Delete a cache file; one that is gone already is success."""
        with self._sync_state:
            self._unsynced.discard(gen)
        with suppress(FileNotFoundError):
            os.unlink(self.path(gen))
        self.written(gen)
        reach(Point.FILE_AFTER_UNLINK)

    def set_aside(self, gen: int) -> str:
        """Move a cache file that nobody knows to `salvaged/`; returns where it is now."""
        directory = self.directory / SALVAGED
        directory.mkdir(_DIRECTORY_MODE, exist_ok=True)
        target = f"{directory}/gen-{gen}"
        while os.path.lexists(target):
            target += "~"
        os.rename(self.path(gen), target)
        reach(Point.FILE_AFTER_SET_ASIDE)
        return target

    def exists(self, gen: int) -> bool:
        """Whether the cache file is there."""
        return os.path.lexists(self.path(gen))

    def stat(self, gen: int) -> os.stat_result:
        """`lstat` of a cache file."""
        return os.lstat(self.path(gen))

    def allocated(self, gen: int) -> int:
        """Bytes that a cache file takes on the device (holes cost nothing), 0 when it is gone."""
        try:
            return os.lstat(self.path(gen)).st_blocks * BLOCK_UNIT
        except FileNotFoundError:
            return 0

    def list_generations(self) -> Iterator[int]:
        """Every generation that has a cache file here, in no order.

        Files of other names are passed over.
        """
        for entry in self._entries():
            yield int(entry.name)

    def allocated_total(self) -> int:
        """Bytes that all cache files take.

        Looks at every file: for a thread, not for the event loop.
        """
        total = 0
        for entry in self._entries():
            with suppress(FileNotFoundError):  # evicted meanwhile
                total += entry.stat(follow_symlinks=False).st_blocks * BLOCK_UNIT
        return total

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._files) as shards:
            names = [shard.path for shard in shards if shard.is_dir(follow_symlinks=False)]
        for name in names:
            with os.scandir(name) as entries:
                yield from (entry for entry in entries if entry.name.isdigit())

    # Durability of directory entries

    def sync_dir(self, gen: int) -> bool:
        """Make the directory entry of a cache file survive a power cut; False when it did already.

        `files/<xx>` is synced once per new file (files created together share it), `files` once per
        new `<xx>`. Entries made before this process started count as unsynced until their directory
        is.
        """
        shard = os.path.dirname(self.path(gen))
        with self._sync_state:
            if gen not in self._unsynced and shard in self._clean_shards:
                return False
            covered = {each for each in self._unsynced if (each ^ gen) & 0xFF == 0}
            shards_made = self._shards_made
            parent_too = self._shards_synced < shards_made
        _fsync_directory(shard)
        reach(Point.SYNC_DIR_AFTER_SHARD)
        if parent_too:
            _fsync_directory(self._files)
            reach(Point.SYNC_DIR_AFTER_FILES)
        with self._sync_state:
            self._unsynced -= covered
            self._clean_shards.add(shard)
            self._shards_synced = max(self._shards_synced, shards_made)
        return True

    def _make_shard(self, gen: int) -> None:
        shard = os.path.dirname(self.path(gen))
        try:
            os.mkdir(shard, _DIRECTORY_MODE)
        except FileExistsError:
            return
        reach(Point.FILE_AFTER_SHARD)
        with self._sync_state:
            self._shards_made += 1

    # Copies

    def clone(self, source: int, target: int) -> CloneMethod:
        """A second cache file with the bytes of `source`, sharing blocks where possible."""
        return self.clone_from(self.path(source), target)

    def clone_from(self, path: str | Path, gen: int) -> CloneMethod:
        """A new cache file with the bytes of any file (of another device, say).

        Holes stay holes; no fsync.
        """
        source = os.open(path, os.O_RDONLY | _ALWAYS)
        try:
            target = self.create(gen)
            try:
                method = clone_file(source, target)
            except BaseException:
                self.remove(gen)
                raise
            finally:
                os.close(target)
        finally:
            os.close(source)
        reach(Point.CLONE_AFTER_BYTES)
        return method

    def adopt(self, path: str | Path, gen: int) -> AdoptMethod:
        """Make the file at `path` the cache file of a new generation, if possible without a copy.

        The file keeps its old name too: the caller unlinks `path` once the metadata names the new
        one, so a crash in between loses nothing. EINVAL: no regular file. ETXTBSY: somebody writes
        to it still. A file with further hard links, or on another filesystem, is cloned or copied,
        since a sealed generation may have no second name.
        """
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "only regular files can be adopted", str(path))
        _refuse_open_writer(path)
        if status.st_nlink > 1 or not self._link(path, gen):
            return self.clone_from(path, gen)
        os.chmod(self.path(gen), _FILE_MODE)
        reach(Point.ADOPT_AFTER_LINK)
        return "link"

    def _link(self, path: str | Path, gen: int) -> bool:
        with self._sync_state:
            self._unsynced.add(gen)
        try:
            try:
                os.link(path, self.path(gen), follow_symlinks=False)
            except FileNotFoundError:
                self._make_shard(gen)
                os.link(path, self.path(gen), follow_symlinks=False)
        except OSError as err:
            if err.errno in _NO_LINK:
                return False
            raise
        return True

    def punch(self, gen: int, start: int, end: int) -> None:
        """Give back the blocks of a range of a cache file.

        EOPNOTSUPP where the filesystem cannot.
        """
        fd = self.open(gen, os.O_WRONLY)
        try:
            system.punch_hole(fd, start, end)
        finally:
            os.close(fd)

    def keep_closings(self, directories: Collection[Path]) -> None:
        """Note in one of `directories`, if that is in memory, when files are closed, instead of on
        them."""
        with suppress(OSError):
            name = identity.read(self.directory)
            self.closings = open_table(name, directories) if name else None

    def mark_closed(self, gen: int, fd: int) -> None:
        """Note that a program closed an open cache file; see `was_closed`."""
        if not self.note_closed(gen, fd):
            marks.mark_closed(fd, _like(fd))

    def note_closed(self, gen: int, fd: int) -> bool:
        """The same, where that waits for no disk; False: there it cannot be noted."""
        return self.closings is not None and self.closings.note(gen, _like(fd))

    def written(self, gen: int) -> None:
        """The last writer of a cache file is gone, and that is recorded."""
        if self.closings is not None:
            self.closings.drop(gen)

    def mark_path(self, gen: int, path: bytes) -> None:
        """Note on a cache file, soon, whose it is, for when the database is lost."""
        self.apart.later(partial(marks.mark_path, self.path(gen), path))

    def let_go(self, fd: int) -> None:
        """Close a descriptor of a cache file, soon. That may give back its space."""
        self.apart.later(partial(os.close, fd))

    def was_closed(self, gen: int) -> bool:
        """Whether a program closed the cache file and nothing was written to it after that.

        Noted before close(2) returns, so it is there even if nothing else of the close is.
        """
        noted = self.closings.of(gen) if self.closings is not None else None
        noted = noted or marks.closed(self.path(gen))
        status = self.stat(gen)
        return noted == (status.st_mtime_ns, status.st_size)

    def writer_open(self, gen: int) -> bool:
        """Whether any process has the cache file open for writing.

        See `cache.lease`. LeaseUnsupported.
        """
        return lease.writer_open(self.path(gen))


def _like(fd: int) -> Closed:
    status = os.fstat(fd)
    return Closed(status.st_mtime_ns, status.st_size)


def _fsync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_open_writer(path: str | Path) -> None:
    try:
        busy = lease.writer_open(path)
    except lease.LeaseUnsupported:
        return  # nobody can tell here; the caller of adopt has promised that it is finished
    if busy:
        raise OSError(errno.ETXTBSY, "the file is still open for writing", str(path))
