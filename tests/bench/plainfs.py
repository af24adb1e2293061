"""A minimal pass-through filesystem on pyfuse3: what Python can do at best.

Run as a program: `plainfs.py SOURCE MOUNTPOINT`. Just enough to make, write, read and remove files:
a path for each inode, a descriptor for each handle, one system call or two for each request.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import pyfuse3
import trio

_STAT = (
    "st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks",
    "st_atime_ns", "st_mtime_ns", "st_ctime_ns",
)  # fmt: skip
_TTL = 60.0


class Plain(pyfuse3.Operations):  # type: ignore[misc, unused-ignore]
    """A directory, as it is."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._paths: dict[int, str] = {pyfuse3.ROOT_INODE: source}

    def _entry(self, status: os.stat_result, path: str) -> pyfuse3.EntryAttributes:
        self._paths[status.st_ino] = path
        entry = pyfuse3.EntryAttributes()
        for name in _STAT:
            setattr(entry, name, getattr(status, name))
        entry.attr_timeout = entry.entry_timeout = _TTL
        return entry

    def _at(self, parent: int, name: bytes) -> str:
        return f"{self._paths[parent]}/{os.fsdecode(name)}"

    def _known(self, path: str) -> pyfuse3.EntryAttributes:
        try:
            return self._entry(os.lstat(path), path)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None

    async def lookup(self, parent: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        return self._known(self._at(parent, name))

    async def getattr(self, inode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        return self._known(self._paths[inode])

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        path = self._at(parent, name)
        os.mkdir(path, mode)
        return self._known(path)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        path = self._at(parent, name)
        fd = os.open(path, flags | os.O_CREAT, mode)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(fd)), self._entry(os.fstat(fd), path)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        fd = os.open(self._paths[inode], flags & ~os.O_CREAT)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(fd))

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return os.pread(fh, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return os.pwrite(fh, buf, off)

    async def release(self, fh: int) -> None:
        os.close(fh)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        os.unlink(self._at(parent, name))

    async def forget(self, inode_list: Any) -> None:
        for inode, _ in inode_list:
            self._paths.pop(inode, None)


def main() -> None:
    """Serve until it is unmounted."""
    source, mountpoint = sys.argv[1:]
    pyfuse3.init(Plain(source), mountpoint, {"fsname=plain", "default_permissions"})
    trio.run(pyfuse3.main)


if __name__ == "__main__":
    main()
