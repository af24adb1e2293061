"""Attributes that open files know better than the database."""

from __future__ import annotations

import os
import stat
from functools import partial

from cachefs.failpoints import Point, reach
from cachefs.meta.rows import InodeRow
from cachefs.vfs.lanes import LaneKeeper
from cachefs.vfs.namespace import Namespace
from cachefs.vfs.opened import OpenTable

PRIVILEGES = stat.S_ISUID | stat.S_ISGID


class Overlay:
    """Sizes, times and modes of files that may be open."""

    def __init__(self, namespace: Namespace, lanes: LaneKeeper, table: OpenTable) -> None:
        self._namespace = namespace
        self._lanes = lanes
        self.table = table

    def note_changes(self) -> None:
        """Take in what the kernel's requests did without passing here."""
        raise NotImplementedError

    def overlay(self, row: InodeRow) -> InodeRow:
        """`row` with size, times and blocks of the open file, if it is open for writing."""
        opened = self.table.inodes.get(row.ino)
        if opened is not None and opened.writing:
            self.note_changes()
            opened.refresh()
            row.size = opened.size
            if row.mtime_ns != opened.mtime_ns:  # written to since
                row.mtime_ns = opened.mtime_ns
                row.ctime_ns = max(row.ctime_ns, opened.mtime_ns)
            row.blocks = opened.blocks
        return row

    def mode_changed(self, ino: int) -> None:
        """chmod or chown of a file that may be open."""
        opened = self.table.inodes.get(ino)
        if opened is not None:
            opened.privileged = bool(self._namespace.get(ino).mode & PRIVILEGES)
            for handle in self.table.handles_of(opened) if opened.privileged else ():
                self._lanes.withdraw(handle)

    async def set_mtime(self, ino: int, mtime_ns: int, atime_ns: int) -> None:
        """utimens on a file that is open: later writes move on from there, takeovers go by it."""
        opened = self.table.inodes.get(ino)
        if opened is None:
            return
        await opened.settled()
        if opened.writing:
            times = partial(os.utime, opened.fd, ns=(atime_ns, mtime_ns))
            with opened.written_to():
                await opened.device.apart.run(times)
            reach(Point.TIMES_AFTER_FILE)
        opened.mtime_ns, opened.on_disk, opened.untouched_ns = mtime_ns, None, None
