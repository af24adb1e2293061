"""A directory as a store: `file:///dir`, typically on a network or parallel filesystem.

Objects are plain files that any program can read; `dirlayout` says where everything else is. Writes
go to a temporary file, are synced, and appear by rename. Conditions are checked under a lock file's
flock, so they hold against every cachefs on the same filesystem, also on other hosts where flock
works between hosts; not against other programs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from cachefs.errors import (
    Corrupt,
    NoSuchUpload,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
    Transient,
    UsageError,
)
from cachefs.store import diruploads
from cachefs.store.base import (
    LIST_PAGE,
    Body,
    Capabilities,
    Failures,
    Listing,
    ObjectInfo,
    PartReceipt,
    Receipts,
    Received,
    Uploads,
)
from cachefs.store.conditions import Condition, Intent, settle, whole
from cachefs.store.dirlayout import (
    Layout,
    Record,
    append_range,
    content_etag,
    foreign_etag,
    store_errors,
    sync_directory,
    sync_file,
    write_file,
)
from cachefs.store.diruploads import Upload
from cachefs.store.receiving import receive
from cachefs.store.transfer import BUFFER, check_abandoned, pieces


class DirectoryStore:
    """One root directory. Methods as in ObjectStore. Thread-safe: the lock guards the first
    probe."""

    def __init__(self, root: Path) -> None:
        self.url = root.as_uri()
        self._layout = Layout(root)
        self._lock = threading.Lock()
        self._capabilities: Capabilities | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> DirectoryStore:
        """From the plain values of section `store`. Raises UsageError for a relative URL."""
        url = urlsplit(str(settings["url"]))
        if url.netloc or not url.path.startswith("/"):
            raise UsageError(f"store URL {settings['url']!r} is not of the form file:///DIRECTORY")
        return cls(Path(unquote(url.path)))

    def probe(self, owner: str = "") -> Capabilities:
        """See ObjectStore.probe. Nobody has to tidy up."""
        with self._lock:
            if self._capabilities is None:
                self._capabilities = self._examine()
            return self._capabilities

    def adopt(self, capabilities: Capabilities) -> None:
        """See ObjectStore.adopt. Finding out costs less than being told."""

    def reload(self) -> None:
        """See ObjectStore.reload. There are no credentials."""

    def list(
        self,
        prefix: str,
        *,
        delimiter: str | None = None,
        token: str | None = None,
        limit: int = LIST_PAGE,
    ) -> Listing:
        """See ObjectStore.list."""
        if delimiter not in (None, "", "/"):
            raise Refused(f"{self.url} lists by '/' only, not by {delimiter!r}")
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        with self._operation("LIST", prefix, reading=True):
            found = self._layout.walk(prefix, delimiter == "/", token or "")
            page = [*itertools.islice(found, limit + 1)]
            if not page:
                self._layout.check_present()
            for key, path in page[:limit]:
                if path is None:
                    prefixes.append(key)
                elif (info := self._present(key)) is not None:
                    objects.append(info)
        more = page[limit - 1][0] if len(page) > limit else None
        return Listing(tuple(objects), tuple(prefixes), more)

    def head(self, key: str) -> ObjectInfo:
        """See ObjectStore.head."""
        with self._operation("HEAD", key, reading=True):
            present = self._present(key)
            if present is None:
                raise NotFound(f"HEAD {key}: no such object")
            return present

    def get_bytes(
        self, key: str, start: int = 0, end: int | None = None, *, if_match: str | None = None
    ) -> bytes:
        """See ObjectStore.get_bytes."""
        with self._reading(key, if_match) as (file, info):
            size = max(0, min(info.size, info.size if end is None else end) - start)
            data = b"".join(_pieces_of(file, start, size))
        if len(data) != size:
            raise Transient(f"GET {key}: {len(data)} of {size} bytes came")
        return data

    def get_into(
        self,
        key: str,
        path: str,
        start: int,
        end: int,
        *,
        at: int | None = None,
        if_match: str | None = None,
    ) -> Received:
        """See ObjectStore.get_into."""
        with self._reading(key, if_match) as (file, info):
            size = max(0, min(info.size, end) - start)
            file.seek(start)
            got = receive(file, path, start if at is None else at, size)
        if got.size != size:
            raise Transient(f"GET {key}: {got.size} of {size} bytes came")
        return got

    def put(
        self,
        key: str,
        body: Body,
        *,
        metadata: Mapping[str, str] | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
        crc64: int | None = None,
    ) -> ObjectInfo:
        """See ObjectStore.put. A marker (`key/`) has no content."""
        condition, tags = Condition(if_none_match, if_match), dict(metadata or {})
        with self._operation("PUT", key), self._draft() as draft:
            self._layout.path(key)
            value, size = write_file(draft, pieces(body))
            if crc64 is not None and value != crc64:
                raise Corrupt(f"local bytes have CRC64NVME {value:016x}, expected {crc64:016x}")
            if key.endswith("/"):
                return self._put_marker(key, size, tags, condition)
            return self._publish(draft, key, Intent.of(size, value, tags), condition)

    def copy(
        self,
        src: str,
        dst: str,
        *,
        metadata: Mapping[str, str] | None = None,
        if_source_match: str | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        """See ObjectStore.copy."""
        condition = Condition(if_none_match, if_match)
        if src.endswith("/"):
            tags = self.head(src).metadata if metadata is None else metadata
            return self.put(dst, b"", metadata=tags, if_none_match=if_none_match, if_match=if_match)
        with self._reading(src, if_source_match) as (file, source):
            tags = dict(source.metadata if metadata is None else metadata)
            with self._operation("COPY", dst), self._draft() as draft:
                self._layout.path(dst)
                value = source.crc64
                if src == dst and value is not None:
                    return self._retag(source, Intent.of(source.size, value, tags), condition)
                if value is None:
                    value, _ = write_file(draft, _pieces_of(file, 0, source.size))
                else:
                    with open(draft, "xb", buffering=0) as target:
                        append_range(target.fileno(), file.fileno(), 0, source.size)
                return self._publish(draft, dst, Intent.of(source.size, value, tags), condition)

    def delete(self, keys: Iterable[str]) -> Failures:
        """See ObjectStore.delete."""
        self.probe()
        self._layout.check_present()
        failures: Failures = {}
        changed: set[Path] = set()
        for key in keys:
            try:
                with contextlib.suppress(NotFound), self._operation("DELETE", key, reading=True):
                    self._delete_one(key)
                    changed.add(self._layout.path(key).parent)
            except StoreError as error:
                failures[key] = error
        for folder in changed:
            with store_errors(f"DELETE in {folder}"):
                _sync_nearest(folder)
        return failures

    def create_upload(self, key: str, metadata: Mapping[str, str] | None = None) -> str:
        """See ObjectStore.create_upload."""
        with self._operation("CREATE UPLOAD", key):
            self._layout.path(key)
            return diruploads.create_upload(self._layout, key, metadata or {})

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartReceipt:
        """See ObjectStore.upload_part."""
        with self._operation("PUT PART", key):
            return Upload(self._layout, key, upload_id).add(number, pieces(body))

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        src: str,
        start: int,
        end: int,
        *,
        if_source_match: str | None = None,
    ) -> PartReceipt:
        """See ObjectStore.copy_part."""
        with self._reading(src, if_source_match) as (file, source):
            if source.size < end:
                raise PreconditionFailed(f"{src} is shorter than {end} bytes")
            with self._operation("COPY PART", key):
                content = _pieces_of(file, start, end - start)
                return Upload(self._layout, key, upload_id).add(number, content)

    def list_parts(self, key: str, upload_id: str) -> Receipts:
        """See ObjectStore.list_parts."""
        with self._operation("LIST PARTS", key):
            return Upload(self._layout, key, upload_id).parts()

    def list_uploads(self, prefix: str) -> Uploads:
        """See ObjectStore.list_uploads."""
        with self._operation("LIST UPLOADS", prefix):
            return diruploads.list_uploads(self._layout, prefix)

    def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[PartReceipt],
        *,
        if_none_match: bool = False,
        if_match: str | None = None,
        crc64: int | None = None,
        size: int | None = None,
    ) -> ObjectInfo:
        """See ObjectStore.complete_upload."""
        condition = Condition(if_none_match, if_match)
        total, joined = whole(key, parts, size, crc64)
        if joined is None:
            raise Corrupt(f"a part of {key} has no checksum")
        with self._operation("COMPLETE UPLOAD", key), self._draft() as draft:
            try:
                upload = Upload(self._layout, key, upload_id)
                upload.assemble(parts, draft)
            except NoSuchUpload as error:
                intent = Intent.of(total, joined, None)
                return settle(self._present(key), intent, Condition(), error, error)
            intent = Intent.of(total, joined, upload.metadata)
            made = self._publish(draft, key, intent, condition)
            upload.remove()
            return made

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See ObjectStore.abort_upload."""
        with contextlib.suppress(NoSuchUpload), self._operation("ABORT UPLOAD", key):
            Upload(self._layout, key, upload_id).remove()

    def _examine(self) -> Capabilities:
        root, layout = self._layout.root, self._layout
        if not root.is_dir():
            what = "is not a directory" if root.exists() else "does not exist"
            raise Refused(
                f"store directory {root} {what}", hint="create it, or mount the filesystem it is on"
            )
        with store_errors(str(root)):
            layout.create()
        lacks = [] if layout.locking else ["no flock (conditions are not atomic)"]
        lacks += [] if layout.attributes else ["no extended attributes (metadata is kept beside)"]
        return Capabilities(
            conditional_put=layout.locking,
            conditional_complete=layout.locking,
            conditional_copy=layout.locking,
            crc64=True,
            copy_part=True,
            note="; ".join(lacks),
        )

    @contextlib.contextmanager
    def _operation(self, verb: str, key: str, *, reading: bool = False) -> Iterator[None]:
        """Errors as StoreError; a missing object is believed only while the store itself is
        there."""
        self.probe()
        try:
            with store_errors(f"{verb} {key}", reading=reading):
                yield
        except NotFound:
            self._layout.check_present()
            raise

    @contextlib.contextmanager
    def _draft(self) -> Iterator[Path]:
        draft = self._layout.temporary()
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reading(self, key: str, if_match: str | None) -> Iterator[tuple[FileIO, ObjectInfo]]:
        """The object's file, which stays what it is whatever happens to the name."""
        with self._operation("GET", key, reading=True), contextlib.ExitStack() as stack:
            if key.endswith("/"):
                file: Any = stack.enter_context(open(os.devnull, "rb", buffering=0))
                info = self.head(key)
            else:
                file = stack.enter_context(open(self._layout.path(key), "rb", buffering=0))
                info = self._describe(key, file.fileno(), os.fstat(file.fileno()))
            Condition(if_match=if_match).check(info, key)
            yield file, info

    def _present(self, key: str) -> ObjectInfo | None:
        path = self._layout.path(key)
        try:
            about = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if key.endswith("/"):
            record = self._layout.marker(key)
            if record is None:
                return None
            return ObjectInfo(key, 0, content_etag(0, 0), about.st_mtime_ns, record.metadata, 0)
        if not stat.S_ISREG(about.st_mode):
            return None
        return self._describe(key, path, about)

    def _describe(self, key: str, file: Path | int, about: os.stat_result) -> ObjectInfo:
        record = self._layout.read_record(file, key, about)
        if record is None:
            return ObjectInfo(key, about.st_size, foreign_etag(about), about.st_mtime_ns)
        etag = content_etag(record.crc64, record.size)
        return ObjectInfo(
            key, record.size, etag, record.mtime_ns, dict(record.metadata), record.crc64
        )

    def _publish(self, draft: Path, key: str, intent: Intent, condition: Condition) -> ObjectInfo:
        """Make a complete draft the object, if the condition holds."""
        assert intent.crc64 is not None
        now = time.time_ns()
        os.utime(draft, ns=(now, now))  # filesystems' clocks tick too coarsely to tell two writes
        about = draft.stat()
        if about.st_size != intent.size:
            raise Corrupt(f"{key}: {about.st_size} bytes were written, expected {intent.size}")
        tags = dict(intent.metadata or {})
        record = Record(intent.size, about.st_mtime_ns, intent.crc64, tags)
        sync_file(draft)  # now, since others may wait for the lock
        with self._layout.locked(key):
            present = self._present(key)
            try:
                condition.check(present, key)
            except PreconditionFailed as error:
                return settle(present, intent, condition, error, error)
            self._layout.write_record(draft, key, record)
            sync_file(draft)
            self._layout.place(draft, key)
        etag = content_etag(intent.crc64, intent.size)
        return ObjectInfo(key, intent.size, etag, about.st_mtime_ns, tags, intent.crc64)

    def _retag(self, known: ObjectInfo, intent: Intent, condition: Condition) -> ObjectInfo:
        """Give an object other metadata; its content stays where it is."""
        tags = dict(intent.metadata or {})
        path = self._layout.path(known.key)
        with self._layout.locked(known.key):
            present = self._present(known.key)
            try:
                condition.check(present, known.key)
                Condition(if_match=known.etag).check(present, known.key)
            except PreconditionFailed as error:
                return settle(present, intent, condition, error, error)
            record = Record(known.size, known.mtime_ns, known.crc64 or 0, tags)
            self._layout.write_record(path, known.key, record)
            sync_file(path)
        return replace(known, metadata=tags)

    def _put_marker(
        self, key: str, size: int, tags: dict[str, str], condition: Condition
    ) -> ObjectInfo:
        if size:
            raise Refused(f"{key} is a directory and cannot have content here")
        path = self._layout.path(key)
        with self._layout.locked(key):
            condition.check(self._present(key), key)
            path.mkdir(parents=True, exist_ok=True)
            self._layout.write_record(path, key, Record(0, 0, 0, tags))
            sync_directory(path)
            sync_directory(path.parent)
        return ObjectInfo(key, 0, content_etag(0, 0), path.stat().st_mtime_ns, tags, 0)

    def _delete_one(self, key: str) -> None:
        path = self._layout.path(key)
        with self._layout.locked(key):
            if key.endswith("/"):
                self._layout.drop_record(path, key)
                with contextlib.suppress(OSError):
                    path.rmdir()
            else:
                path.unlink()
                self._layout.drop_record(path, key)
        self._layout.prune(path)


def _sync_nearest(folder: Path) -> None:
    """Sync a directory or, where others have pruned it meanwhile, the first above it that is
    there."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError):
            sync_directory(path)
            return


def _pieces_of(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    """Bytes of an open object, buffer by buffer; fewer if it is cut off meanwhile."""
    end = start + size
    while start < end and (piece := os.pread(file.fileno(), min(BUFFER, end - start), start)):
        check_abandoned()
        yield piece
        start += len(piece)
