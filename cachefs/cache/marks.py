"""What a cache file says of itself, in extended attributes, for when nobody else can say it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from cachefs.cache.closings import Closed

_CLOSED = "user.cachefs.closed"
_PATH = "user.cachefs.path"
_LIKE = struct.Struct("=qq")
"""Time of the last write and size; the tap writes it too (`_tap_brief.c`)."""


def mark_closed(fd: int, like: Closed) -> None:
    """Note on an open cache file that a program closed it."""
    try:
        os.setxattr(fd, _CLOSED, _LIKE.pack(*like))
    except OSError:
        pass  # without extended attributes such a file is held after a crash


def closed(path: str) -> Closed | None:
    """What a cache file was like when a program last closed it; None: not noted."""
    try:
        mark = os.getxattr(path, _CLOSED)
    except OSError:
        return None
    return Closed(*_LIKE.unpack(mark)) if len(mark) == _LIKE.size else None


def mark_path(file: str, path: bytes) -> None:
    """Note on a cache file the path, below the mount, that it was closed under."""
    try:
        os.setxattr(file, _PATH, path)
    except OSError:
        pass  # Then only the database knows, or it is gone.


def path_of(path: str | Path) -> bytes | None:
    """The path that a cache file was last closed under; None: not noted."""
    try:
        return os.getxattr(path, _PATH, follow_symlinks=False) or None
    except OSError:
        return None
