"""Little room is left for commits that a disk has not taken: nothing new is begun."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from cachefs.meta.database import Database
from cachefs.meta.room import room
from tests.flush.conftest import LARGE, Place
from tests.flush.world import run


class Crowd:
    """Says that there is no room."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_there = True
        patch.setattr(Database, "crowded", property(lambda database: self.is_there))


def test_nothing_is_begun(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch)

    async def main() -> None:
        async with place.mounted() as world:
            await world.write("a.bin", b"small")
            await trio.sleep(60)
            assert place.requests == []
            crowd.is_there = False
            await world.settle()
            assert world.shown == {"a.bin": b"small"}

    run(main)


def test_no_part_goes_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an upload that was begun before."""
    crowd = Crowd(monkeypatch)
    crowd.is_there = False

    async def main() -> None:
        async with place.mounted() as world:
            world.client.before_part = partial(room, world.meta.db)
            place.early["create_upload"] = trio.Event()
            await world.write("a.bin", LARGE)
            while not place.held:  # noqa: ASYNC110 - nothing tells
                await trio.sleep(0.01)
            crowd.is_there = True
            place.early["create_upload"].set()
            await trio.sleep(60)
            assert place.count("upload_part") == 0
            crowd.is_there = False
            await world.settle()
            assert world.shown == {"a.bin": LARGE}

    run(main)
