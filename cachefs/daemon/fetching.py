"""What the filler fetches with, how what it fetched is compared, what is fetched ahead."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from cachefs.cache.filler import Fetch, Fill
from cachefs.cache.unkept import Unkept
from cachefs.config.settings import Settings
from cachefs.daemon.tiering import ReadWarm, Tiering, read_nothing
from cachefs.errors import CacheError, Corrupt
from cachefs.flush.client import StoreClient
from cachefs.meta import Meta
from cachefs.model.checkpoints import checkpoint_root
from cachefs.model.names import matches
from cachefs.observe.metrics import Metrics
from cachefs.store.base import FileRange, Received
from cachefs.vfs.contents import Contents
from cachefs.vfs.files import Files
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.prefetch import Prefetcher
from cachefs.vfs.space import Space


def fetcher(client: StoreClient, metrics: Metrics, read_warm: ReadWarm = read_nothing) -> Fetch:
    """What the filler fetches with: a range of an object into a cache file. `read_warm` is asked
    first."""
    downloaded = metrics.counter("cachefs_download_bytes_total")

    async def fetch(
        key: str, path: str, start: int, end: int, if_match: str | None
    ) -> tuple[int, int | None]:
        if await read_warm(key, path, start, end, if_match):
            return end - start, None
        with told_as_errno(path):
            got: Received = await client.patiently(
                "get_into", key=key, path=path, start=start, end=end, if_match=if_match
            )
        if got.size != end - start:
            raise Corrupt(f"{key}: {got.size} bytes came for a range of {end - start}")
        downloaded.inc(got.size)
        return got

    return fetch


def reader_of(client: StoreClient, metrics: Metrics, tiering: Tiering | None) -> Unkept:
    """What reads without keeping. A warm tier is asked first."""
    downloaded = metrics.counter("cachefs_download_bytes_total")

    async def fetch(key: str, start: int, end: int, etag: str | None) -> bytes:
        here = await tiering.read_bytes(key, start, end, etag) if tiering is not None else None
        if here is not None:
            return here
        data: bytes = await client.patiently(
            "get_bytes", key=key, start=start, end=end, if_match=etag
        )
        if len(data) != end - start:
            raise Corrupt(f"{key}: {len(data)} bytes came for a range of {end - start}")
        downloaded.inc(len(data))
        return data

    return Unkept(
        fetch,
        checksum=client.checksum,
        combine=client.combine,
        on_fetched=metrics.counter("cachefs_unkept_bytes_total").inc,
    )


@contextmanager
def told_as_errno(path: str) -> Iterator[None]:
    """What is wrong with a cache file is a reader's OSError, as with any other file: a full or
    failing disk is nobody's fault but its own."""
    try:
        yield
    except CacheError as error:
        raise OSError(error.errno, os.strerror(error.errno), path) from error


def checksums(client: StoreClient) -> Callable[[Fill], Awaitable[int]]:
    """CRC64NVME of what was fetched: of the pieces as they came, or else of the file."""

    async def checksum(fill: Fill) -> int:
        pieces = fill.pieces()
        if pieces is not None and len(pieces) == 1:
            return pieces[0][0]
        if pieces is not None:
            return await client.combine(pieces)
        with told_as_errno(fill.path):
            return await client.checksum(FileRange(fill.path, 0, fill.size))

    return checksum


def make_prefetcher(
    settings: Settings,
    meta: Meta,
    files: Files,
    contents: Contents,
    space: Space,
    lanes: LaneKeeper,
) -> Prefetcher:
    """Fetches the rest of a checkpoint, and files before they are read, if that is wanted."""
    patterns = settings.checkpoint.patterns
    wanted = settings.cache.prefetch

    def room() -> int:
        """What can be had without pushing out anything that is in use."""
        return space.room() // 2

    return Prefetcher(
        meta,
        files,
        contents,
        is_checkpoint=lambda path: wanted and checkpoint_root(path, patterns) is not None,
        is_data=lambda path: wanted and matches(settings.order.data, path),
        room=room,
        patience=settings.cache.whole_wait,
        is_native=lambda row, flags: lanes.wants(row.mode, flags),
    )
