"""A million objects below the prefix: nothing but what is looked at costs anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.million import SIZE
from tests.support.mounts import CHECKOUT, MountFactory

pytestmark = pytest.mark.either_lane

DIRECTORIES, FILES = 1000, 1000


@pytest.fixture
def million() -> Iterator[str]:
    """The endpoint of a store that has them."""
    words = [sys.executable, "-m", "tests.support.million", str(DIRECTORIES), str(FILES)]
    server = subprocess.Popen(
        words, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(10)


def _resident(pid: int) -> int:
    """Bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed(path: Path, *words: str) -> tuple[float, int]:
    """(seconds, lines) of an `ls`."""
    began = time.monotonic()
    out = subprocess.run(["ls", *words, path], capture_output=True, text=True, check=True).stdout
    return time.monotonic() - began, len(out.splitlines())


@pytest.mark.slow
def test_a_million_objects(mounted: MountFactory, million: str, record_property: Any) -> None:
    """The mount is there at once, a directory among them is listed in a moment, and the daemon's
    memory does not grow with the bucket. The limits are for a busy machine.
    """
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    began = time.monotonic()
    mount = mounted("s3://b/runs", endpoint=million, env=keys, allow=(".",))
    figures = {"mount": time.monotonic() - began}
    figures["top"], lines = _timed(mount.path)
    assert lines == DIRECTORIES
    figures["first ls"], lines = _timed(mount.path / "d0500")
    assert lines == FILES
    figures["second ls"], lines = _timed(mount.path / "d0500")
    figures["ls -l"], lines = _timed(mount.path / "d0501", "-l")
    assert lines == FILES + 1
    with (mount.path / "d0777/f0042").open("rb") as file:
        assert file.read(20).rstrip(b".") == b"runs/d0777/f0042"
    assert os.stat(mount.path / "d0999/f0999").st_size == SIZE
    memory = _resident(mount.daemon_pid)
    for name, value in figures.items():
        record_property(name, round(value, 3))
    record_property("MiB", memory >> 20)
    print(figures, memory >> 20, "MiB", os.getloadavg())
    assert figures["mount"] < 15
    assert figures["first ls"] < 5
    assert figures["second ls"] < 2
    assert memory < 300 << 20
