"""Bytes that changed in the cache while they waited for the store.

Nobody reads a closed file again before it is uploaded. Most are within seconds; what waits longer
(a store out of reach, a refusal, a cache that is carried to another machine) may outlive the
health of its disk. So a file that waits gets a checksum, read back once after it was brought to
the disk, and with it is compared before its upload begins. What differs is not uploaded: it is
stalled, and told. A file that is uploaded at once is read once, as ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.errors import CacheError, CacheFileDamaged, CachefsError
from cachefs.flush.client import StoreClient
from cachefs.meta import Meta
from cachefs.meta.rows import GenerationRow
from cachefs.model.states import DAMAGED, GenState
from cachefs.store.base import FileRange

log = structlog.get_logger("cachefs.flush")

AFTER = 15.0
"""Seconds that a closed file waits before it gets its checksum."""
_INTERVAL = 5.0
_BATCH = 64


class Decay:
    """Takes checksums of what waits, and compares them."""

    def __init__(
        self, meta: Meta, client: StoreClient, path_of: Callable[[GenerationRow], str]
    ) -> None:
        self._meta = meta
        self._client = client
        self._path_of = path_of
        self.rescue: Callable[[int], Awaitable[bool]] = _lost
        """Awaited with a generation whose cache file is gone; whether it is back."""
        self._sound: set[int] = set()
        """Generations that were compared by this process."""

    async def run(self) -> None:
        """Take checksums, one after the other: nobody waits for them."""
        while True:
            await trio.sleep(_INTERVAL)
            before = time.time_ns() - int(AFTER * 1e9)
            for row in self._meta.generations.unchecked(before, _BATCH):
                try:
                    await self._take(row)
                except CacheError as error:
                    log.info("no checksum of a cache file", file=row.file, reason=str(error))
                except CachefsError:
                    break  # The mover died, or the daemon ends.

    async def _take(self, row: GenerationRow) -> None:
        crc64 = await self._client.checksum(FileRange(self._path_of(row), 0, row.size))
        now = self._meta.generations.get(row.gen)
        same = now is not None and (now.file, now.sealed_ns) == (row.file, row.sealed_ns)
        if same and self._meta.generations.set_checksum(row.gen, crc64):
            self._sound.add(row.gen)

    async def sound_path(self, gen: GenerationRow) -> str:
        """The cache file to upload, which is as long as it was when it was closed, and holds the
        same bytes as far as that is known. Raises CacheFileDamaged, OSError."""
        path = self._path_of(gen)
        if not os.path.lexists(path) and await self.rescue(gen.gen):
            gen = self._meta.generations.get(gen.gen) or gen
            if gen.state == GenState.HELD:
                raise CacheFileDamaged(gen.error or DAMAGED)
            path = self._path_of(gen)
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise CacheFileDamaged(f"{DAMAGED}: it is gone") from None
        if size != gen.size and not (gen.grows and size > gen.size):
            raise CacheFileDamaged(f"{DAMAGED}: it has {size} bytes of {gen.size}")
        await self._compare(gen)
        return path

    async def _compare(self, gen: GenerationRow) -> None:
        row = self._meta.generations.get(gen.gen)
        if row is None or row.crc64 is None or row.gen in self._sound:
            return
        if self._meta.spans.has(row.gen):  # The checksum is of what the store has of it, too.
            return
        crc64 = await self._client.checksum(FileRange(self._path_of(row), 0, row.size))
        if crc64 != row.crc64:
            raise CacheFileDamaged(
                f"{DAMAGED}: its bytes are not those that were written",
                hint="the disk under the cache is failing",
            )
        self._sound.add(row.gen)

    def forget(self, gen: int) -> None:
        """It is in the store."""
        self._sound.discard(gen)


async def _lost(gen: int) -> bool:
    """There is no other place to look."""
    return False
