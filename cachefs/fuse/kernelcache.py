"""Telling the kernel that what it remembers of a file or a name is no longer so.

Source: linux/fuse.h, FUSE_NOTIFY_INVAL_INODE and FUSE_NOTIFY_INVAL_ENTRY.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pyfuse3
import trio

from cachefs.fuse.listings import Listings


class KernelCache:
    """What the kernel remembers of one mount."""

    def __init__(self, listings: Listings) -> None:
        self._listings = listings

    async def forget(self, parent: int, name: bytes, ino: int) -> None:
        """Attributes and content of `ino`, and the entry that leads to it, are asked for anew.

        In a thread: the kernel may wait for requests that this process has yet to answer.
        """
        self._listings.forget(parent)
        with contextlib.suppress(OSError):  # it remembers nothing of them
            await trio.to_thread.run_sync(pyfuse3.invalidate_inode, ino, abandon_on_cancel=True)
        pyfuse3.invalidate_entry_async(parent, name, ignore_enoent=True)

    async def lead_elsewhere(self, directory: int, names: Sequence[bytes]) -> None:
        """These names of a directory lead somewhere else now, or nowhere. What was opened through
        them stays as it is."""
        self._listings.forget(directory)
        with contextlib.suppress(OSError):
            await trio.to_thread.run_sync(
                pyfuse3.invalidate_inode, directory, True, abandon_on_cancel=True
            )
        for name in names:
            pyfuse3.invalidate_entry_async(directory, name, ignore_enoent=True)
