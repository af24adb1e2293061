"""What a cache has in memory, and what is left there of caches that are gone.

A daemon that is killed leaves files in memory (a tmpfs) for the next one: commits that its disk
lacks (`meta.ring`), its journal, its table of closed files. When nobody starts the cache again,
since its directory was deleted, they would stay until the machine goes down. So beside them a note
tells which cache they are of (`NAME.cache`, by the name of the device with the database); a daemon
locks its own. Whoever starts next removes what belongs to a cache that is gone.

Gone is only what provably is: that very inode does not exist any more in that very filesystem,
which is still mounted where it was. A directory that is not in its place may be on a disk that is
not mounted now, or was moved; what waits for it may be all there is of acknowledged changes.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachefs.cache import identity
from cachefs.cache.handles import handle_of, is_gone

_SUFFIX = ".cache"
_KINDS = {".ring", ".index", ".journal", ".closed"}
_MODE = 0o600
_DYING, _DYING_PAUSE = 10.0, 0.02
"""Seconds that who had the cache before may take to end."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files in memory of a cache that nobody uses and that is not where it was."""

    directory: str
    """Of the cache."""
    files: list[Path]
    nbytes: int
    """Memory that they take."""


class Belongings:
    """The note of one cache, kept by its daemon."""

    def __init__(self, place: Path, name: str, cache: Path) -> None:
        """`place`: the directory in memory; `name`: of the device with the database, whose
        directory is `cache`. OSError; TimeoutError when somebody else keeps it."""
        self._cache = cache.absolute()
        self._path = place / f"{name}{_SUFFIX}"
        deadline = time.monotonic() + _DYING
        while (fd := self._take()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._path} is in use")
            time.sleep(_DYING_PAUSE)
        self._fd = fd

    def _take(self) -> int | None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        with suppress(FileNotFoundError):  # Removed before it was locked.
            if _lock(fd) and os.path.samestat(os.fstat(fd), self._path.stat()):
                return fd
        os.close(fd)
        return None

    def note(self, files: Iterable[Path]) -> None:
        """These are in memory now, as far as they are in that place; what was noted before and is
        there still (a ring that did not fit any more) is the same cache's. OSError."""
        names = {file.name for file in files if file.parent == self._path.parent}
        status = self._cache.stat()
        handles = _handles(self._cache)
        before = _read(self._fd)
        if before is not None and handles and before["handles"][:1] == [[*handles[0]]]:
            names |= {file.name for file in _leftover(self._path, before).files}
        told = {
            "directory": str(self._cache),
            "device": status.st_dev,
            "filesystem": os.statvfs(self._cache).f_fsid,
            "handles": handles,
            "files": sorted(names),
        }
        data = json.dumps(told).encode()
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def close(self) -> None:
        """Give the note up. It goes with the last of the files."""
        with suppress(OSError):
            told = _read(self._fd)
            if told is None or not _leftover(self._path, told).files:
                self._path.unlink(missing_ok=True)
        os.close(self._fd)


def sweep(places: Collection[Path]) -> list[Leftover]:
    """Remove what caches that are gone left in `places`; what was removed. Blocks as long as the
    disks where they were do."""
    removed = []
    for path, told in _notes(places):
        left = _leftover(path, told)
        if left.files and not _is_gone(told):
            continue
        for file in [*left.files, path]:
            file.unlink(missing_ok=True)
        removed += [left] if left.files else []
    return removed


def find(places: Collection[Path]) -> list[Leftover]:
    """What belongs to caches that are not where they were, and of which it cannot be told that they
    are gone."""
    found = [
        _leftover(path, told)
        for path, told in _notes(places)
        if not _is_gone(told) and not _is_there(Path(told["directory"]), path.stem)
    ]
    return [left for left in found if left.files]


def _notes(places: Collection[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """This user's notes of caches that nobody uses, each locked while it is looked at."""
    for path in [path for place in places for path in sorted(place.glob(f"*{_SUFFIX}"))]:
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                told = _read(fd)
                is_own = os.fstat(fd).st_uid == os.geteuid()
                if told is not None and is_own and _lock(fd):
                    yield path, told
            finally:
                os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: int) -> dict[str, Any] | None:
    """None: nobody has noted anything, or not all of it."""
    try:
        told = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
        [Path(each) for each in (told["directory"], *told["files"], *dict(told["handles"]))]
        int(told["device"]), int(told["filesystem"])
    except (ValueError, TypeError, KeyError):
        return None
    return dict(told)


def _handles(cache: Path) -> list[tuple[str, str]]:
    """Path and handle of the cache directory and those above it, as far as its filesystem goes;
    none where there are no handles."""
    found: list[tuple[str, str]] = []
    device = cache.stat().st_dev
    with suppress(OSError):
        for path in (cache, *cache.parents):
            if path.stat().st_dev != device:
                break
            found.append((str(path), handle_of(path)))
    return found


def _is_gone(told: dict[str, Any]) -> bool:
    """Whether a cache directory does not exist any more, anywhere. What cannot be told is no."""
    (_, handle), *above = told["handles"] or [("", "")]
    with suppress(OSError, ValueError):
        for path, expected in above:
            if os.path.lexists(path):
                return _is_same(told, Path(path), expected) and _lacks(Path(path), handle)
    return False


def _is_same(told: dict[str, Any], directory: Path, handle: str) -> bool:
    """Whether a directory is the one that was above the cache, in the same filesystem."""
    where = (directory.lstat().st_dev, os.statvfs(directory).f_fsid)
    return where == (told["device"], told["filesystem"]) and handle_of(directory) == handle


def _lacks(directory: Path, handle: str) -> bool:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return is_gone(handle, fd)
    finally:
        os.close(fd)


def _is_there(cache: Path, name: str) -> bool:
    """Whether the cache is in its place, as far as can be told."""
    try:
        return identity.read(cache) == name
    except NotADirectoryError:
        return False
    except OSError:
        return True


def _leftover(note: Path, told: dict[str, Any]) -> Leftover:
    named = [note.with_name(Path(name).name) for name in told["files"]]
    files = [file for file in named if file.suffix in _KINDS and file.is_file()]
    return Leftover(told["directory"], files, sum(_memory(file) for file in files))


def _memory(file: Path) -> int:
    with suppress(OSError):
        return file.lstat().st_blocks * 512
    return 0
