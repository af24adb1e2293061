"""A file that has no room in the cache: read all the same, written to only once there is some."""

from __future__ import annotations

import errno
import os

import pytest
import trio

from cachefs.cache import unkept
from cachefs.model.extents import ExtentSet
from tests.daemon.lab import CHUNK, Lab, in_lab, until
from tests.daemon.tier import Warm, in_tier

BODY = os.urandom(30 * CHUNK + 77)


def fill_up(lab: Lab) -> int:
    """Leave no room, as is known by now; the bytes that it takes."""
    ledger = lab.services.ledgers[0]
    taken = ledger.headroom()
    ledger.charge(taken)
    ledger.set_exhausted(True)
    lab.parts.contents.fetches._in_vain[0] = trio.current_time()
    return taken


async def read(lab: Lab, fh: int, start: int = 0, size: int = len(BODY)) -> bytes:
    return bytes(await lab.services.files.read(fh, start, size))


def present(lab: Lab, ino: int) -> int:
    """Bytes of a file that are in the cache."""
    row = lab.services.meta.generations.current(ino)
    assert row is not None
    return row.size if row.present is None else ExtentSet.unpack(row.present).total


@in_lab()
async def test_it_is_read_and_nothing_is_counted(lab: Lab) -> None:
    """Not even by the database; with room again it is fetched as ever."""
    ino = await lab.store_only("f.bin", BODY)
    taken, used = fill_up(lab), lab.services.ledgers[0].used
    fh = await lab.open("f.bin", os.O_RDONLY)
    assert await read(lab, fh) == BODY
    assert await read(lab, fh, 5 * CHUNK + 5, 3 * CHUNK) == BODY[5 * CHUNK + 5 :][: 3 * CHUNK]
    assert await read(lab, fh, len(BODY) - 5, 100) == BODY[-5:]
    assert await read(lab, fh, len(BODY) + 5, 100) == b""
    assert lab.services.ledgers[0].used == used
    opened = lab.services.files.handle(fh).inode
    assert os.fstat(opened.fd).st_blocks == 0
    assert opened.fill is not None
    lab.close(fh)
    assert present(lab, ino) == 0
    assert lab.parts.contents.unkept.held == 0
    lab.services.ledgers[0].credit(taken)
    fh = await lab.open("f.bin", os.O_RDONLY)
    assert await read(lab, fh) == BODY
    lab.close(fh)
    assert present(lab, ino) == len(BODY)


@in_lab("flush.settle=0s")
async def test_our_own_rename_does_not_end_reading(lab: Lab) -> None:
    await lab.store_only("f.bin", BODY)
    fill_up(lab)
    fh = await lab.open("f.bin", os.O_RDONLY)
    await lab.rename("f.bin", "g.bin")
    await until(lambda: lab.bucket.keys() == ["g.bin"])
    assert await read(lab, fh) == BODY
    lab.close(fh)


@in_lab("cache.full=enospc")
async def test_who_writes_to_it_needs_room(lab: Lab) -> None:
    """And is told as `cache.full` says. Who reads it goes on."""
    await lab.store_only("f.bin", BODY)
    taken = fill_up(lab)
    fh = await lab.open("f.bin", os.O_RDWR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachefs.cache.ledger._EVICTION_PATIENCE", 0.01)
        with pytest.raises(OSError) as caught:
            await lab.put(fh, b"new", 7)
    assert caught.value.errno == errno.ENOSPC
    assert await read(lab, fh) == BODY
    lab.services.ledgers[0].credit(taken)
    await lab.put(fh, b"new", 7)
    assert await read(lab, fh) == BODY[:7] + b"new" + BODY[10:]
    lab.close(fh)


@in_lab()
async def test_a_writer_waits_for_room(lab: Lab) -> None:
    await lab.store_only("f.bin", BODY)
    taken = fill_up(lab)
    fh = await lab.open("f.bin", os.O_RDWR)
    writing = lab.asking(lambda: lab.put(fh, b"new", 7))
    await until(lambda: lab.services.files.admission.waiting == 1)
    lab.services.ledgers[0].credit(taken)
    await writing
    assert lab.services.ledgers[0].promised == 0
    assert await read(lab, fh) == BODY[:7] + b"new" + BODY[10:]
    lab.close(fh)


@in_lab()
async def test_warm_says_that_there_is_no_room(lab: Lab) -> None:
    """Rather than that it is here."""
    ino = await lab.store_only("f.bin", BODY)
    fill_up(lab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachefs.vfs.fetchroom._LONG", 0.0)
        patch.setattr("cachefs.cache.ledger._EVICTION_PATIENCE", 0.01)
        with pytest.raises(Exception, match="No space left"):
            await lab.ask("warm", paths=["f.bin"])
    assert present(lab, ino) == 0


@in_tier()
async def test_the_warm_tier_is_read_first(warm: Warm) -> None:
    """Without asking the store."""
    lab = warm.lab
    await warm.write("f.bin", "x" * 9000)
    await lab.wait("f.bin")
    await warm.settle()
    await lab.evict("f.bin")
    fill_up(lab)
    lab.bucket.written.clear()
    fh = await lab.open("f.bin", os.O_RDONLY)
    assert await read(lab, fh) == b"x" * 9000
    assert lab.bucket.written == []
    (warm.directory / "f.bin").write_text("y" * 9000)
    lab.parts.contents.unkept.forget(lab.services.files.handle(fh).inode.fill.path)  # type: ignore[union-attr]
    assert await read(lab, fh) == b"x" * 9000, "a copy that anybody has touched is not taken"
    assert lab.bucket.written == ["f.bin"]
    lab.close(fh)


def test_damage_is_found_once_all_was_read(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the last of it gets EIO, and it is told; then it is fetched once more."""
    for name in ("LONGEST", "SHORTEST"):
        monkeypatch.setattr(unkept, name, 4 * CHUNK)

    @in_lab()
    async def test(lab: Lab) -> None:
        ino = await lab.store_only("f.bin", BODY)
        fill_up(lab)
        reader, bad = lab.parts.contents.unkept, [True]
        monkeypatch.setattr(reader, "_length", 4 * CHUNK)
        fetch = reader._fetch

        async def damaged(key: str, start: int, end: int, etag: str | None) -> bytes:
            data = await fetch(key, start, end, etag)
            return bytes(len(data)) if bad and bad.pop() else data

        monkeypatch.setattr(reader, "_fetch", damaged)
        fh, half = await lab.open("f.bin", os.O_RDONLY), len(BODY) // 2
        assert await read(lab, fh, 0, half) != BODY[:half], "nobody can tell so far"
        with pytest.raises(OSError, match="checksum") as caught:
            await read(lab, fh, half)
        assert caught.value.errno == errno.EIO
        assert lab.services.metrics.registry.get_sample_value("cachefs_damaged_reads_total") == 1
        assert await read(lab, fh) == BODY
        assert await read(lab, fh, 5, half) == BODY[5:][:half]
        assert present(lab, ino) == 0
        lab.close(fh)

    test(tmp_path)  # type: ignore[arg-type]
