"""Processes that tests start by fork are what they would be had they been started by exec."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import Mount, MountFactory


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _looks(pid: int) -> dict[str, Any]:
    """What others see of a process; numbers and names that differ from mount to mount left out."""
    folder = Path(f"/proc/{pid}")
    words = folder.joinpath("cmdline").read_bytes().decode().rstrip("\0").split("\0")
    lines = folder.joinpath("status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    fds = [os.readlink(fd) for fd in folder.joinpath("fd").iterdir()]
    return {
        "command": [re.sub(r"[0-9a-f]{8,}|\d+|/\S*/", "", word) for word in words],
        "cwd": os.readlink(folder / "cwd"),
        "leads": os.getsid(pid) == pid,
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "descriptors": sorted({_kind(link) for link in fds}),
        "parent": int(status["PPid"]) == 1,
    }


def _kind(link: str) -> str:
    """What a descriptor leads to: a device, a file of some kind, a pipe."""
    is_file = link.startswith("/") and not link.startswith(("/dev/null", "/dev/fuse"))
    return Path(link).suffix if is_file else re.sub(r"\d+", "", link)


def _family(mount: Mount) -> list[dict[str, Any]]:
    (mover,) = [
        pid for pid in _children(mount.daemon_pid)
        if b"cachefs.flush.mover" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    assert _children(mount.supervisor_pid) == [mount.daemon_pid]
    return [_looks(pid) for pid in (mount.supervisor_pid, mount.daemon_pid, mover)]


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
def test_forked_ones_look_like_real_ones(mounted: MountFactory, dir_store: Any, lane: str) -> None:
    options = {"mount.standby": "off", "flush.movers": "1"}
    forked = mounted(dir_store, options=options)
    real = mounted(dir_store, options=options, env={"CACHEFS_TEST_STARTS": "real"})
    for mount in (forked, real):
        (mount.path / f"by-{mount.path.name}").write_bytes(b"x")
        mount.wait()
    for ours, theirs in zip(_family(forked), _family(real), strict=True):
        assert ours == theirs
