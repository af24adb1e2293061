"""Getting files out of a cache whose database is beyond repair.

Every cache file is written to a plain directory, under its path as far as that is known: from the
database if SQLite reads it, else from what is left of its pages, else from the note that a cache
file bears of the path under which it was last closed, else as `gen-N`. Holes stay holes. The cache
is only read. Of a file that is partly in the store the ranges that lack are told, and the objects
that have them: what is written out has holes there.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cachefs.cache import marks
from cachefs.cache.clone import clone_file
from cachefs.errors import CachefsError, UsageError
from cachefs.fsck.carve import carve
from cachefs.fsck.check import copy_database, locked
from cachefs.fsck.place import Place, home_of, number
from cachefs.meta import ring, wal
from cachefs.meta.inspection import Inspection
from cachefs.model.spans import Span

_DEEPEST = 4096
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Away:
    """Bytes [start, end) of a file that its cache file lacks."""

    start: int
    end: int
    key: str
    """The object that has them, below the store's prefix."""
    offset: int
    """Where in it they begin."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a cache file."""

    path: bytes | None
    state: str
    is_current: bool
    """False for an older version of a file than the one that is shown."""
    away: tuple[Away, ...] = ()
    """What of it is in the store only."""


@dataclass(slots=True)
class Saved:
    """One file that was written out."""

    path: str
    """Below the directory asked for."""
    source: str
    size: int
    state: str
    known_by: str
    """How its path was found: database, pages, note, or nothing."""
    in_store: list[Away] = field(default_factory=list)
    """Ranges that are in the store and not here: holes in what was written out."""


@dataclass(slots=True)
class Salvage:
    """All that was done."""

    directory: str
    files: list[Saved] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What could not be read or written, with the reason."""

    def as_json(self) -> dict[str, Any]:
        """Stable keys."""
        return {
            "directory": self.directory,
            "files": [asdict(each) for each in self.files],
            "failed": self.failed,
            "bytes": sum(each.size for each in self.files),
        }


def salvage(
    directories: Sequence[Path],
    target: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Salvage:
    """Write every cache file of the cache in `directories` below `target`.

    `progress` is called with (files done, files in all). Raises NotCheckable, UsageError, OSError.
    """
    with locked(directories) as places:
        _make(target, places)
        done = Salvage(str(target))
        _bring_to_log(home_of(places).database, done)
        known, source = _knowledge(places)
        numbers = [(place, file) for place in places for file in sorted(place.numbers())]
        # What is shown now has the right to its name; older versions get another.
        numbers.sort(key=lambda each: not _is_current(known.get((each[0].index, each[1]))))
        for count, (place, file) in enumerate(numbers, 1):
            _save(place, file, known.get((place.index, file)), source, target, done)
            progress(count, len(numbers))
        return done


def _bring_to_log(database: Path, done: Salvage) -> None:
    """What a daemon that was killed had committed while the disk stood still: names, perhaps."""
    try:
        left = ring.recover(database)
    except OSError as error:
        done.failed.append(f"{database}: changes that wait in memory are left out: {error}")
    else:
        left.close()
        done.failed += [left.note] if left.note and not left.is_gone else []


def _make(target: Path, places: Sequence[Place]) -> None:
    if any(target.resolve().is_relative_to(place.directory.resolve()) for place in places):
        raise UsageError(f"{target} lies inside the cache", hint="name a directory elsewhere")
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise UsageError(f"{target} is not empty", hint="name a new directory")


def _is_current(known: Known | None) -> bool:
    return known is not None and known.is_current


# -- what is known --------------------------------------------------------------------------------


def _knowledge(places: Sequence[Place]) -> tuple[dict[tuple[int, int], Known], str]:
    """((device, file) -> what is known, where that comes from)."""
    database = home_of(places).database
    with tempfile.TemporaryDirectory(prefix="cachefs-salvage-") as scratch:
        if database.exists() and database.stat().st_size:
            try:
                return _by_sqlite(database, Path(scratch), places), "database"
            except (sqlite3.Error, CachefsError, ValueError, TypeError):
                pass  # Its pages are all that is left.
    return _by_pages(database), "pages"


def _by_sqlite(
    database: Path, scratch: Path, places: Sequence[Place]
) -> dict[tuple[int, int], Known]:
    if wal.examine(database).damage is not None:
        raise CachefsError("what was committed last is not in it")
    inspection = Inspection(copy_database(database, scratch, with_log=True))
    try:
        if inspection.damage() is not None:
            raise CachefsError("it is damaged")
        inspection.complete()
        number(places, inspection.devices())
        paths, away = _Paths(inspection.names()), _away(inspection)
        known = {}
        for row in inspection.files():
            if row.copy_device is not None and row.copy_file is not None:
                second = Known(paths.of(row.ino), row.state, False)
                known[row.copy_device, row.copy_file] = second
            if not row.grows:
                first = Known(paths.of(row.ino), row.state, row.is_current, away.get(row.gen, ()))
                known[row.device, row.file] = first
        return known
    finally:
        inspection.close()


def _away(inspection: Inspection) -> dict[int, tuple[Away, ...]]:
    """Generation -> what of it is in the store only."""
    found = {
        gen: tuple(Away(start, end, key, start) for start, end, key in ranges)
        for gen, ranges in inspection.partial().items()
    }
    for gen, ranges in inspection.away().items():
        spans = [Span(key, gen, start, end, None, None, 0) for start, end, key in ranges]
        found[gen] = tuple(Away(each.start, each.end, each.object, each.offset) for each in spans)
    return found


def _by_pages(database: Path) -> dict[tuple[int, int], Known]:
    found = carve(database)
    paths = _Paths(found.names.values())
    known: dict[tuple[int, int], Known] = {}
    for gen, (ino, device, file, state) in sorted(found.generations.items()):
        current = found.current.get(ino, gen) == gen
        known[device, file] = Known(paths.of(ino), state.decode(), current)
    return known


class _Paths:
    """Paths of inodes, by all names that are known."""

    def __init__(self, names: Iterable[tuple[int, bytes, int]]) -> None:
        self._names: Mapping[int, tuple[int, bytes]] = {
            ino: (parent, bytes(name)) for parent, name, ino in names
        }

    def of(self, ino: int) -> bytes | None:
        """As much of an inode's path as can be followed; None when not even its name is known."""
        parts: list[bytes] = []
        while ino != 1 and ino in self._names and len(parts) < _DEEPEST:
            ino, name = self._names[ino]
            parts.append(name)
        if not parts:
            return None
        if ino != 1:
            parts.append(f"inode-{ino}".encode())  # Its directory's name is lost.
        return b"/".join(reversed(parts))


