"""What the store sends is compared with the checksum that it was stored with."""

from __future__ import annotations

import errno
import os

import pytest

from cachefs.vfs.lanes import TrackedOnly
from tests.daemon.lab import CHUNK, Lab, in_lab

BODY = bytes(range(256)) * (3 * CHUNK // 256)


async def _evicted(lab: Lab) -> int:
    """A file of three pieces that only the store has; its inode."""
    await lab.write("f.bin", BODY)
    await lab.wait()
    assert (await lab.ask("evict", paths=["f.bin"]))["files"] == 1
    row = lab.services.meta.inodes.lookup(1, b"f.bin")
    assert row is not None
    return row.ino


async def _read(lab: Lab, fh: int, start: int, size: int) -> bytes | int | None:
    try:
        return bytes(await lab.services.files.read(fh, start, size))
    except OSError as error:
        return error.errno


def _counted(lab: Lab) -> float:
    return float(
        lab.services.metrics.registry.get_sample_value("cachefs_damaged_reads_total") or 0.0
    )


@pytest.mark.parametrize("tells", [True, False])
def test_damaged_on_the_way(tmp_path: object, tells: bool) -> None:
    """It is fetched once more, before anybody has read a byte of it; whether or not the checksums
    of the pieces are known."""

    @in_lab()
    async def test(lab: Lab) -> None:
        lab.bucket.tells = tells
        await _damage_on_the_way(lab)

    test(tmp_path)  # type: ignore[arg-type]


async def _damage_on_the_way(lab: Lab) -> None:
    ino = await _evicted(lab)
    lab.bucket.damage = [False, True]
    fh = (await lab.services.files.open(ino, os.O_RDONLY)).fh
    assert await _read(lab, fh, 0, len(BODY)) == BODY
    lab.close(fh)
    assert _counted(lab) == 1


@in_lab()
async def test_damaged_after_some_of_it_was_read(lab: Lab) -> None:
    """Who has read of it already is told; who opens it then reads what was stored."""
    ino = await _evicted(lab)
    lab.bucket.damage = [True]
    fh = (await lab.services.files.open(ino, os.O_RDONLY)).fh
    assert await _read(lab, fh, 0, 100) == bytes(100)
    assert await _read(lab, fh, 0, len(BODY)) == errno.EIO
    lab.close(fh)
    fh = (await lab.services.files.open(ino, os.O_RDONLY)).fh
    assert await _read(lab, fh, 0, len(BODY)) == BODY
    lab.close(fh)


def test_what_the_tap_gives_out_is_taken_back(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged bytes are not read on without a word of Python."""
    taken = []
    monkeypatch.setattr(TrackedOnly, "take_back", lambda _, opened: taken.append(opened.ino))

    @in_lab()
    async def test(lab: Lab) -> None:
        ino = await _evicted(lab)
        lab.bucket.damage = [True]
        fh = (await lab.services.files.open(ino, os.O_RDONLY)).fh
        assert await _read(lab, fh, 0, 100) == bytes(100)
        assert taken == []
        assert await _read(lab, fh, 0, len(BODY)) == errno.EIO
        assert taken == [ino, ino], "when it is found out, and when all of it is there"
        lab.close(fh)

    test(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [1, 3])
def test_damaged_in_the_store(tmp_path: object, pieces: int) -> None:
    """EIO, again and again, until the store has it right."""

    @in_lab()
    async def test(lab: Lab) -> None:
        ino = await _evicted(lab)
        for _ in range(2):
            lab.bucket.damage = ([True] * pieces + [False] * (3 - pieces)) * 2
            fh = (await lab.services.files.open(ino, os.O_RDONLY)).fh
            assert await _read(lab, fh, 0, len(BODY)) == errno.EIO
            lab.close(fh)
        assert _counted(lab) == 4
        fh = (await lab.services.files.open(ino, os.O_RDONLY)).fh
        assert await _read(lab, fh, 0, len(BODY)) == BODY
        lab.close(fh)

    test(tmp_path)  # type: ignore[arg-type]
