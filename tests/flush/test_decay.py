"""What changed in the cache while it waited is never published as what was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from cachefs.errors import Refused
from cachefs.meta.rows import GenerationRow
from tests.flush.conftest import LARGE, Place
from tests.flush.memory import Fault
from tests.flush.world import World, run

SMALL = b"small content"


def _generation(world: World, path: str) -> GenerationRow:
    row = world.meta.inodes.get(world.ino(path))
    gen = world.meta.generations.get(row.gen or 0) if row is not None else None
    assert gen is not None
    return gen


def _flip(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    with open(path, "r+b") as file:
        file.write(data)


async def _wait_for_a_checksum(world: World, body: bytes) -> GenerationRow:
    """A file that the store refuses for now, brought to the disk, long enough ago."""
    await world.write("a.bin", body)
    row = _generation(world, "a.bin")
    world.meta.generations.set_synced(row.gen, row.sealed_ns)
    with trio.fail_after(200):
        while _generation(world, "a.bin").crc64 is None:  # noqa: ASYNC110
            await trio.sleep(1)
    return _generation(world, "a.bin")


def _refused(place: Place, times: int) -> None:
    for method in ("put", "create_upload"):
        place.faults += [(method, Fault(Refused("no"), after=False)) for _ in range(times)]


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["one piece", "parts"])
@pytest.mark.parametrize("how", ["flipped", "shortened", "removed"])
def test_it_is_stalled_and_not_uploaded(place: Place, body: bytes, how: str) -> None:
    async def main() -> None:
        _refused(place, 3)
        async with place.mounted() as world, trio.open_nursery() as nursery:
            nursery.start_soon(world.publisher.decay.run)
            path = world.device.path((await _wait_for_a_checksum(world, body)).file)
            nursery.cancel_scope.cancel()
        if how == "flipped":
            _flip(path)
        elif how == "shortened":
            os.truncate(path, 5)
        else:
            os.unlink(path)
        async with place.mounted() as world:
            await trio.sleep(1000)
            gen = _generation(world, "a.bin")
            assert gen.state == "stalled"
            assert (gen.error or "").startswith("its cache file is damaged: ")
            assert world.shown == {}
            assert place.store.uploads == {} or body is LARGE

    run(main)


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["one piece", "parts"])
def test_sound_bytes_go_out_after_a_restart(place: Place, body: bytes) -> None:
    async def main() -> None:
        _refused(place, 3)
        async with place.mounted() as world, trio.open_nursery() as nursery:
            nursery.start_soon(world.publisher.decay.run)
            await _wait_for_a_checksum(world, body)
            nursery.cancel_scope.cancel()
        async with place.mounted() as world:
            await world.settle()
            assert world.shown == {"a.bin": body}

    run(main)


def test_a_rewritten_file_is_not_compared_with_what_it_was(place: Place) -> None:
    """Beyond the preserve limit the sealed version itself is written to."""

    async def main() -> None:
        _refused(place, 3)
        async with place.mounted() as world, trio.open_nursery() as nursery:
            nursery.start_soon(world.publisher.decay.run)
            world.rewriter._preserve_limit = 0
            await _wait_for_a_checksum(world, SMALL)
            await world.edit("a.bin", 0, b"S")
            await world.settle()
            assert world.shown == {"a.bin": b"Small content"}
            nursery.cancel_scope.cancel()

    run(main)


def test_what_is_uploaded_at_once_is_read_once(place: Place) -> None:
    async def main() -> None:
        async with place.mounted() as world, trio.open_nursery() as nursery:
            nursery.start_soon(world.publisher.decay.run)
            await world.write("a.bin", LARGE)
            await world.settle()
            await trio.sleep(100)
            assert place.count("checksum") == 0
            nursery.cancel_scope.cancel()

    run(main)
