"""A mount that is none: an entry in a mount table, a run file, and a scripted daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachefs.observe import runfiles
from cachefs.observe.control import Handler
from tests.observe.service import serving

MOUNT: dict[str, Any] = {
    "mountpoint": "/mnt/ckpt",
    "store": "s3://bucket/run",
    "node": "node-1",
    "pid": 4711,
    "uptime_seconds": 3725.0,
    "lanes": {"passthrough": True, "reason": ""},
    "dirty_bytes": 3 << 29,
    "dirty_files": 14,
    "oldest_dirty_seconds": 3.2,
    "uploading_bytes": 512 << 20,
    "stalled_files": 0,
    "cache": {
        "used_bytes": 12 << 30,
        "size_bytes": 80 << 30,
        "devices": [
            {
                "path": "/nvme/cache",
                "kind": "disk",
                "used_bytes": 12 << 30,
                "size_bytes": 80 << 30,
                "survives": "reboot",
            }
        ],
    },
    "takeovers": 0,
    "checkpoints": [],
    "metrics": "127.0.0.1:9469",
    "degraded": False,
    "effects": [],
    "errors": [],
}
"""What a healthy daemon with work to do answers to `status`."""


class FakeMounts:
    """A mount table of our own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.table = directory / "mountinfo"
        self.table.write_text("21 1 8:1 / / rw - ext4 /dev/sda1 rw\n")

    def add(self, mountpoint: str) -> None:
        """Show a mount in the table, without any daemon."""
        with self.table.open("a") as table:
            number = 30 + mountpoint.count("/") + len(mountpoint)
            table.write(f"{number} 21 0:{number} / {mountpoint} rw - fuse.cachefs s3://b rw\n")

    def write_run_file(self, mountpoint: str, *, pid: int = 999_999_9, supervisor: int = 0) -> Path:
        """Leave the run file of a daemon; returns where its socket belongs."""
        socket = runfiles.socket_path(mountpoint)
        runfiles.write(runfiles.RunFile(mountpoint, pid, supervisor, str(socket), (), "/var/log/c"))
        return socket

    @contextmanager
    def daemon(self, mountpoint: str, handlers: Mapping[str, Handler]) -> Iterator[None]:
        """A mount whose daemon answers with `handlers`."""
        self.add(mountpoint)
        with serving(self.write_run_file(mountpoint, pid=os.getpid()), handlers):
            yield


BOOTSTRAP = """
import sys
from cachefs.observe import runfiles
runfiles.MOUNTINFO, runfiles._ROOT_DIR, runfiles._USERS_DIR = sys.argv[1:4]
from cachefs.cli import main
sys.exit(main(sys.argv[4:]))
"""


def command(mounts: FakeMounts, *args: str) -> list[str]:
    """A command line that runs `cachefs ARGS` against `mounts` in a process of its own."""
    import sys

    run = str(mounts.directory / "run")
    return [sys.executable, "-c", BOOTSTRAP, str(mounts.table), run, run, *args]
