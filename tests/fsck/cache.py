"""A small sound cache directory, made row by row, and the means to spoil it."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from cachefs.cache import marks
from cachefs.cache.device import CacheDevice
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow, GenerationRow, InodeRow, ObjectRow, PartRow, UploadRow
from cachefs.store.base import FileRange
from cachefs.store.crc import crc64_of

BODIES = {
    "dirty.bin": b"never sent " * 5000,
    "safe.bin": b"in the store " * 4000,
    "runs/sent.bin": bytes(range(256)) * 64,
}
"""Path -> content. `safe.bin` is durable, `runs/sent.bin` is being uploaded, half of it is sent."""


class Cache:
    """The directory; `sql` changes rows as nobody should."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.device = CacheDevice(0, directory)
        self.meta = Meta(self.database)
        self._file = 0
        with self.meta.transaction():
            self._directory(1, None)
            self.runs = self._directory(0, b"runs")
            self._content("dirty.bin", "sealed")
            self._content("safe.bin", "durable")
            self._content("runs/sent.bin", "sealed")
            self._symlink()
        self.meta.close()
        self.device.close()

    @property
    def database(self) -> Path:
        return self.directory / "meta" / "cachefs.db"

    @property
    def log(self) -> Path:
        return self.directory / "meta" / "cachefs.db-wal"

    def file(self, number: int) -> Path:
        return self.directory / "files" / f"{number:02x}" / str(number)

    def sql(self, *statements: str) -> None:
        meta = Meta(self.database)
        for statement in statements:
            meta.db.execute(statement)
        meta.close()

    def every_byte(self) -> set[bytes]:
        """The contents of all files in the directory, wherever they are."""
        return {path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}

    # -- making it ----------------------------------------------------------------------------

    def _inode(self, ino: int, mode: int, size: int, nlink: int = 1, **more: object) -> InodeRow:
        now = time.time_ns()
        row = InodeRow(ino, mode, 0, 0, nlink, size, now, now, now)
        for name, value in more.items():
            setattr(row, name, value)
        self.meta.inodes.add(row)
        return row

    def _directory(self, ino: int, name: bytes | None) -> int:
        row = self._inode(ino, stat.S_IFDIR | 0o755, 4096, 2, listed_ns=0)
        if name is not None:
            self.meta.dentries.add(1, name, row.ino)
            self.meta.inodes.touch_directory(1, time.time_ns(), 1)
        return row.ino

    def _symlink(self) -> None:
        row = self._inode(0, stat.S_IFLNK | 0o777, 9, target=b"dirty.bin")
        self.meta.dentries.add(1, b"link", row.ino)

    def _content(self, path: str, state: str) -> None:
        body = BODIES[path]
        self._file += 1
        fd = self.device.create(self._file)
        os.write(fd, body)
        marks.mark_path(self.device.path(self._file), path.encode())
        os.close(fd)
        crc64 = crc64_of(body)
        inode = self._inode(0, stat.S_IFREG | 0o644, len(body))
        now = time.time_ns()
        gen = GenerationRow(
            0, inode.ino, 0, self._file, state, "tracked", len(body), None, None, None,
            crc64 if state == "durable" else None, now, now, now, 1,
        )  # fmt: skip
        self.meta.generations.add(gen)
        self.meta.inodes.set_gen(inode.ino, gen.gen)
        parent = self.runs if "/" in path else 1
        dentry = self.meta.dentries.add(parent, path.rpartition("/")[2].encode(), inode.ino)
        if state == "durable":
            self.meta.objects.put(
                ObjectRow(path, dentry, "etag", len(body), crc64, gen.gen, None, None, now)
            )
            return
        number = self._file
        self.meta.effects.add(
            EffectRow(
                0, "publish", dentry, gen.gen, None, "data", number, number, "pending", None, now,
                now,
            )
        )  # fmt: skip
        if "sent" in path:
            self._upload(gen, path, body)

    def _upload(self, gen: GenerationRow, path: str, body: bytes) -> None:
        half = len(body) // 2
        sent = crc64_of(FileRange(self.device.path(gen.file), 0, half))
        upload = UploadRow(0, gen.gen, path, "id", len(body), None, 1, "{}")
        parts = [
            PartRow(0, 1, 0, half, "upload", "etag", sent),
            PartRow(0, 2, half, len(body), "upload", None, None),
        ]
        self.meta.uploads.add(upload, parts)
