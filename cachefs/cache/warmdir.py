"""A directory on a parallel or network filesystem that holds plain copies of files.

    <directory>/<path>                       the copies, at the paths that they have in the mount
    <directory>/.cachefs/id                  which directory this is, written once
    <directory>/.cachefs/staging/<node>.d/   copies that a node has not completed yet

A copy is staged (bytes on the disk, then its attributes) and shown by a rename, so whoever looks
sees a whole file or none. Nothing here decides what is shown when. Size and mtime tell whether a
copy still is the one that was shown: one that somebody has touched is neither read nor removed.
Every call raises OSError, and is made in a thread: such filesystems take their time.

`open` never makes the directory itself: where a filesystem is not mounted, the bare mount point is
another directory, without the id that the cache remembers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from cachefs.cache.clone import clone_file, copy_range
from cachefs.cache.device import BLOCK_UNIT
from cachefs.errors import CacheError
from cachefs.model import names

_OWN = ".cachefs"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
OBSTRUCTING = frozenset(
    (
        errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG,
        errno.EINVAL, errno.EILSEQ, errno.EPERM, errno.EACCES, errno.EBUSY, errno.ETXTBSY,
        errno.EXDEV,
    )
)  # fmt: skip
"""What keeps a staged file from one place, and says nothing of others."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a copy gets besides its bytes. `mode` without the type bits; times in nanoseconds."""

    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A copy as it was shown: at `path`, below the directory; `size` does not count for a symlink,
    which can only be made anew."""

    path: str
    size: int
    mtime_ns: int

    def is_it(self, found: os.stat_result) -> bool:
        """Whether that is the status of this very copy."""
        size = self.size if stat.S_ISREG(found.st_mode) else found.st_size
        whole = stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)
        return whole and (found.st_size, found.st_mtime_ns) == (size, self.mtime_ns)


class WarmDirectory:
    """One warm tier, as `node` uses it. Any thread, but one caller a path."""

    def __init__(self, directory: Path, node: str) -> None:
        self.directory = directory
        self._staging = directory / _OWN / "staging" / f"{node}.d"  # a node may be called ".."

    def open(self, known: str | None) -> str:
        """Check that it is there and the one with the id `known`; returns its id.

        None takes whatever is there, and gives a new directory its id. Raises CacheError.
        """
        if not self.directory.is_dir():
            raise CacheError(f"the warm tier {self.directory} is not there", hint="is it mounted?")
        name = self.directory / _OWN / "id"
        try:
            found = name.read_text().strip()
        except FileNotFoundError:
            found = ""
        if known is not None and found != known:
            why = "has lost its id" if not found else "is not the one that this cache knows"
            raise CacheError(
                f"the warm tier {self.directory} {why}",
                hint=f"is it mounted? Its id should be {known}, in {name}",
            )
        if not found:
            found = self._claim(name)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._staging)  # What a daemon that died had not finished.
        self._staging.mkdir(parents=True)
        return found

    def check(self) -> None:
        """Raises OSError when the filesystem is not mounted any more: what is not found then is not
        gone."""
        self._staging.stat()

    def _claim(self, name: Path) -> str:
        name.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # Another node was faster.
            fd = os.open(name, _MAKE, 0o644)
            with open(fd, "w") as file:
                file.write(f"{uuid.uuid4()}\n")
                file.flush()
                os.fsync(fd)
        return name.read_text().strip()

    # -- showing ------------------------------------------------------------------------------

    def stage(self, name: str, source: str, size: int, attributes: Attributes) -> None:
        """Copy the cache file `source`, which has `size` bytes, to the staged file `name`.

        Its bytes are on the disk when this returns. EIO when the source is not of that size; ENOSPC
        or EDQUOT leave nothing behind.
        """
        target = self._staging / name
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        reading = os.open(source, _READ)
        try:
            found = os.fstat(reading)
            if found.st_size != size:
                raise OSError(errno.EIO, "the cache file has another size", source)
            self._require_room(found.st_blocks * BLOCK_UNIT)
            _make_copy(reading, target, attributes)
        except OSError:
            with contextlib.suppress(OSError):
                target.unlink()
            raise
        finally:
            os.close(reading)

    def free(self) -> int | None:
        """Bytes that have room; None where the filesystem does not tell."""
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def _require_room(self, needed: int) -> None:
        """A large file is not copied in vain, again and again."""
        free = self.free()
        if free is not None and free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))

    def stage_link(self, name: str, to: bytes) -> None:
        """Make the staged symlink `name`."""
        target = self._staging / name
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        os.symlink(to, os.fsencode(target))

    def staged_mtime(self, name: str) -> int:
        """Of a staged file, as stored, in nanoseconds: it has the same where it is shown."""
        return os.lstat(self._staging / name).st_mtime_ns

    def show(self, name: str, path: str) -> int:
        """Give a staged file its place; returns its mtime as stored, in nanoseconds.

        An error of OBSTRUCTING is of that place alone. Nothing is written through symlinks: what
        they lead to is another file's place.
        """
        target = self.directory / path
        for parent in reversed([*names.above(path)]):
            self._make_directory(self.directory / parent)
        with contextlib.suppress(OSError):
            if target.is_dir() and not target.is_symlink():
                target.rmdir()  # A directory was there before, and is empty by now.
        os.rename(self._staging / name, target)
        return os.lstat(target).st_mtime_ns

    def _make_directory(self, place: Path) -> None:
        try:
            if stat.S_ISDIR(os.lstat(place).st_mode):
                return
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # Another node was faster.
                place.mkdir()
            return
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))

    def obstacle(self, path: str, leaving: Collection[str], clear: set[str]) -> str | None:
        """What is seen in the way of a copy that is to be shown at a path, for people.

        `leaving`: paths of copies that will be gone by then; `clear`: directories that are known to
        be in nobody's way, to which those are added that are found.
        """
        for parent in reversed([*names.above(path)]):
            if parent in clear:
                continue
            kind = self._kind(parent)
            if kind is not None and not stat.S_ISDIR(kind):
                return None if parent in leaving else self._say(parent, "is no directory")
            clear.add(parent)
        kind = self._kind(path)
        if kind is None or not stat.S_ISDIR(kind) or self._goes(self.directory / path, leaving):
            return None
        return self._say(path, "is a directory")

    def _kind(self, path: str) -> int | None:
        try:
            return os.lstat(self.directory / path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno not in OBSTRUCTING:
                raise
            return None  # It shows when it is tried.

    def _goes(self, folder: Path, leaving: Collection[str]) -> bool:
        """Whether a directory is empty, or will be."""
        with os.scandir(folder) as entries:
            return all(
                self._goes(Path(entry.path), leaving)
                if entry.is_dir(follow_symlinks=False)
                else str(Path(entry.path).relative_to(self.directory)) in leaving
                for entry in entries
            )

    def _say(self, path: str, what: str) -> str:
        return f"{self.directory / path} {what}: move it away"

    def drop(self, name: str) -> None:
        """A staged file is not wanted after all."""
        with contextlib.suppress(FileNotFoundError):
            (self._staging / name).unlink()

    def stage_again(self, name: str, shown: Shown) -> bool:
        """Stage a copy once more, without copying it where the filesystem has hard links; False
        when it is not there as it was shown. One that is staged already stays so."""
        target, source = self._staging / name, self.directory / shown.path
        if _is(target, shown):
            return True
        if not _is(source, shown):
            return False
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _copy_again(source, target)
        return _is(target, shown)

    def remove(self, shown: Shown) -> bool:
        """A copy goes, with the directories that are empty then; True if it is gone. Idempotent.

        False: somebody has touched it, and it stays. An error of OBSTRUCTING is of it alone.
        """
        try:
            if not shown.is_it(os.lstat(self.directory / shown.path)):
                return False
            (self.directory / shown.path).unlink()
        except (FileNotFoundError, NotADirectoryError):
            pass
        self._prune(shown.path)
        return True

    def _prune(self, path: str) -> None:
        parent = Path(path).parent
        while parent.parts:
            try:
                (self.directory / parent).rmdir()
            except OSError:
                return
            parent = parent.parent

    def sync(self, paths: Iterable[str]) -> None:
        """Bring the names of shown, moved and removed files to the disk."""
        folders = {str(parent) for path in paths for parent in (self.directory / path).parents}
        inside = str(self.directory)
        for folder in sorted(folders, key=len, reverse=True):
            if folder == inside or folder.startswith(inside + "/"):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    _sync(Path(folder), os.O_RDONLY | os.O_DIRECTORY)

    # -- reading ------------------------------------------------------------------------------

    def has_file(self, path: str, size: int | None) -> bool:
        """Whether a file of that size (None: of any) is at a path, whoever put it there."""
        try:
            found = os.stat(self.directory / path)
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and size in (None, found.st_size)

    def text_of(self, path: str, limit: int) -> bytes:
        """The first bytes of the file at a path, where a symlink leads; empty: it is not there."""
        place = os.fsencode(self.directory / path)
        try:
            return os.readlink(place)
        except OSError:
            return first_bytes(place, limit)

    def staged_text_of(self, name: str, limit: int) -> bytes:
        """The first bytes of a staged file; empty: there is none."""
        return first_bytes(os.fsencode(self._staging / name), limit)

    def read_into(self, shown: Shown, target: str, start: int, end: int) -> bool:
        """Copy bytes [start, end) of a copy to the same place of the file `target`.

        False: the copy was not as it was shown, before or afterwards, or too short.
        """
        reading = os.open(self.directory / shown.path, _READ)
        try:
            writing = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                if not shown.is_it(os.fstat(reading)):
                    return False
                count = copy_range(reading, writing, start, end)
                return count == end - start and shown.is_it(os.fstat(reading))
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def read(self, shown: Shown, start: int, end: int) -> bytes | None:
        """Bytes [start, end) of a copy; None as for `read_into`."""
        fd = os.open(self.directory / shown.path, _READ)
        try:
            data = os.pread(fd, end - start, start)
            return data if len(data) == end - start and shown.is_it(os.fstat(fd)) else None
        finally:
            os.close(fd)


def first_bytes(path: bytes | str, limit: int) -> bytes:
    """The first `limit` bytes of a file; empty when it cannot be opened."""
    try:
        fd = os.open(path, _READ)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        return file.read(limit)


def _is(place: Path, shown: Shown) -> bool:
    try:
        return shown.is_it(os.lstat(place))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _copy_again(source: Path, target: Path) -> None:
    reading = os.open(source, _READ)
    try:
        at = os.fstat(reading)
        mode = stat.S_IMODE(at.st_mode)
        attributes = Attributes(mode, at.st_uid, at.st_gid, at.st_atime_ns, at.st_mtime_ns)
        _make_copy(reading, target, attributes)
    finally:
        os.close(reading)


def _make_copy(reading: int, target: Path, attributes: Attributes) -> None:
    """Copy a file to a new one, bytes and attributes on the disk when this returns."""
    writing = os.open(target, _MAKE, 0o600)
    try:
        clone_file(reading, writing)
        _dress(writing, attributes)
        os.fsync(writing)
    finally:
        os.close(writing)


def _dress(fd: int, attributes: Attributes) -> None:
    with contextlib.suppress(PermissionError):  # A filesystem may keep owners to itself.
        os.fchown(fd, attributes.uid, attributes.gid)
    os.fchmod(fd, attributes.mode)
    os.utime(fd, ns=(attributes.atime_ns, attributes.mtime_ns))


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
