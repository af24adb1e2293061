"""Files that are closed and yet written: through mappings that have outlived their descriptors.

In passthrough a shared mapping belongs to the cache file, so it keeps no handle alive: the kernel
releases the handle while stores go on. Only a read lease on the cache file tells (`cache.lease`).
Such a file stays open, without a handle, until its last mapping is gone.

For an instant the same is true of any close: the kernel sends the release just before it lets go of
the cache file. It has done so when close(2) returns. So whoever looks again then, before anything
that the closer may do next gets its number, sees how it is: `OpenTable.settle` is called before
every change of the namespace and every other close. What is still undecided then, nobody has
finished; it is looked at now and then.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from cachefs.vfs.opened import Lane, OpenInode, OpenTable

_FIRST, _LONGEST = 0.003, 1.0
"""Seconds between two looks at the files that linger."""


class Lingering:
    """Keeps such files in the table until they are complete."""

    def __init__(self, table: OpenTable, finish: Callable[[OpenInode], None]) -> None:
        """`finish` is called for each file that turns out to be complete."""
        self._table = table
        self._finish = finish
        table.on_settle = self._settle

    def keep(self, opened: OpenInode) -> bool:
        """To be asked when the last writing handle goes: False if the file is complete."""
        if not self._has_writer(opened):
            return False
        self._table.linger(opened)
        return True

    def _has_writer(self, opened: OpenInode) -> bool:
        if opened.lane is not Lane.PASSTHROUGH or opened.orphaned:
            return False
        try:
            return opened.device.writer_open(opened.gen.file)
        except OSError:
            return False  # No leases on this filesystem: nobody can tell.

    def _settle(self) -> None:
        for opened in list(self._table.lingering.values()):
            if not opened.writers and not self._has_writer(opened):
                del self._table.lingering[opened.ino]
                self._finish(opened)

    async def run(self) -> None:
        """Look at lingering files: soon, then less and less often."""
        while True:
            await self._table.lingers.wait()
            self._table.lingers = trio.Event()
            delay = _FIRST
            while self._table.lingering and not self._table.lingers.is_set():
                await trio.sleep(delay)
                self._table.settle()
                delay = min(_LONGEST, delay * 1.5)