# -- writing out ----------------------------------------------------------------------------------


def _save(
    place: Place, file: int, known: Known | None, source: str, target: Path, done: Salvage
) -> None:
    path = place.path(file)
    wanted, known_by = known.path if known is not None else None, source
    if wanted is None:
        wanted, known_by = marks.path_of(path), "note"
    if wanted is None:
        wanted, known_by = f"gen-{file}".encode(), "nothing"
    try:
        relative = _free(target, _safe(wanted), file)
        size = _copy(path, target / relative)
    except OSError as error:
        done.failed.append(f"{path}: {error.strerror}")
        return
    state = known.state if known is not None else "unknown"
    shown = os.fsencode(relative).decode(errors="backslashreplace")
    away = list(known.away) if known is not None else []
    done.files.append(Saved(shown, str(path), size, state, known_by, away))


def _safe(path: bytes) -> PurePosixPath:
    """A relative path that leads nowhere but down, whatever a broken database says."""
    parts = [part.replace(b"\0", b"?")[:255] for part in path.split(b"/")]
    kept = [os.fsdecode(part) for part in parts if part not in (b"", b".", b"..")]
    return PurePosixPath(*kept) if kept else PurePosixPath("unnamed")


def _free(target: Path, wanted: PurePosixPath, file: int) -> Path:
    """Where to write: a name that is taken, by a file or for a directory, gets the number too."""
    for candidate in _candidates(wanted, file):
        try:
            (target / candidate).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            continue
        if not os.path.lexists(target / candidate):
            return candidate
    return Path(f"gen-{file}")


def _candidates(wanted: PurePosixPath, file: int) -> Iterator[Path]:
    yield Path(wanted)
    yield Path(wanted.with_name(f"{wanted.name[:200]}.gen-{file}"))
    yield Path(f"gen-{file}-{wanted.name[:200]}")


def _copy(source: Path, target: Path) -> int:
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        writer = os.open(target, _FLAGS, 0o600)
        try:
            clone_file(reader, writer)
            found = os.fstat(reader)
            os.utime(writer, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)
    return found.st_size
