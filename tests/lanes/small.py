"""Small files and who makes them: what the tests of them share."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.mounts import Mount

STORM = Path(__file__).with_name("storm.py")


def handled(mount: Mount, op: str = "create") -> int:
    """Requests that a handler saw."""
    address = mount.status()["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    wanted = f'cachefs_fuse_request_seconds_count{{op="{op}"}} '
    return int(next((float(x[len(wanted) :]) for x in lines if x.startswith(wanted)), 0.0))


def body(name: str) -> bytes:
    """What the file of that name holds."""
    return random.Random(name).randbytes(1 + len(name) * 397)


def save(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, body(path.name))
    os.close(fd)


class Storm:
    """A process that makes files as fast as it can, in a directory of its own."""

    def __init__(self, folder: Path, log: Path, seconds: float) -> None:
        folder.mkdir()
        self.folder, self._log = folder, log
        words = [sys.executable, str(STORM), str(folder), str(log), str(seconds)]
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    def closed(self) -> list[str]:
        """Files whose close has returned."""
        text = self._log.read_text() if self._log.exists() else ""
        return text[: text.rfind("\n") + 1].split()

    def finish(self) -> list[str]:
        self._log.with_suffix(".stop").touch()
        _, error = self._process.communicate(timeout=90)
        assert self._process.returncode == 0, error
        return self.closed()

    def kill(self) -> list[str]:
        self._process.kill()
        self._process.wait()
        return self.closed()
