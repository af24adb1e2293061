"""A power cut that leaves the row of a new file, and not the file: on both filesystems a sync of
the database's log, where that was written over, brings nobody else's directory entry along."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from cachefs.flush.reboot import Reboots
from cachefs.fsck.check import check
from tests.cuts import recovered
from tests.cuts.recording import Disks, Past, run
from tests.cuts.test_power_cuts import mounted
from tests.daemon.lab import lab

pytestmark = pytest.mark.slow

T = TypeVar("T")


class _NoLuck(random.Random):
    """Nothing of what was not flushed is on the disk."""

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]


async def _save(disks: Disks) -> int:
    """One file is synced, of another one nothing but the row; the instant after that."""
    (top,) = disks.tops
    async with lab(top, flusher=False) as made:
        meta = made.services.meta
        for _ in range(100):
            Reboots(meta).remember()
        fh = await made.open("synced")
        await made.put(fh, b"1" * 9000)
        await made.services.files.fsync(fh)
        meta.db.checkpoint()  # From now on the log is written from its beginning again.
        run("sync", "-f", top)
        await made.put(await made.open("never"), b"2" * 9000)
        meta.db.sync()
        instant = disks.position
        for opened in made.services.table.inodes.values():
            os.close(opened.fd)
        return instant


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_row_without_its_file_is_told_to_be_lost(ram_dir: Path, kind: str) -> None:
    disks = Disks(ram_dir, kind)
    try:
        instant = trio.run(_save, disks)
    finally:
        disks.close()
    past = Past(disks, ram_dir)
    past.cut(instant, [ram_dir / "cut"], _NoLuck())
    past.close()
    (top,) = disks.tops
    with mounted([ram_dir / "cut"], [top]):
        view = recovered.look(top / "cache", top / "store")
    assert view.shown["synced"] == b"1" * 9000
    assert str(view.shown["never"]).startswith("EIO ")
    assert (view.states["never"], view.end["never"]) == ("held", "held")
    assert (view.offences, view.recovered.missing, view.again.missing) == ([], 0, 0)
    assert (view.recovered.lost, view.again.lost, view.leaked) == (1, 1, {2})
    assert "never" not in view.bucket
    with mounted([ram_dir / "cut"], [top]):
        findings = check([top / "cache"]).findings
    assert [(each.check, each.subject.split()[0]) for each in findings] == [("file-lost", "never")]
