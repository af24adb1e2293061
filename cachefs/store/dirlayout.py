"""How a directory holds objects: paths, records, temporary files, locks, the walk in key order.

An object is the plain file `ROOT/KEY`. What a file cannot say (user metadata, the checksum) is its
*record*: JSON in the extended attribute `user.cachefs.object`, or beside it in `META` where the
filesystem has none. A record is valid for the size and modification time it names, so that a file
edited by somebody else is seen as the foreign file it is. A directory's record is a marker `KEY/`.

    ROOT/.cachefs/store/tmp/      files being written, renamed into place when they are complete
    ROOT/.cachefs/store/uploads/  multipart uploads
    ROOT/.cachefs/store/meta/     records, where extended attributes do not work
    ROOT/.cachefs/store/locks/    flock: one of these is held to change what is visible under a key
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from cachefs.errors import NotFound, Refused, StoreUnreachable, Transient
from cachefs.store.transfer import BUFFER, check_abandoned

INTERNAL = ".cachefs/store/"
"""Keys below this are not objects."""
ATTRIBUTE = "user.cachefs.object"
LOCKS = 64
COPY_STEP = 64 * 1024**2
"""Bytes per copy_file_range: often enough to notice that nobody waits any more."""
MAKE_PARENTS_TRIES = 20
STALE_DRAFT = 48 * 3600
"""Seconds after which a file that was being written is a crash's remains."""

_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.EAGAIN, errno.EINTR, errno.ECONNRESET, errno.EBUSY, errno.ENOLCK, errno.EMFILE,
    errno.ENFILE, errno.ENOMEM,
}  # fmt: skip
_NO_COPY_RANGE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}
_NO_ATTRIBUTES = {errno.ENOTSUP, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EPERM}


