"""A local directory in place of a mount: do the tests themselves ask for what a local disk does?

`CACHEFS_TEST_LOCAL=/some/dir pytest tests/posix tests/programs` runs them there. Stands in for the
parts of `Mount` and `Bucket` that those tests use; the "bucket" is the directory itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.bucket import Attributes


class LocalMount:
    """A directory that is always mounted and never dirty."""

    lane = "local"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = ""

    def status(self) -> dict[str, Any]:
        used = os.statvfs(self.path)
        busy = (used.f_blocks - used.f_bfree) * used.f_frsize
        return {"dirty_files": 0, "dirty_bytes": 0, "cache": {"used_bytes": busy}}

    def wait(self, *_paths: Path) -> None:
        """Nothing to wait for."""


class LocalView:
    """The keys that a directory should have in the bucket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def below(self, prefix: str) -> LocalView:
        return LocalView(self.path / prefix)

    def sizes(self) -> dict[str, int]:
        found = {}
        for entry in self.path.rglob("*"):
            key = str(entry.relative_to(self.path))
            if entry.is_dir() and not entry.is_symlink():
                if not os.listdir(entry):
                    found[f"{key}/"] = 0
            else:
                found[key] = entry.lstat().st_size
        return found

    def keys(self) -> list[str]:
        return sorted(self.sizes())

    def get(self, key: str) -> bytes:
        path = self.path / key
        if path.is_symlink():
            return os.fsencode(os.readlink(path))
        return path.read_bytes() if path.is_file() else b""

    def attributes(self, key: str) -> Attributes:
        told = (self.path / key).lstat()
        return Attributes(told.st_mode, told.st_uid, told.st_gid, told.st_mtime_ns / 1e9)

    def metadata(self, key: str) -> dict[str, str]:
        told = (self.path / key).lstat()
        seconds, rest = divmod(told.st_mtime_ns, 10**9)
        return {
            "mode": str(told.st_mode),
            "uid": str(told.st_uid),
            "gid": str(told.st_gid),
            "mtime": f"{seconds}.{rest:09d}",
        }
