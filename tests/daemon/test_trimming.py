"""Ranges that leave the cache: they come back from the store, and nothing is read as holes."""

from __future__ import annotations

import os

from cachefs.cache.filler import CHUNK, Fill, _Stream
from cachefs.model.extents import ExtentSet
from tests.daemon.lab import Lab, in_lab

MIB = 1 << 20
BODY = os.urandom(5 * CHUNK + 1000)


async def present(lab: Lab) -> int:
    """Bytes of the only file that are in the cache, by what its row says."""
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


@in_lab()
async def test_readers_do_not_take_from_each_other_what_they_are_at(lab: Lab) -> None:
    """Only a writer who waits for room takes that; what lies behind, and what was fetched ahead,
    goes for readers as well."""
    trimmer = lab.services.eviction._trimmer
    assert trimmer is not None
    fill = Fill("path", "key", "etag", 8 * CHUNK, ExtentSet([(0, 8 * CHUNK)]))
    at = 3 * CHUNK + 2 * MIB
    fill._streams.append(_Stream(at, 2))
    near = [(0, at - CHUNK), (at + 3 * CHUNK, 8 * CHUNK)]
    assert trimmer._chosen(fill, 8 * CHUNK, 0) == near
    fill.present.remove(0, 2 * CHUNK + 2 * MIB)
    fill.present.remove(4 * CHUNK + 2 * MIB, 8 * CHUNK)
    assert trimmer._chosen(fill, 8 * CHUNK, 0) == []
    trimmer.is_waited_for = lambda device: True
    behind, ahead = (at - CHUNK, at - MIB), (4 * CHUNK, 4 * CHUNK + 2 * MIB)
    assert trimmer._chosen(fill, 8 * CHUNK, 0) == [behind, ahead]
    for extent in (behind, ahead):
        fill.present.remove(*extent)
    assert trimmer._chosen(fill, 8 * CHUNK, 0) == []
    trimmer.is_pressing = lambda device: True
    assert trimmer._chosen(fill, 8 * CHUNK, 0) == [(at - MIB, 4 * CHUNK)]


async def read_all(lab: Lab) -> bytes:
    """By one handle, from the start to the end."""
    fh = await lab.open("f.bin", os.O_RDONLY)
    try:
        pieces = [await lab.services.files.read(fh, at, CHUNK) for at in range(0, len(BODY), CHUNK)]
        return b"".join(map(bytes, pieces))
    finally:
        lab.close(fh)


@in_lab()
async def test_what_leaves_while_all_is_compared_is_fetched_again(lab: Lab) -> None:
    """All of a file is here, and while its checksum is compared its beginning goes to make room."""
    await _compared(lab, comes_back=False)


@in_lab()
async def test_what_leaves_and_comes_back_while_all_is_compared(lab: Lab) -> None:
    await _compared(lab, comes_back=True)


async def _compared(lab: Lab, *, comes_back: bool) -> None:
    await lab.store_only("f.bin", BODY)
    contents, eviction = lab.services.contents, lab.services.eviction
    compare = contents.fetched
    went: list[int] = []

    async def slowly(fill: Fill) -> int:
        value = await compare(fill)
        if not went:
            went.append(await eviction.trim(0, CHUNK))
            if comes_back:
                await contents._filler.fetch_all(fill)
        return value

    contents.fetched = slowly
    assert await read_all(lab) == BODY
    assert went == [CHUNK]
    assert await read_all(lab) == BODY
    assert await present(lab) == len(BODY)
