"""The end of a mount: upload what can be uploaded, and count what remains."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from cachefs.daemon import census
from cachefs.daemon.services import Services

TICK = 0.2
"""Seconds between two reports of progress."""

_COUNT_DUTY = 20.0


@dataclass(frozen=True, slots=True)
class Remaining:
    """What the bucket lacks: files and other names, and their bytes."""

    files: int
    bytes: int


OnRemaining = Callable[[Remaining], Awaitable[None]]


async def drain(
    services: Services, timeout: float | None, on_progress: OnRemaining | None = None
) -> Remaining:
    """Make everything durable that can be; returns what remains.

    Ends after `timeout` seconds (None: no limit), or when nothing moves any more: what is stalled,
    conflicted, held or still open for writing is not waited for.
    """
    queue = services.queue
    services.table.settle()
    queue.settles = False
    queue.kick()
    try:
        with trio.move_on_after(math.inf if timeout is None else timeout):
            await _until_idle(services, on_progress)
            await services.flusher.sweep_now()
    finally:
        queue.settles = True
    return remaining(services)


async def _until_idle(services: Services, on_progress: OnRemaining | None) -> None:
    next_tick = -math.inf
    while services.queue.has_work():
        now = trio.current_time()
        if now >= next_tick:
            left = remaining(services)
            next_tick = now + max(TICK, _COUNT_DUTY * (trio.current_time() - now))
            if on_progress is not None:
                await on_progress(left)
            continue
        with trio.move_on_after(next_tick - now):
            await services.queue.changed()


def remaining(services: Services) -> Remaining:
    """What the bucket lacks now."""
    counted = census.take(services)
    return Remaining(counted.files, counted.bytes)
