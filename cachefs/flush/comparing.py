"""What a file that was written anew has in common with the object that it replaces.

Nobody saw which of its bytes were written: it was truncated first, renamed over the old one, or
written past the daemon. The object's parts have checksums from their upload; ranges of the new file
that have the same ones are copied inside the store instead of being sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from cachefs.flush.client import StoreClient
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow, ObjectRow
from cachefs.model.extents import ExtentSet
from cachefs.store.base import FileRange

_MANY = 1000


class Common(NamedTuple):
    """Result of a comparison."""

    base: ObjectRow
    dirty: ExtentSet
    """What differs from it."""


class Comparison:
    """Compares generations of unknown extents, each once."""

    def __init__(
        self, meta: Meta, client: StoreClient, path_of: Callable[[GenerationRow], str]
    ) -> None:
        self._meta = meta
        self._client = client
        self._path_of = path_of
        self._found: dict[tuple[int, int | None], Common] = {}
        """(generation, when it was sealed): one may be written to and sealed again."""

    async def run(self, gen: GenerationRow, key: str) -> None:
        """Compare a generation with what `key` holds, unless that was done. CachefsError."""
        known = self._meta.objects.get(key)
        if gen.grows or known is None or not known.etag:
            return
        parts: list[tuple[int, int | None]] = json.loads(known.parts or "[]")
        whole = sum(size for size, _ in parts) == known.size
        done = self._found.get(_sealed(gen))
        if len(parts) < 2 or not whole or (done is not None and done.base.etag == known.etag):
            return
        same = await self._same(gen, parts)
        if len(self._found) >= _MANY:
            self._found.clear()  # Most were given up: what is still wanted is compared again.
        self._found[_sealed(gen)] = Common(known, ExtentSet(same.gaps(0, gen.size)))

    async def _same(self, gen: GenerationRow, parts: list[tuple[int, int | None]]) -> ExtentSet:
        same, start, path = ExtentSet(), 0, self._path_of(gen)
        for size, crc64 in parts:
            end = start + size
            known = crc64 is not None and end <= gen.size
            if known and await self._client.checksum(FileRange(path, start, end)) == crc64:
                same.add(start, end)
            start = end
        return same

    def of(self, gen: GenerationRow) -> Common | None:
        """What was found, as long as the object is there in that version."""
        found = self._found.get(_sealed(gen))
        known = self._meta.objects.get(found.base.key) if found is not None else None
        current = found is not None and known is not None and known.etag == found.base.etag
        return found if current else None

    def forget(self, gen: int) -> None:
        """It is in the store."""
        for each in [each for each in self._found if each[0] == gen]:
            del self._found[each]


def _sealed(gen: GenerationRow) -> tuple[int, int | None]:
    return gen.gen, gen.sealed_ns
