"""Passthrough where the cache is on a stacked filesystem; and mounts that must do without."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.place import Watch, in_lane, require_passthrough
from tests.support.actor import pattern
from tests.support.client import Client
from tests.support.mounts import CHECKOUT, MountFactory

pytestmark = pytest.mark.parametrize("lane", [in_lane("passthrough")], indirect=True)

MIB = 1 << 20
NO_EXTENSION = """
import sys
if "--mountpoint" in sys.orig_argv:
    sys.modules["cachefs.fuse._tap"] = None
"""
NO_CAPABILITY = """
import ctypes, struct, sys
if "--mountpoint" in sys.orig_argv:
    libc, header = ctypes.CDLL(None), struct.pack("Ii", 0x20080522, 0)
    sets = ctypes.create_string_buffer(24)
    libc.capget(header, sets)
    words = [word & ~(i < 3 and 1 << 21) for i, word in enumerate(struct.unpack("6I", sets.raw))]
    assert not libc.capset(header, struct.pack("6I", *words))
"""


@pytest.fixture
def overlay(ram_dir: Path, after_mounts: ExitStack) -> Path:
    """As a container's own filesystem is one."""
    parts = {name: ram_dir / name for name in ("lowerdir", "upperdir", "workdir", "merged")}
    for part in parts.values():
        part.mkdir()
    merged = parts.pop("merged")
    options = ",".join(f"{name}={path}" for name, path in parts.items())
    words = ["mount", "-t", "overlay", "-o", options, "cache", str(merged)]
    subprocess.run(words, check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", merged], check=True))
    return merged


def test_a_cache_on_an_overlay(
    mounted: MountFactory, dir_store: Any, client: Client, overlay: Path
) -> None:
    """Written and read by the kernel, before and after another daemon took over."""
    mount = mounted(dir_store, cache_dirs=[overlay / "cache"], allow=("ended unexpectedly",))
    require_passthrough(mount)
    actor, watch = client.actor(mount.path), Watch(mount)
    actor("open", 0, "f", "RDWR|CREAT")
    actor("write", 0, 1, MIB)
    assert mount.xattr("lane", "f") == "passthrough"
    assert watch.data() == {}
    mount.took_over(mount.kill_daemon())
    watch = Watch(mount)
    actor("write", 0, 2, MIB)
    actor("close", 0)
    actor("open", 0, "f", "RDONLY")
    assert actor("pread", 0, 2 * MIB, 0)["len"] == 2 * MIB
    assert mount.xattr("lane", "f") == "passthrough"
    assert watch.data() == {}
    actor("close", 0)
    mount.wait()
    assert dir_store.get("f") == pattern(1, MIB) + pattern(2, MIB)


@pytest.mark.real_starts
@pytest.mark.parametrize(
    ("code", "reason"),
    [(NO_EXTENSION, "no tap"), (NO_CAPABILITY, "lacks CAP_SYS_ADMIN")],
    ids=["no extension", "no capability"],
)
def test_without_it(
    mounted: MountFactory, dir_store: Any, client: Client, tmp_path: Path, code: str, reason: str
) -> None:
    """Status says why, and the tracked lane serves."""
    (tmp_path / "sitecustomize.py").write_text(code)
    path = f"{tmp_path}:{CHECKOUT}"
    mount = mounted(dir_store, env={"PYTHONPATH": path}, falls_back=True)
    told = mount.status()["lanes"]
    assert told["passthrough"] is False
    assert reason in told["reason"]
    assert reason in mount.cli("status", mount.path).stdout
    actor = client.actor(mount.path)
    actor("open", 0, "f", "RDWR|CREAT")
    actor("write", 0, 1, MIB)
    assert mount.xattr("lane", "f") == "tracked"
    actor("close", 0)
    assert os.path.getsize(mount.path / "f") == MIB
    mount.wait()
    assert dir_store.get("f") == pattern(1, MIB)
