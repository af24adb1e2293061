"""Waiting until commits do not have to wait for the disk."""

from __future__ import annotations

import trio

from cachefs.errors import NO_SPACE
from cachefs.meta.database import Database

_PAUSE = 0.05


async def room(database: Database, *, frees_disk: bool = False) -> None:
    """Return once more may be committed without waiting for the disk: at once, as a rule.

    `frees_disk`: what is to be committed makes room there, so a disk that is full is no reason.
    """
    while database.crowded:
        if frees_disk and database.lag.error in NO_SPACE:
            return
        await trio.sleep(_PAUSE)
