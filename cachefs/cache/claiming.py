"""Making a cache directory one's own, and what to say when that fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from cachefs.cache.lock import DeviceLock
from cachefs.errors import CacheError, DeviceMissing

_DIRECTORY_MODE = 0o700
_GONE = {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE}
"""What a system call says of a disk that is not there any more."""


def make_top(directory: Path) -> None:
    """The cache directory itself. CacheError."""
    try:
        directory.mkdir(_DIRECTORY_MODE)
    except FileExistsError:
        if not directory.is_dir():
            raise CacheError(
                f"cache directory {directory} is not a directory", hint="give a directory"
            ) from None
    except FileNotFoundError as err:
        raise DeviceMissing(
            f"cannot create cache directory {directory}: {directory.parent} does not exist",
            hint="create it, or mount the disk that belongs there",
        ) from err
    except OSError as err:
        raise unusable(directory, err) from err


def claim(directory: Path) -> DeviceLock:
    """Its lock. CacheError."""
    try:
        return DeviceLock(directory / "LOCK")
    except OSError as err:
        raise unusable(directory, err) from err


def unusable(directory: Path, err: OSError) -> CacheError:
    """What a system call said, for people."""
    hints = {
        errno.EACCES: "let the daemon's user write there, or choose another --cache-dir",
        errno.EPERM: "let the daemon's user write there, or choose another --cache-dir",
        errno.EROFS: "choose a --cache-dir on a writable filesystem",
        errno.ENOSPC: "free some space there, or choose another --cache-dir",
    }
    reason = os.strerror(err.errno) if err.errno else str(err)
    kind = DeviceMissing if err.errno in _GONE else CacheError
    return kind(
        f"cannot use cache directory {directory}: {reason}",
        hint=hints.get(err.errno or 0, "choose another --cache-dir"),
    )
