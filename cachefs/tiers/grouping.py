"""Which files of a tier make up which checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Protocol, TypeVar

import trio

from cachefs.model import names
from cachefs.tiers.complete import Complete

_AT_A_TIME = 64
"""Rows that are looked at before requests are served again."""
T = TypeVar("T")


class HasPath(Protocol):
    """A row of a table of files."""

    @property
    def path(self) -> str:
        """Below the mountpoint."""


R = TypeVar("R", bound=HasPath)


async def by_checkpoint(
    rows: Iterable[R], complete: Complete
) -> tuple[dict[str, list[R]], list[R]]:
    """(checkpoint -> rows of its files, rows of other files)."""
    groups: dict[str, list[R]] = defaultdict(list)
    others: list[R] = []
    left: list[R] = []
    async for row in gently(rows):
        root = complete.root(row.path)
        (left if root is None else groups[root]).append(row)
    for row in left:
        # Where other files tell that their directory is a checkpoint, all below it is its part.
        root = next((each for each in names.above(row.path) if each in groups), None)
        (others if root is None else groups[root]).append(row)
    return groups, others


async def gently(rows: Iterable[T]) -> AsyncIterator[T]:
    """The rows, with rests in between."""
    for count, row in enumerate(rows):
        if count % _AT_A_TIME == 0:
            await trio.lowlevel.checkpoint()
        yield row
