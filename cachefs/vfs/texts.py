"""What small files that are yet to be shown say."""

from __future__ import annotations

import os

from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow
from cachefs.vfs.contents import Contents

_MOST = 256


def text_of(meta: Meta, contents: Contents, effect: EffectRow) -> bytes:
    """The first bytes of what an effect is to show: a file's content, or where a link leads."""
    gen = meta.generations.get(effect.gen) if effect.gen is not None else None
    if gen is None:
        entry = meta.dentries.by_id(effect.dentry or 0)
        inode = meta.inodes.get(entry.ino) if entry is not None else None
        return inode.target or b"" if inode is not None else b""
    try:
        fd = contents.device(gen).open(gen.file)
    except OSError:
        return b""
    try:
        return os.pread(fd, _MOST, 0)
    finally:
        os.close(fd)
