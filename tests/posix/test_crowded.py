"""Very many entries, and renames that cross."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.daemon.storage import open_meta
from cachefs.meta.rows import InodeRow
from tests.support.mounts import Mount, MountFactory
from tests.support.work import Work

pytestmark = [pytest.mark.either_lane, pytest.mark.timeout(120)]

CROWD = 100_000


def _crowd(mount: Mount, directory: int) -> None:
    """Fill a directory of a mount that is down: through it, that would take minutes."""
    device = CacheDevice(0, mount.cache_dirs[0])
    meta = open_meta([device])
    now = time.time_ns()
    with meta.transaction():
        for number in range(CROWD):
            mode = stat.S_IFLNK | 0o777
            row = InodeRow(0, mode, 0, 0, 1, 1, now, now, now, target=b"%d" % (number % 10))
            meta.dentries.add(directory, b"entry%06d" % number, meta.inodes.add(row))
    meta.close()
    device.close()


def _look(folder: str, crowd: int) -> dict[str, Any]:
    """List it three ways, with removals in between."""
    from collections import Counter

    with os.scandir(folder) as entries:
        kinds = [(entry.name, entry.is_symlink()) for entry in entries]
    names = Counter(name for name, _ in kinds)
    gone = []
    stayed: Counter[str] = Counter()
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            stayed[entry.name] += 1
            if count % 500 == 0:
                os.unlink(entry.path)
                gone.append(entry.name)
    again = Counter(os.listdir(folder))
    return {
        "entries": len(names),
        "doubled": [max(each.values()) - 1 for each in (names, stayed, again)],
        "links": sum(link for _, link in kinds),
        "skipped": len(set(names) - set(stayed)),
        "left": set(again) == set(names) - set(gone) and len(again) == crowd - len(gone),
        "target": os.readlink(os.path.join(folder, "entry012345")),
    }


@pytest.mark.slow
def test_a_hundred_thousand_entries(mounted: MountFactory, dir_store: Any, client: Any) -> None:
    """Each is listed once, also while some are removed, and after a rename of the directory."""
    # Entries that no store has may not be looked for there.
    mount = mounted(dir_store, options={"mount.metadata_ttl": "10min"})
    (mount.path / "many").mkdir()
    number = (mount.path / "many").stat().st_ino
    mount.unmount()
    mount.wait_gone()
    _crowd(mount, number)
    mount.start()
    seen = client.run(_look, mount.path / "many", CROWD, timeout=100)
    assert seen == {
        "entries": CROWD, "doubled": [0, 0, 0], "links": CROWD, "skipped": 0, "left": True,
        "target": "5",
    }  # fmt: skip
    (mount.path / "many").rename(mount.path / "more")
    assert len(os.listdir(mount.path / "more")) == CROWD - CROWD // 500


def _cross(one: str, other: str, rounds: int) -> list[int]:
    """Move `one` below `other` and back, over and over; how often that worked, and was refused."""
    moved = refused = 0
    for _ in range(rounds):
        below = os.path.join(other, "x")
        try:
            os.rename(one, below)
            moved += 1
            os.rename(below, one)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ENOTEMPTY):
                raise
            refused += 1
    return [moved, refused]


def test_crossing_renames_of_directories(work: Work) -> None:
    """a to b/x and b to a/x at once: never a cycle, never a hang, nothing is lost."""
    for name in "ab":
        (work / name).mkdir()
        (work / name / f"in-{name}").write_bytes(name.encode())
    runners = [
        work.client.start(_cross, str(work / one), str(work / other), 40)
        for one, other in ("ab", "ba")
    ]
    for runner in runners:
        moved, refused = runner.result(100)
        assert moved + refused >= 40
    found = sorted(Path(folder, name).name for folder, _, names in os.walk(work) for name in names)
    assert found == ["in-a", "in-b"]
    work.durable()
    keys = work.bucket.keys()
    assert sorted(key.rpartition("/")[2] for key in keys if not key.endswith("/")) == found
