"""A directory on a parallel or network filesystem that holds plain copies of files.

    <directory>/<path>                       the copies, at the paths that they have in the mount
    <directory>/.cachefs/id                  which directory this is, written once
    <directory>/.cachefs/staging/<node>/     copies that are not complete yet

A copy is staged (bytes on the disk, then its attributes) and shown by a rename, so whoever looks
sees a whole file or none. Nothing here decides what is shown when. Every call raises OSError, and
is made in a thread: such filesystems take their time.

`open` never makes the directory itself: where a filesystem is not mounted, the bare mount point is
another directory, without the id that the cache remembers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cachefs.cache.clone import clone_file
from cachefs.errors import CacheError

_OWN = ".cachefs"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a copy gets besides its bytes. `mode` without the type bits; times in nanoseconds."""

    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int


class WarmDirectory:
    """One warm tier, as `node` uses it. Any thread, but one caller a path."""

    def __init__(self, directory: Path, node: str) -> None:
        self.directory = directory
        self._staging = directory / _OWN / "staging" / node.replace("/", "_")

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

        Its bytes are on the disk when this returns. EIO when the source is not of that size.
        """
        target = self._staging / name
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        reading = os.open(source, _READ)
        try:
            if os.fstat(reading).st_size != size:
                raise OSError(errno.EIO, "the cache file has another size", source)
            writing = os.open(target, _MAKE, 0o600)
            try:
                clone_file(reading, writing)
                _dress(writing, attributes)
                os.fsync(writing)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def stage_link(self, name: str, to: bytes) -> None:
        """Make the staged symlink `name`."""
        target = self._staging / name
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        os.symlink(to, os.fsencode(target))

    def show(self, name: str, path: str) -> int:
        """Give a staged file its place; returns its mtime as stored, in nanoseconds."""
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            if target.is_dir() and not target.is_symlink():
                target.rmdir()  # A directory was there before, and is empty by now.
        os.rename(self._staging / name, target)
        return os.lstat(target).st_mtime_ns

    def drop(self, name: str) -> None:
        """A staged file is not wanted after all."""
        with contextlib.suppress(FileNotFoundError):
            (self._staging / name).unlink()

    def stage_again(self, name: str, path: str) -> None:
        """Stage what is shown at `path`, without copying it where the filesystem has hard links."""
        target = self._staging / name
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        source = self.directory / path
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            shutil.copy2(source, target)
            _sync(target, os.O_RDONLY)

    def remove(self, path: str) -> None:
        """A shown file goes, with the directories that are empty then. Idempotent."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.directory / path).unlink()
        self._prune(path)

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
                with contextlib.suppress(FileNotFoundError):
                    _sync(Path(folder), os.O_RDONLY | os.O_DIRECTORY)

    # -- reading ------------------------------------------------------------------------------

    def holds(self, path: str) -> bool:
        """Whether something is at a path."""
        return os.path.lexists(self.directory / path)

    def is_as_written(self, path: str, size: int, mtime_ns: int) -> bool:
        """Whether the file at `path` is the one that was shown: nobody else has touched it."""
        try:
            found = os.lstat(self.directory / path)
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (size, mtime_ns)

    def read_into(self, path: str, target: str, start: int, end: int) -> int:
        """Copy bytes [start, end) to the same place of the file `target`; returns their number."""
        reading = os.open(self.directory / path, _READ)
        try:
            writing = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                return _copy(reading, writing, start, end)
            finally:
                os.close(writing)
        finally:
            os.close(reading)


def _dress(fd: int, attributes: Attributes) -> None:
    with contextlib.suppress(PermissionError):  # A filesystem may keep owners to itself.
        os.fchown(fd, attributes.uid, attributes.gid)
    os.fchmod(fd, attributes.mode)
    os.utime(fd, ns=(attributes.atime_ns, attributes.mtime_ns))


def _copy(reading: int, writing: int, start: int, end: int) -> int:
    position = start
    while position < end:
        block = os.pread(reading, min(_BLOCK, end - position), position)
        if not block:
            break
        view = memoryview(block)
        while view:
            count = os.pwrite(writing, view, position)
            view = view[count:]
            position += count
    return position - start


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
