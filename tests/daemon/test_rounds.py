"""A listing that is older than what happened here since undoes nothing of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from cachefs.vfs.attributes import ROOT
from tests.daemon.lab import Lab, in_lab


@asynccontextmanager
async def _late_listing(lab: Lab) -> AsyncIterator[None]:
    """A round whose listing is made before the block, and arrives after it."""
    made, arrives = trio.Event(), trio.Event()
    call = lab.bucket.call

    async def late(method: str, /, **arguments: Any) -> Any:
        result = await call(method, **arguments)
        if method == "list":
            made.set()
            await arrives.wait()
        return result

    lab.bucket.call = late  # type: ignore[method-assign]
    round_ = lab.asking(lambda: lab.parts.refresher.rounds.run(ROOT))
    await made.wait()
    yield
    arrives.set()
    await round_
    lab.bucket.call = call  # type: ignore[method-assign]


def _names(lab: Lab) -> list[str]:
    rows = lab.services.meta.inodes.children(ROOT, 0, 100)
    return sorted(name.decode() for _, name, _ in rows)


@in_lab()
async def test_published_meanwhile(lab: Lab) -> None:
    """Files, directories and new versions that the listing could not show yet."""
    await lab.write("old", b"1")
    await lab.wait()
    async with _late_listing(lab):
        await lab.write("new", b"new")
        await lab.write("old", b"2")
        await lab.folder("empty")
        await lab.wait()
    assert _names(lab) == ["empty", "new", "old"]
    row = lab.services.meta.inodes.lookup(ROOT, b"old")
    assert row is not None
    assert lab.services.meta.generations.current(row.ino) is not None, "still in the cache"
    assert lab.bucket.get("old") == b"2"


@in_lab()
async def test_removed_and_renamed_meanwhile(lab: Lab) -> None:
    """What the listing still shows does not come back."""
    for name in ("removed", "renamed", "d/removed", "d/renamed"):
        await lab.write(name)
    await lab.wait()
    async with _late_listing(lab):
        await lab.remove("removed")
        await lab.rename("renamed", "other")
        await lab.remove("d/removed")
        await lab.rename("d/renamed", "elsewhere")
        await lab.remove("d")
        await lab.wait()
    assert _names(lab) == ["elsewhere", "other"]
    assert lab.bucket.keys() == ["elsewhere", "other"]


@in_lab()
async def test_a_listing_of_an_older_version(lab: Lab) -> None:
    """A store whose listings lag behind: what the key itself says counts."""
    await lab.write("f", b"f")
    await lab.wait()
    call = lab.bucket.call

    async def lagging(method: str, /, **arguments: Any) -> Any:
        result = await call(method, **arguments)
        if method == "list":
            items = tuple(replace(item, etag="older") for item in result.objects)
            return replace(result, objects=items)
        return result

    lab.bucket.call = lagging  # type: ignore[method-assign]
    before = lab.services.meta.inodes.lookup(ROOT, b"f")
    await lab.parts.refresher.rounds.run(ROOT)
    assert lab.services.meta.inodes.lookup(ROOT, b"f") == before


@in_lab()
async def test_a_listing_that_lies(lab: Lab) -> None:
    """An object that a complete listing leaves out is there as long as its key answers."""
    await lab.write("f", b"f")
    await lab.write("d/f", b"f")
    await lab.wait()
    call = lab.bucket.call

    async def empty(method: str, /, **arguments: Any) -> Any:
        result = await call(method, **arguments)
        if method == "list" and arguments["prefix"] == "":
            return type(result)((), (), None)
        return result

    lab.bucket.call = empty  # type: ignore[method-assign]
    await lab.parts.refresher.rounds.run(ROOT)
    assert _names(lab) == ["d", "f"]
