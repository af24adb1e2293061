"""Ranges that leave the cache: they come back from the store, and nothing is read as holes."""

from __future__ import annotations

import os

from cachefs.cache.filler import CHUNK
from tests.daemon.lab import Lab, in_lab

BODY = os.urandom(5 * CHUNK + 1000)


async def present(lab: Lab) -> int:
    """Bytes of the only file that are in the cache, by what its row says."""
    from cachefs.model.extents import ExtentSet

    ino = await _ino(lab)
    row = lab.services.meta.generations.current(ino)
    assert row is not None
    return row.size if row.present is None else ExtentSet.unpack(row.present).total


async def _ino(lab: Lab) -> int:
    found = lab.services.meta.dentries.get(1, b"f.bin")
    assert found is not None
    return found.ino


async def read(lab: Lab, at: int, size: int) -> bytes:
    fh = await lab.open("f.bin", os.O_RDONLY)
    try:
        return bytes(await lab.services.files.read(fh, at, size))
    finally:
        lab.close(fh)


@in_lab()
async def test_a_closed_file_is_taken_from_its_beginning(lab: Lab) -> None:
    await lab.write("f.bin", BODY)
    await lab.wait("f.bin")
    row = lab.services.meta.generations.current(await _ino(lab))
    trimmer = lab.services.eviction._trimmer
    assert row is not None
    assert trimmer is not None
    device = lab.services.contents.device(row)
    before, used = device.allocated(row.file), lab.services.ledgers[0].used
    freed = await trimmer.trim_closed(row.gen, CHUNK + 1, lambda row: None)
    assert freed == 2 * CHUNK == before - device.allocated(row.file)
    assert lab.services.ledgers[0].used == used - freed
    assert await present(lab) == len(BODY) - 2 * CHUNK
    assert await read(lab, 0, 1000) == BODY[:1000]
    assert await read(lab, 3 * CHUNK, 1000) == BODY[3 * CHUNK : 3 * CHUNK + 1000]
    assert b"".join([await read(lab, n * CHUNK, CHUNK) for n in range(6)]) == BODY


@in_lab()
async def test_only_a_huge_file_is_taken_in_pieces(lab: Lab) -> None:
    await lab.write("f.bin", BODY)
    await lab.wait("f.bin")
    row = lab.services.meta.generations.current(await _ino(lab))
    assert row is not None
    assert await lab.services.eviction.evict(row.gen, 1000) >= len(BODY)
    assert lab.services.meta.generations.current(await _ino(lab)) is None
    assert await read(lab, 0, 1000) == BODY[:1000]