@contextlib.contextmanager
def store_errors(what: str, *, reading: bool = False) -> Iterator[None]:
    """OS errors of the store's own files as StoreError. `foo/bar` where `foo` is a file, or `foo`
    where it is a directory, is a missing object when `reading`, and cannot be written."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{what}: no such object") from error
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        if reading:
            raise NotFound(f"{what}: no such object") from error
        raise Refused(
            f"{what}: the store has a file and a directory of one name here, and can only hold one",
            hint="rename one of them, or use an S3 store",
        ) from error
    except OSError as error:
        kind = Transient if error.errno in _PASSING else Refused
        raise kind(f"{what}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Record:
    """What cachefs knows of a file that it wrote."""

    size: int
    mtime_ns: int
    crc64: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    def fits(self, stat: os.stat_result) -> bool:
        """Whether the file is still the one that was written."""
        return (self.size, self.mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def content_etag(crc64: int, size: int) -> str:
    """The etag of content that cachefs wrote: the same for the same bytes, anywhere."""
    return f"{crc64:016x}-{size:x}"


def foreign_etag(stat: os.stat_result) -> str:
    """The etag of a file that somebody else put there: changes with every edit."""
    return f"m{stat.st_mtime_ns:x}-{stat.st_size:x}"


class Layout:
    """Paths and records below one root directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.internal = root / INTERNAL
        self.tmp = self.internal / "tmp"
        self.uploads = self.internal / "uploads"
        self._meta = self.internal / "meta"
        self._locks = self.internal / "locks"
        self.attributes = True
        """Whether the filesystem keeps extended attributes; `create` finds out."""
        self.locking = True
        """Whether flock works; `create` finds out."""

    def create(self) -> None:
        """Make the internal directories, find out what works in them, and remove what crashes left
        behind long ago. Raises OSError."""
        for path in (self.tmp, self.uploads, self._meta, self._locks):
            path.mkdir(parents=True, exist_ok=True)
        for draft in self.tmp.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if draft.stat().st_mtime < time.time() - STALE_DRAFT:
                    draft.unlink()
        trial = self.temporary()
        try:
            trial.write_bytes(b"probe")
            self.attributes = _keeps_attributes(trial)
            self.locking = _locks_work(trial)
        finally:
            trial.unlink(missing_ok=True)

    def check_present(self) -> None:
        """Raise StoreUnreachable if the root is not there: then a missing file does not mean that
        an object was deleted (a network filesystem may be unmounted)."""
        if not self.internal.is_dir():
            raise StoreUnreachable(f"{self.root} is not there", hint="is its filesystem mounted?")

    def path(self, key: str) -> Path:
        """Where the object is, or the directory of a marker key. Raises Refused for keys that a
        directory cannot hold."""
        parts = key.removesuffix("/").split("/")
        if key.startswith(INTERNAL) or "\0" in key or any(p in ("", ".", "..") for p in parts):
            raise Refused(f"{key!r} cannot be a path below {self.root}")
        return self.root.joinpath(*parts)

    def temporary(self) -> Path:
        """A name for a file that is being written."""
        return self.tmp / secrets.token_hex(12)

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Nobody else, in this process or another, changes what is visible under the key."""
        if not self.locking:
            yield
            return
        number = hashlib.sha256(key.encode()).digest()[0] % LOCKS
        fd = os.open(self._locks / f"{number:02}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def write_record(self, path: Path, key: str, record: Record) -> None:
        """Attach a record to the file at `path`, which is or will become the object `key`."""
        text = json.dumps(asdict(record)).encode()
        if self.attributes:
            try:
                os.setxattr(path, ATTRIBUTE, text)
                return
            except OSError as error:
                if error.errno not in _NO_ATTRIBUTES:
                    raise
        # Both the record of the file that is there and that of the one about to replace it.
        older: list[Record] = []
        with contextlib.suppress(OSError):
            about = self.path(key).stat()
            older = [old for old in self._beside(key) if old.fits(about)][:1]
        beside = self._record_path(key)
        beside.parent.mkdir(exist_ok=True)
        draft = self.temporary()
        draft.write_text(json.dumps([json.loads(text), *map(asdict, older)]))
        os.replace(draft, beside)

    def read_record(self, file: Path | int, key: str, stat: os.stat_result) -> Record | None:
        """The record of a file, given as path or descriptor; None for a foreign file."""
        found = self._attached(file)
        records = [found] if found is not None else self._beside(key)
        return next((record for record in records if record.fits(stat)), None)

    def marker(self, key: str) -> Record | None:
        """The record of a directory marker; None if the directory is only implied."""
        path = self.path(key)
        if not path.is_dir():
            return None
        records = [self._attached(path), *self._beside(key)]
        return next((record for record in records if record is not None), None)

    def drop_record(self, path: Path, key: str) -> None:
        """Forget the record of a removed object or marker."""
        if key.endswith("/"):
            with contextlib.suppress(OSError):
                os.removexattr(path, ATTRIBUTE)
        self._record_path(key).unlink(missing_ok=True)

    def place(self, draft: Path, key: str) -> None:
        """Rename a complete file to its object's path, directories made as needed, durably. Raises
        OSError; an empty directory in the way gives way."""
        path = self.path(key)
        for attempt in range(MAKE_PARENTS_TRIES):
            made = self._make_parents(path)
            try:
                self._replace(draft, path)
                break
            except FileNotFoundError:  # a delete removed the directory that seemed empty
                if attempt == MAKE_PARENTS_TRIES - 1 or not draft.exists():
                    raise
        for folder in {path.parent, *made}:
            sync_directory(folder)

    def prune(self, path: Path) -> None:
        """Remove directories that became empty, from the parent of `path` upwards, up to a
        marker."""
        for folder in path.parents:
            if folder == self.root or self.root not in folder.parents:
                return
            key = f"{folder.relative_to(self.root)}/"
            try:
                if self.marker(key) is not None:
                    return
                folder.rmdir()
            except OSError:
                return

    def walk(self, prefix: str, delimiter: bool, after: str) -> Iterator[tuple[str, Path | None]]:
        """Keys from `prefix` on in key order, those up to `after` left out: (key, path) of objects
        and markers; with `delimiter`, (key with a slash, None) in place of what is below."""
        folder = prefix.rpartition("/")[0]
        base = f"{folder}/" if folder else ""
        try:
            path = self.path(base) if base else self.root
        except Refused:
            return
        if base == prefix and base > after and base and self.marker(base) is not None:
            yield base, path
        yield from self._walk_below(path, base, prefix, delimiter, after)

    def _walk_below(
        self, path: Path, base: str, prefix: str, delimiter: bool, after: str
    ) -> Iterator[tuple[str, Path | None]]:
        for key, entry in sorted(self._entries(path, base)):
            if not key.startswith(prefix):
                continue
            # A directory is behind us only if everything below it is.
            behind = key <= after and not (key.endswith("/") and after.startswith(key))
            if behind or key == INTERNAL:
                continue
            if not key.endswith("/"):
                yield key, entry
            elif delimiter:
                if key > after:
                    yield key, None
            else:
                if key > after and self.marker(key) is not None:
                    yield key, entry
                yield from self._walk_below(entry, key, prefix, delimiter, after)

    @staticmethod
    def _entries(path: Path, base: str) -> Iterator[tuple[str, Path]]:
        try:
            found = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in found:
            try:
                entry.name.encode()
            except UnicodeEncodeError:
                continue  # not UTF-8, so not a key
            if entry.is_dir(follow_symlinks=False):
                yield f"{base}{entry.name}/", Path(entry.path)
            elif entry.is_file():
                yield base + entry.name, Path(entry.path)

    def _attached(self, file: Path | int) -> Record | None:
        try:
            return _parse(json.loads(os.getxattr(file, ATTRIBUTE)))
        except (OSError, ValueError):
            return None

    def _record_path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._meta / name[:2] / f"{name}.json"

    def _beside(self, key: str) -> list[Record]:
        try:
            items = json.loads(self._record_path(key).read_text())
        except (OSError, ValueError):
            return []
        parsed = (_parse(item) for item in items)
        return [record for record in parsed if record is not None]

    def _make_parents(self, path: Path) -> list[Path]:
        """Make missing directories; returns those whose content changed by it."""
        missing = [folder for folder in path.parents if not folder.exists()]
        for attempt in range(MAKE_PARENTS_TRIES):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                break
            except FileExistsError:  # perhaps gone, with its last file, before it was looked at
                if attempt == MAKE_PARENTS_TRIES - 1:
                    raise
        return [folder.parent for folder in missing]

    @staticmethod
    def _replace(draft: Path, path: Path) -> None:
        try:
            os.replace(draft, path)
        except IsADirectoryError:
            with contextlib.suppress(OSError):
                path.rmdir()
            os.replace(draft, path)


def _parse(item: Any) -> Record | None:
    try:
        return Record(**item)
    except TypeError:
        return None


def _keeps_attributes(path: Path) -> bool:
    try:
        os.setxattr(path, ATTRIBUTE, b"{}")
    except OSError:
        return False
    return True


def _locks_work(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return False
    return True


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write a new file; returns the CRC64NVME and size of what was written. Not synced yet."""
    value = size = 0
    with open(path, "xb", buffering=0) as file:
        for piece in content:
            value = crc64nvme(piece, value)
            size += len(piece)
            write_all(file.fileno(), piece)
    return value, size


def append_range(target: int, source: int, start: int, size: int) -> None:
    """Append bytes of one descriptor's file to another's, by reference where the filesystem can.
    Raises OSError, EIO if the source is too short."""
    end = start + size
    while start < end:
        check_abandoned()
        count = _copy_some(target, source, start, min(COPY_STEP, end - start))
        if count == 0:
            raise OSError(errno.EIO, f"ends at {start}, expected {end}")
        start += count


def _copy_some(target: int, source: int, start: int, size: int) -> int:
    try:
        return os.copy_file_range(source, target, size, offset_src=start)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
    piece = os.pread(source, BUFFER, start)[:size]
    write_all(target, piece)
    return len(piece)


def write_all(fd: int, piece: bytes | memoryview) -> None:
    """Write all of a buffer at the descriptor's position."""
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]


def sync_file(path: Path) -> None:
    """Make a file's content and attributes durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames and creations in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
