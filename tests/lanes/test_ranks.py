"""Several programs write to a disk at once in the tracked lane, as the ranks of a training job do.

The tap hands their writes to threads and reads on meanwhile, so several are on their way whenever a
daemon is killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_readonly_disk import Ext4
from tests.lanes.test_kills import check_space
from tests.support.mounts import MountFactory, poll

RANKS, BLOCK, KILLS = 4, 1 << 20, 2
_RANK = """
import os, select, sys
stem, size = sys.argv[1], int(sys.argv[2])
fill = file = 0
while not file or not select.select([0], [], [], 0)[0]:
    name, fills = f"{stem}.{file}.bin", []
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    for turn in range(12):
        number, fill = turn % 6, (fill + 1) % 256
        assert os.pwrite(fd, bytes([fill]) * size, number * size) == size
        fills[number:number + 1] = [fill]
        assert os.fstat(fd).st_size == len(fills) * size
    os.close(fd)
    if file:
        os.unlink(f"{stem}.{file - 1}.bin")
    file += 1
print(os.path.basename(name), bytes(fills).hex())
"""


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """The programs; ended with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()


def _disk_threads(pid: int) -> int:
    names = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/comm")]
    return names.count("cachefs-disk\n")


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
def test_ranks_across_kills(
    dir_store: Any,
    mounted: MountFactory,
    tmp_path: Path,
    after_mounts: ExitStack,
    ranks: list[subprocess.Popen[str]],
) -> None:
    """No call fails, sizes are right after each, and the store gets the bytes written last."""
    disk = Ext4(tmp_path, 512 << 20)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", disk.top], check=True))
    options = {"cache.size": "400MiB", "cache.meta_reserve": "1MiB", "flush.settle": "1h"}
    options["flush.settle_max"] = "1h"
    allow = ("ended unexpectedly",)
    mount = mounted(dir_store, cache_dirs=[disk.top / "cache"], options=options, allow=allow)
    for number in range(RANKS):
        words = [sys.executable, "-S", "-c", _RANK, str(mount.path / f"rank{number}"), str(BLOCK)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        ranks.append(subprocess.Popen(words, text=True, **pipes))  # type: ignore[call-overload]
    for _ in range(KILLS):
        poll(lambda: _disk_threads(mount.daemon_pid) > 1, what="several writes at once")
        mount.took_over(mount.kill_daemon())
    poll(lambda: _disk_threads(mount.daemon_pid) > 1, what="several writes at once")
    told = dict(each.communicate("", timeout=60)[0].split() for each in ranks)
    mount.wait()
    assert len(told) == RANKS
    for name, fills in told.items():
        expected = b"".join(bytes([fill]) * BLOCK for fill in bytes.fromhex(fills))
        assert dir_store.get(name) == expected, name
    check_space(mount)
