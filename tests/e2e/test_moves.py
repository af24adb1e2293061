"""Names that move while the bucket still shows them elsewhere: no bytes are lost on the way."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.support.mounts import MountFactory

pytestmark = pytest.mark.either_lane

SLOW = {"flush.settle": "300ms"}


def _put(store: Any, name: str, body: bytes) -> None:
    """Make an object as another program would."""
    (store.path / name).write_bytes(body)


def test_old_name_is_used_again(mounted: MountFactory, dir_store: Any) -> None:
    """mv a b; write a: b's bytes are in the bucket under the old name only."""
    _put(dir_store, "a", b"old")
    mount = mounted(dir_store, options=SLOW)
    os.rename(mount.path / "a", mount.path / "b")
    (mount.path / "a").write_bytes(b"new")
    mount.wait()
    assert (dir_store.get("a"), dir_store.get("b")) == (b"new", b"old")
    assert (mount.path / "b").read_bytes() == b"old"


def test_another_file_takes_the_old_name(mounted: MountFactory, dir_store: Any) -> None:
    _put(dir_store, "y", b"y")
    _put(dir_store, "q", b"q")
    mount = mounted(dir_store, options=SLOW)
    os.rename(mount.path / "y", mount.path / "z")
    os.rename(mount.path / "q", mount.path / "y")
    mount.wait()
    assert (dir_store.get("y"), dir_store.get("z")) == (b"q", b"y")
    assert sorted(dir_store.keys()) == ["y", "z"]


def test_a_temporary_name_and_back(mounted: MountFactory, dir_store: Any) -> None:
    """What is published keeps its object until its bytes are shown under a name that counts."""
    _put(dir_store, "t", b"bytes")
    mount = mounted(dir_store, options={"flush.settle": "20ms"})
    os.rename(mount.path / "t", mount.path / "t.tmp")
    time.sleep(1.0)
    assert dir_store.get("t") == b"bytes"
    os.rename(mount.path / "t.tmp", mount.path / "u")
    mount.wait()
    assert dir_store.get("u") == b"bytes"
    assert sorted(dir_store.keys()) == ["u"]


def test_a_link_outlives_the_published_name(mounted: MountFactory, dir_store: Any) -> None:
    """ln a b; rm a, before b is shown, of a file that is only in the bucket."""
    _put(dir_store, "a", b"bytes")
    mount = mounted(dir_store, options=SLOW)
    os.link(mount.path / "a", mount.path / "b")
    os.unlink(mount.path / "a")
    mount.wait()
    assert dir_store.get("b") == b"bytes"
    assert sorted(dir_store.keys()) == ["b"]


def test_a_directory_there_and_back(mounted: MountFactory, dir_store: Any) -> None:
    mount = mounted(dir_store, options=SLOW)
    (mount.path / "d").mkdir()
    (mount.path / "d" / "x").write_bytes(b"x")
    mount.wait()
    for pause in (0.0, 0.1, 0.32, 0.4):
        os.rename(mount.path / "d", mount.path / "e")
        time.sleep(pause)
        os.rename(mount.path / "e", mount.path / "d")
    mount.wait()
    assert dir_store.get("d/x") == b"x"
    assert sorted(dir_store.keys()) == ["d/x"]
