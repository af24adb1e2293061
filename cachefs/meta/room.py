"""Waiting until commits do not have to wait for the disk."""

from __future__ import annotations

import trio

from cachefs.meta.database import Database

_PAUSE = 0.05


async def room(database: Database) -> None:
    """Return once more may be committed without waiting for the disk: at once, as a rule."""
    while database.crowded:  # noqa: ASYNC110 - its thread can tell nobody
        await trio.sleep(_PAUSE)
