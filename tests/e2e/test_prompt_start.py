"""However much is dirty: the mount answers at once, and goes on with it behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fsck.many import fill
from tests.support.mounts import MountFactory, poll

FILES = 10_000
PROMPT = 2.0
"""Seconds that a mount may take to answer, on a machine with nothing else to do."""
TICKS = os.sysconf("SC_CLK_TCK")


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def test_an_idle_mount_knows_when_its_store_is_back(
    mounted: MountFactory, bucket: Any, link: Any
) -> None:
    """It is not called degraded before it has asked anything, nor after it has nothing to ask."""
    mount = mounted(bucket, endpoint=link.endpoint, allow=(".",))
    assert not mount.status()["degraded"]
    link.cut()
    (mount.path / "f").write_bytes(b"f")
    poll(lambda: mount.status()["degraded"])
    os.unlink(mount.path / "f")
    link.mend()
    poll(lambda: not mount.status()["degraded"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
def test_ten_thousand_dirty_files_after_a_kill(
    mounted: MountFactory, dir_store: Any, tmp_path: Path
) -> None:
    """What a kill of everything leaves. The time is counted in what the daemon worked for it, since
    others may have had the processor meanwhile."""
    cache = tmp_path / "cache"
    bodies = fill(cache, FILES)
    mount = mounted(
        dir_store,
        cache_dirs=[cache],
        options={"flush.settle": "10s"},
        start=False,
    )
    began = time.monotonic()
    mount.start()
    seconds, worked = time.monotonic() - began, _processor_seconds(mount.daemon_pid)
    name = next(iter(bodies))
    assert (mount.path / name).read_bytes() == bodies[name]
    print(f"answered after {seconds:.2f} s; the daemon had worked for {worked:.2f} s")
    assert worked < 1.5 * PROMPT
    assert len(os.listdir(mount.path)) == FILES
    mount.ask("flush", {"paths": [str(mount.path / name)]})
    assert dir_store.get(name) == bodies[name]
    mount.unmount(drain_timeout=0)
