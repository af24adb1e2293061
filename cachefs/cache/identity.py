"""Which device a cache directory is: a random name in a file of its own.

The database knows its devices by these names, so that directories may be given in another order, a
new one may be put in front, and one that is missing is missed instead of taken for an empty one.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cachefs.failpoints import Point, reach

FILE = "device"
_MOST = 64


def read(directory: Path) -> str | None:
    """The name of the device in `directory`; None: it never had one. OSError."""
    try:
        with open(directory / FILE, encoding="ascii", errors="replace") as file:
            return file.read(_MOST).strip() or None
    except FileNotFoundError:
        return None


def give(directory: Path) -> str:
    """A new name for the device in `directory`, on the disk once this returns. OSError."""
    name = secrets.token_hex(16)
    fd = os.open(directory / f"{FILE}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, f"{name}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    reach(Point.DEVICE_AFTER_NAME)
    os.replace(directory / f"{FILE}.new", directory / FILE)
    reach(Point.DEVICE_AFTER_NAMED)
    return name
