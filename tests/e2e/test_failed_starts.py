"""A first mount that fails binds nothing and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Fault, Rule
from tests.support.mounts import MountFactory, poll, processes

pytestmark = pytest.mark.either_lane


def test_a_cache_belongs_to_the_store_of_its_first_mount_that_came_up(
    mounted: MountFactory, dir_store: Any, ram_dir: Path
) -> None:
    """Not to that of one which failed, though the store was reached: nothing was written."""
    mount = mounted(dir_store, start=False, allow=("cannot listen on",))
    mount.path.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mount.options["metrics.listen"] = f"127.0.0.1:{listener.getsockname()[1]}"
        assert mount.cli(*mount.command()).returncode == 1
    assert (dir_store.path / ".cachefs/id").exists()
    del mount.options["metrics.listen"]
    (ram_dir / "right").mkdir()
    mount.store = f"file://{ram_dir}/right"
    (mount.start().path / "f").write_bytes(b"x")
    mount.wait(mount.path / "f")
    assert (ram_dir / "right/f").read_bytes() == b"x"


def test_a_probe_that_was_killed_leaves_nothing_for_long(
    mounted: MountFactory, bucket: Any, faults: Any
) -> None:
    """Neither its object nor its upload: the next mount of that cache removes them."""
    faults.set(Rule(Fault.HANG, ops=("copy_part",), key="*/probe-*", seconds=60))
    mount = mounted(bucket, endpoint=faults.endpoint, start=False, allow=("at its start",))
    mount.path.mkdir(parents=True)
    with ThreadPoolExecutor() as threads:
        done = threads.submit(mount.cli, *mount.command())
        poll(lambda: faults.used() == [1], what="the middle of a probe")
        for pid in processes(mount):
            if b"cachefs.supervisor" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        assert done.result().returncode == 1
    assert len(bucket.uploads()) == len(_probes(bucket)) == 1
    faults.clear()
    mount.start()
    poll(lambda: not bucket.uploads() and not _probes(bucket), what="an empty bucket")


def _probes(bucket: Any) -> list[str]:
    return [key for key in bucket.keys(reserved=True) if "/probe-" in key]
