"""fsync: what has been written survives a power cut once it returns.

The bytes first, then the cache file's directory entry, then the database that says what the file
is: a power cut in between leaves a cache file that nobody knows, never a row without its bytes. (A
row alone may be left of what was never synced: the kernel writes the database's log when it likes,
and no filesystem writes the entry of a new file before that unasked. See `flush.reboot`.)

What the file was like before the sync is remembered with the open file. If it is like that still
when it is sealed, nothing was written since and it is on the disk already; the transaction that
seals it says so. The kernel lets no write run beside an fsync of the same file, unless it goes
around the page cache; and a later write shows in size or time, if that is precise enough.

A file in RAM gets a copy on a device that outlives a power cut, if there is one (`vfs.spilling`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

from cachefs.cache import doubt
from cachefs.cache.device import CacheDevice
from cachefs.cache.system import CLOCK_REALTIME_COARSE
from cachefs.failpoints import Point, reach
from cachefs.meta import Meta
from cachefs.vfs.contents import Contents
from cachefs.vfs.opened import OnDisk, OpenInode


async def sync_file(
    opened: OpenInode,
    contents: Contents,
    meta: Meta,
    sync_meta: Callable[[], Awaitable[None]],
    shelter: Callable[[OpenInode], Awaitable[None]],
) -> None:
    """Bytes, directory entry and metadata of an open file; `shelter` has them copied from RAM.
    OSError."""
    await opened.settled()
    device, gen, sealed = opened.device, opened.gen, not opened.writing
    sealed_ns = gen.sealed_ns
    file = gen.file  # It may move meanwhile: then its new name is on the other disk already.
    before = await device.apart.run(_sync_bytes, opened, device)
    reach(Point.FSYNC_AFTER_FILE)
    if not device.in_memory:  # It may be lost, and `shelter` works all the same.
        await device.apart.run(device.sync_dir, file)
    reach(Point.FSYNC_AFTER_DIRECTORY)
    if not device.in_memory and not gen.anchored:
        meta.generations.set_anchored(gen.gen)
        gen.anchored = 1
        reach(Point.FSYNC_AFTER_ANCHOR)
    await shelter(opened)
    contents.save_open(opened)
    reach(Point.FSYNC_AFTER_SIZE)
    await sync_meta()
    reach(Point.FSYNC_AFTER_DATABASE)
    opened.on_disk = before
    if sealed:  # before the fsync, so it covers every byte of the generation
        meta.generations.set_synced(gen.gen, sealed_ns)
        reach(Point.FSYNC_AFTER_NOTE)


def _sync_bytes(opened: OpenInode, device: CacheDevice) -> OnDisk | None:
    """Returns what tells whether it was written to since; None where nothing would."""
    status = os.fstat(opened.fd)
    before = OnDisk(opened.gen.gen, status.st_size, status.st_mtime_ns)
    past = time.clock_gettime_ns(CLOCK_REALTIME_COARSE) > status.st_mtime_ns
    certain = not opened.unbuffered and (past or device.fine_times)
    doubt.sync(opened.fd)
    return before if certain else None
