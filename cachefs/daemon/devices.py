"""Cache devices that fail while the mount goes on: noticed, and told what is lost with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import structlog
import trio

from cachefs.cache.absent import AbsentDevice
from cachefs.cache.device import CacheDevice
from cachefs.daemon.paths import absolute
from cachefs.daemon.services import Services

log = structlog.get_logger("cachefs.daemon")

_INTERVAL = 1.0
"""Seconds between looks at a device that nobody uses."""
_NAMED = 20
"""Files that the log names; `status` has more."""


def in_use(services: Services) -> Iterator[CacheDevice]:
    """All devices but those that nobody asked for and nobody needs."""
    for device in services.devices:
        if not isinstance(device, AbsentDevice) or not device.retired:
            yield device


def lost_files(services: Services) -> Iterator[dict[str, str]]:
    """Files whose only copy is on a device that failed: `path` and `error`."""
    for device in in_use(services):
        if device.healthy:
            continue
        for row in services.meta.generations.only_on(device.index):
            for name in services.meta.dentries.of_inode(row.ino)[:1]:
                key = services.meta.dentries.path(name.parent, name.name).decode()
                why = f"its cache device {device.directory} has failed: {device.failure}"
                yield {"path": absolute(services, key), "error": why}


async def watch(services: Services, on_failed: Callable[[], Awaitable[None]]) -> None:
    """Look at each device now and then; `on_failed` is awaited when one has failed."""
    async with trio.open_nursery() as nursery:
        for device in services.devices:
            if device.healthy:
                nursery.start_soon(_watch_one, services, device, on_failed)
        await trio.sleep_forever()


async def _watch_one(
    services: Services, device: CacheDevice, on_failed: Callable[[], Awaitable[None]]
) -> None:
    while device.healthy:
        await trio.sleep(_INTERVAL)
        await trio.to_thread.run_sync(device.look, abandon_on_cancel=True)
    rows = services.meta.generations.only_on(device.index)
    paths = [each["path"] for each in lost_files(services)]
    log.error(
        "a cache device has failed; what is in the store is read from there",
        device=str(device.directory),
        reason=device.failure,
        only_there=len(rows),
        files=paths[:_NAMED],
    )
    # It may give some of them all the same, while it lasts.
    queue = services.queue
    queue.hurry([effect.id for row in rows for effect in queue.of_gen(row.gen)])
    await on_failed()
