"""A cache directory that no daemon uses: locked, and looked at without a change."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cachefs.cache import identity, system
from cachefs.cache.device import SALVAGED
from cachefs.cache.lock import DeviceLock
from cachefs.errors import CacheError
from cachefs.fsck.report import UNCHECKED

_OWN = {"LOCK", "device", "device.new", "heartbeat", "meta", "files", SALVAGED}
_OWN_META = {
    *("cachefs.db", "cachefs.db-wal", "cachefs.db-shm", "cachefs.db-ring", "cachefs.new"),
    *("reserve", "journal", "journal.new"),
}
_MODE = 0o700


class NotCheckable(CacheError):
    """The directory is no cache, or a daemon uses it."""

    exit_code = UNCHECKED


class Place:
    """One cache directory, locked until `close`. `index` is its number in the mount's order."""

    def __init__(self, index: int, directory: Path) -> None:
        """Lock it. NotCheckable."""
        self.index = index
        self.directory = directory.absolute()
        if not (self.directory / "files").is_dir():
            raise NotCheckable(
                f"{directory} is no cache directory: it has no `files` in it",
                hint="give the directory that `--cache-dir` names",
            )
        self._lock = _lock(self.directory)

    def close(self) -> None:
        """Let daemons have it."""
        self._lock.release()

    @property
    def database(self) -> Path:
        """Where the database is, if it is in this directory."""
        return self.directory / "meta" / "cachefs.db"

    @property
    def outlives_power(self) -> bool:
        """Whether it is not in RAM."""
        kind = system.device_kind(system.filesystem_type(self.directory))
        return kind is not system.DeviceKind.RAM

    def path(self, file: int) -> Path:
        """Where the cache file of that number belongs."""
        return self.directory / "files" / f"{file & 0xFF:02x}" / str(file)

    def numbers(self) -> set[int]:
        """Numbers of all that lie where cache files belong."""
        return {int(path.name) for path in self._below() if self._is_placed(path)}

    def foreign(self) -> Iterator[Path]:
        """What is in the directory and none of ours."""
        yield from (path for path in self.directory.iterdir() if path.name not in _OWN)
        meta = self.directory / "meta"
        if meta.is_dir():
            yield from (path for path in meta.iterdir() if path.name not in _OWN_META)
        yield from (path for path in self._below() if not self._is_placed(path))

    def _below(self) -> Iterator[Path]:
        for shard in sorted((self.directory / "files").iterdir()):
            if shard.is_dir() and not shard.is_symlink():
                yield from sorted(shard.iterdir())
            else:
                yield shard

    def _is_placed(self, path: Path) -> bool:
        number = path.name.isascii() and path.name.isdigit() and len(path.name) < 19
        return number and self.path(int(path.name)) == path

    def set_aside(self, path: Path, *, copy: bool = False) -> Path:
        """Move (or copy) a file to `salvaged/`; where it is now."""
        directory = self.directory / SALVAGED
        directory.mkdir(_MODE, exist_ok=True)
        name = path.name if path.name.startswith("cachefs.db") else f"gen-{path.name}"
        target = directory / f"{name}.{time.time_ns()}"
        if copy:
            shutil.copy2(path, target)
        else:
            os.rename(path, target)
        return target


def home_of(places: Sequence[Place]) -> Place:
    """The one with the database; the first one if there is none."""
    return next((place for place in places if place.database.exists()), places[0])


def number(places: Sequence[Place], names: list[str] | None) -> None:
    """Give places the numbers that the database knows them by: `names` are those of its devices,
    None if it goes by their order. What it does not know gets a number that it does not use.
    NotCheckable."""
    if names is None:
        if home_of(places) is not places[0]:
            raise NotCheckable(
                f"{places[0].directory} has no database, another one has",
                hint="name the cache directories in the order in which the mount does",
            )
        return
    for extra, place in enumerate(places):
        name = identity.read(place.directory)
        place.index = names.index(name) if name in names else len(names) + extra


class _ReadOnlyLock:
    """On a filesystem that can only be read."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Give it up."""
        os.close(self._fd)


def _lock(directory: Path) -> DeviceLock | _ReadOnlyLock:
    path = directory / "LOCK"
    try:
        return DeviceLock(path)
    except CacheError as error:
        raise NotCheckable(str(error), hint="unmount that filesystem first") from error
    except OSError as error:
        if error.errno != errno.EROFS:
            raise NotCheckable(f"{path}: {error.strerror}") from error
    try:
        return _ReadOnlyLock(path)
    except OSError as error:
        raise NotCheckable(f"{path}: {error.strerror}") from error
