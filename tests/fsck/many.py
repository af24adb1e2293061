"""A cache with many dirty files, as a kill of daemon and supervisor leaves it."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from cachefs.cache.device import CacheDevice
from cachefs.cache.system import boot_id
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow, GenerationRow, InodeRow


def fill(directory: Path, count: int) -> dict[str, bytes]:
    """Make it; returns what is in it."""
    device = CacheDevice(0, directory)
    meta = Meta(device.meta_dir / "cachefs.db")
    now = time.time_ns()
    bodies = {f"file-{number:06}.bin": b"content of %d" % number for number in range(count)}
    with meta.transaction():
        meta.set_setting("boot", boot_id())
        root = InodeRow(1, stat.S_IFDIR | 0o755, 0, 0, 2, 4096, now, now, now, listed_ns=0)
        meta.inodes.add(root)
        for number, (name, body) in enumerate(bodies.items(), 1):
            _add(device, meta, number, name.encode(), body, now)
    meta.close()
    device.close()
    return bodies


def _add(device: CacheDevice, meta: Meta, number: int, name: bytes, body: bytes, now: int) -> None:
    size = len(body)
    fd = device.create(number)
    os.write(fd, body)
    os.close(fd)
    inode = InodeRow(0, stat.S_IFREG | 0o644, 0, 0, 1, size, now, now, now)
    gen = GenerationRow(
        0, meta.inodes.add(inode), 0, number, "sealed", "tracked", size, None, None, None, None,
        now, now, now, 1,
    )  # fmt: skip
    meta.inodes.set_gen(inode.ino, meta.generations.add(gen))
    entry = meta.dentries.add(1, name, inode.ino)
    effect = EffectRow(
        0, "publish", entry, gen.gen, None, "data", number, number, "pending", None, now, now
    )
    meta.effects.add(effect)
