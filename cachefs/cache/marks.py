"""What a cache file says of itself, in extended attributes, for when nobody else can say it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CLOSED = "user.cachefs.closed"
_PATH = "user.cachefs.path"


def mark_closed(fd: int, now_ns: int) -> None:
    """Note on an open cache file that a program closed it."""
    try:
        os.setxattr(fd, _CLOSED, now_ns.to_bytes(8, sys.byteorder, signed=True))
    except OSError:
        pass  # without extended attributes such a file is held after a crash


def closed_at(path: str) -> int | None:
    """When a program last closed a cache file, nanoseconds since the epoch; None: not noted."""
    try:
        mark = os.getxattr(path, _CLOSED)
    except OSError:
        return None
    return int.from_bytes(mark, sys.byteorder, signed=True) if len(mark) == 8 else None


def mark_path(fd: int, path: bytes) -> None:
    """Note on an open cache file the path, below the mount, that it is closed under. Some 5 us."""
    try:
        os.setxattr(fd, _PATH, path)
    except OSError:
        pass  # then only the database knows


def path_of(path: str | Path) -> bytes | None:
    """The path that a cache file was last closed under; None: not noted."""
    try:
        return os.getxattr(path, _PATH, follow_symlinks=False) or None
    except OSError:
        return None
