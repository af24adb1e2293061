"""Multipart uploads of a directory store: a directory per upload, a file per part.

A part's name holds all that is to be known of it (number, CRC64NVME, size), so that a part is
either there whole with its receipt or not at all.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cachefs.errors import NoSuchUpload
from cachefs.store.base import PartReceipt, UploadInfo, Uploads
from cachefs.store.dirlayout import (
    Layout,
    append_range,
    content_etag,
    sync_directory,
    sync_file,
    write_file,
)

_MANIFEST = "upload.json"
_PART_NAME = re.compile(r"(\d{5})-([0-9a-f]{16})-([0-9a-f]+)")
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")


class Upload:
    """One unfinished upload. Methods raise OSError for trouble with the filesystem."""

    def __init__(self, layout: Layout, key: str, upload_id: str) -> None:
        self._layout = layout
        self._key = key
        self._folder = layout.uploads / upload_id
        manifest = _manifest(self._folder) if _UPLOAD_ID.fullmatch(upload_id) else None
        if manifest is None or manifest["key"] != key:
            raise self._gone()
        self.metadata: dict[str, str] = manifest["metadata"]

    def add(self, number: int, content: Iterable[bytes | memoryview]) -> PartReceipt:
        """Store a part, in place of an earlier one of the same number."""
        draft = self._layout.temporary()
        try:
            value, size = write_file(draft, content)
            sync_file(draft)
            final = self._folder / f"{number:05}-{value:016x}-{size:x}"
            os.replace(draft, final)
            sync_directory(self._folder)
            for older in self._folder.glob(f"{number:05}-*"):
                if older != final:
                    older.unlink(missing_ok=True)
        except FileNotFoundError as error:
            raise self._gone() from error
        finally:
            draft.unlink(missing_ok=True)
        return PartReceipt(number, content_etag(value, size), size, value)

    def parts(self) -> list[PartReceipt]:
        """What arrived, by number."""
        return [receipt for receipt, _ in self._stored()]

    def assemble(self, parts: Sequence[PartReceipt], draft: Path) -> None:
        """Write the parts one after the other into a new file, synced."""
        stored = {(part.number, part.etag): path for part, path in self._stored()}
        with open(draft, "xb", buffering=0) as target:
            for part in parts:
                path = stored.get((part.number, part.etag))
                if path is None:
                    raise NoSuchUpload(f"part {part.number} of {self._key} is not there")
                try:
                    with open(path, "rb", buffering=0) as source:
                        append_range(target.fileno(), source.fileno(), 0, part.size)
                except FileNotFoundError as error:
                    raise self._gone() from error

    def remove(self) -> None:
        """Forget the upload. Its manifest goes first, so that a half-removed one is gone."""
        (self._folder / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stored(self) -> Iterator[tuple[PartReceipt, Path]]:
        try:
            paths = sorted(self._folder.iterdir())
        except FileNotFoundError as error:
            raise self._gone() from error
        for path in paths:
            if match := _PART_NAME.fullmatch(path.name):
                number, value, size = int(match[1]), int(match[2], 16), int(match[3], 16)
                yield PartReceipt(number, content_etag(value, size), size, value), path

    def _gone(self) -> NoSuchUpload:
        return NoSuchUpload(f"upload {self._folder.name} of {self._key} is unknown")


def create_upload(layout: Layout, key: str, metadata: Mapping[str, str]) -> str:
    """Begin an upload; returns its id."""
    upload_id = secrets.token_hex(16)
    folder = layout.uploads / upload_id
    folder.mkdir()
    draft = layout.temporary()
    about = {"key": key, "metadata": dict(metadata), "started_ns": time.time_ns()}
    draft.write_text(json.dumps(about))
    sync_file(draft)
    os.replace(draft, folder / _MANIFEST)
    sync_directory(folder)
    return upload_id


def list_uploads(layout: Layout, prefix: str) -> Uploads:
    """Unfinished uploads of keys that start with `prefix`."""
    found = []
    for folder in sorted(layout.uploads.iterdir()):
        manifest = _manifest(folder)
        if manifest is not None and manifest["key"].startswith(prefix):
            found.append(UploadInfo(manifest["key"], folder.name, manifest["started_ns"]))
    return found


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return manifest
