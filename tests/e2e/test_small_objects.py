"""Many small objects, of which only their metadata tells files from symlinks."""

from __future__ import annotations

import os
import stat
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import MountFactory

pytestmark = pytest.mark.either_lane
COUNT = 300
NAMES = sorted([*(f"d/f{number:03}" for number in range(COUNT)), "d/empty", "d/large"])
LINKS = {"d/f007": b"f008", "d/f250": b"nowhere"}


def fill(bucket: Any) -> None:
    """As others do: files without metadata, and symlinks."""
    for name in NAMES:
        bucket.put(name, bytes({"d/empty": 0, "d/large": 5000}.get(name, 4)))
    mode = str(stat.S_IFLNK | 0o777)
    for name, target in LINKS.items():
        bucket.put(name, target, {"mode": mode})


def look(folder: str) -> dict[str, list[Any]]:
    """What a program sees that reads the directory, and then looks at each entry."""
    with os.scandir(folder) as entries:
        found = {f"d/{entry.name}": entry for entry in entries}
    return {
        name: [entry.is_symlink(), entry.is_file(follow_symlinks=False), os.lstat(entry).st_mode]
        for name, entry in found.items()
    }


def asked(faults: Any) -> list[str]:
    """The objects whose metadata was asked for."""
    heads = (entry["key"] for entry in faults.log() if entry["op"] == "head")
    return sorted(key.partition("/")[2] for key in heads if not key.endswith("/"))


def test_reading_a_directory_asks_for_no_object(
    mounted: MountFactory, bucket: Any, faults: Any, client: Client
) -> None:
    """Who looks closer is told the truth, also by entries that were read before it was known."""
    fill(bucket)
    mount = mounted(bucket, endpoint=faults.endpoint)
    os.listdir(mount.path)
    faults.forget()
    for _ in range(2):
        assert sorted(f"d/{name}" for name in os.listdir(mount.path / "d")) == NAMES
    assert asked(faults) == []
    seen = client.run(look, mount.path / "d")
    assert sorted(seen) == NAMES
    for name, (is_link, is_file, mode) in seen.items():
        assert (is_link, is_file) == (name in LINKS, name not in LINKS), name
        assert stat.S_ISLNK(mode) is (name in LINKS), name
    assert {name: os.fsencode(os.readlink(mount.path / name)) for name in LINKS} == LINKS
    assert asked(faults) == NAMES, "each of them once"
