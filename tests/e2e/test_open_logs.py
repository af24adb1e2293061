"""Files that stay open for a whole run: uploaded as they grow, at a cost that does not grow."""

from __future__ import annotations

import hashlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import MountFactory, poll

pytestmark = [pytest.mark.either_lane, pytest.mark.timeout(120)]

MIB = 1 << 20
LONG, PART = 48 * MIB, 16 * MIB


def test_an_append_to_a_large_open_log_sends_a_part(
    mounted: MountFactory, bucket: Any, faults: Any
) -> None:
    """48 MiB are in the bucket; each kilobyte more sends one part at most and copies the rest, and
    the writer never waits for any of it."""
    mount = mounted(bucket, endpoint=faults.endpoint, options={"flush.open_file_interval": "500ms"})
    log = os.open(mount.path / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    block = os.urandom(4 * MIB)
    for _ in range(LONG // len(block)):
        os.write(log, block)
    poll(partial(_has, bucket, LONG), 60, what="the log as far as it is")
    slowest = 0.0
    for size in (LONG + 1000, LONG + 2000, LONG + 3000):
        faults.forget()
        began = time.perf_counter()
        os.write(log, b"x" * 1000)
        slowest = max(slowest, time.perf_counter() - began)
        poll(partial(_has, bucket, size), 30, what="the line")
        counts = faults.counts()
        assert counts["bytes_in"] <= PART + MIB, counts
        assert counts["copy_part 200"] >= 1
    assert slowest < 1.0
    os.close(log)
    mount.wait()
    assert bucket.sha256("train.log") == _sha256(mount.path / "train.log")


def _has(bucket: Any, size: int) -> bool:
    return bool(bucket.sizes().get("train.log") == size)


def _sha256(path: Path) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
