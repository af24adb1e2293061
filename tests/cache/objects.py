"""A store of one object and a fill of it, for the tests of the filler."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from cachefs.cache.filler import Fill, Filler, open_filler
from cachefs.errors import PreconditionFailed

CHUNK = 1000
WINDOW = 4


class Store:
    """One object. Fetches wait at `gate`, while there is one; `fail` decides on errors by start."""

    def __init__(self, content: bytes, etag: str = "v1") -> None:
        self.content = content
        self.etag = etag
        self.fetched: list[tuple[int, int]] = []
        self.gate: trio.Event | None = None
        self.fail: Callable[[int], Exception | None] = lambda start: None
        self.running = 0
        self.most = 0
        self.checksum: Callable[[int, int], int | None] = lambda start, end: start

    async def fetch(
        self, key: str, path: str, start: int, end: int, if_match: str | None
    ) -> tuple[int, int | None]:
        self.fetched.append((start, end))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await trio.lowlevel.checkpoint()
        finally:
            self.running -= 1
        if (error := self.fail(start)) is not None:
            raise error
        if if_match != self.etag:
            raise PreconditionFailed("changed")
        fd = os.open(path, os.O_WRONLY)
        try:
            return os.pwrite(fd, self.content[start:end], start), self.checksum(start, end)
        finally:
            os.close(fd)


def run(
    store: Store,
    body: Callable[[Filler], Awaitable[None]],
    *,
    max_in_flight: int = WINDOW,
    longest: int = 1,
) -> None:
    """`longest`: chunks of a request."""

    async def main() -> None:
        with trio.fail_after(10):
            async with open_filler(
                store.fetch, chunk=CHUNK, max_in_flight=max_in_flight, run=longest
            ) as filler:
                await body(filler)

    trio.run(main)


def content(fill: Fill) -> bytes:
    return Path(fill.path).read_bytes()


def starts(store: Store) -> list[int]:
    return [start // CHUNK for start, _ in store.fetched]
