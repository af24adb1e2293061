"""How much room the mount has, as statfs tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachefs.cache.ledger import SpaceLedger
from cachefs.meta import Meta
from cachefs.vfs.opened import OpenTable

_BLOCK = 4096
_FILES_FREE = 1 << 30
"""Inode numbers are not scarce; programs only want to see that some are left."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes and counts for statfs."""

    block_size: int
    size: int
    free: int
    files: int
    files_free: int


class Space:
    """The cache as programs see it: its size, and what can be written before something must go.

    The bucket has no size of its own. What limits a writer is the cache: the room it has, counting
    as free what is durable and can be evicted.
    """

    def __init__(self, meta: Meta, ledgers: Sequence[SpaceLedger], table: OpenTable) -> None:
        self._meta = meta
        self._ledgers = ledgers
        self._table = table

    def room(self) -> int:
        """Bytes that can be written or fetched before somebody has to wait for the store: what is
        free, and what is durable. Pins may still forbid evicting some of it."""
        used = sum(ledger.used for ledger in self._ledgers)
        dirty = self._meta.generations.pending_totals()[1]
        dirty += sum(each.accounted for each in self._table.inodes.values() if each.writing)
        return sum(ledger.headroom() for ledger in self._ledgers) + max(0, used - dirty)

    def usage(self) -> Usage:
        """The present state, cheap enough for every call."""
        size = sum(ledger.capacity for ledger in self._ledgers)
        return Usage(_BLOCK, size, min(self.room(), size), self._meta.inodes.count(), _FILES_FREE)
