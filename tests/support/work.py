"""A fresh directory on a shared mount, with its view of the bucket: what most tests work in."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.bucket import Bucket
from tests.support.client import Actor, Client
from tests.support.mounts import Mount, poll


@dataclass(slots=True)
class Work:
    """One test's directory; `path / name` and `str(work)` work as for a path."""

    mount: Mount
    path: Path
    bucket: Bucket
    """What is in the bucket below this directory."""
    client: Client
    local: Path
    """An empty directory of a local filesystem, for comparison."""
    allowed_log: list[str] = field(default_factory=list)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def lane(self) -> str:
        """The lane that new files are written in."""
        return self.mount.lane

    def run(self, code: Any, *args: Any, **options: Any) -> Any:
        """Run a function in a client process (see Client.run)."""
        return self.client.run(code, *args, **options)

    def actor(self) -> Actor:
        """A client process that works in this directory."""
        return self.client.actor(self.path)

    def durable(self) -> None:
        """Wait until everything closed in this directory is in the bucket."""
        self.mount.wait(self.path)

    def quiet(self) -> None:
        """Wait until the mount has nothing dirty at all, in any directory."""
        poll(lambda: self.mount.status()["dirty_files"] == 0, what="nothing dirty")

    def clear(self) -> None:
        """Remove everything in the directory."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
