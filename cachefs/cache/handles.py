"""File handles: names of inodes that hold wherever a directory is moved to, and after its end.

Source: open_by_handle_at(2). A handle contains the inode's generation, so the next inode with the
same number has another one.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_MOST = 128
"""Bytes (MAX_HANDLE_SZ)."""
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


class _Handle(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("data", ctypes.c_ubyte * _MOST),
    )


def handle_of(path: Path) -> str:
    """The handle of what is at `path`, in hexadecimal digits. OSError: its filesystem has none."""
    handle, mount = _Handle(size=_MOST), ctypes.c_int()
    name = os.fsencode(path)
    if _libc.name_to_handle_at(_AT_FDCWD, name, ctypes.byref(handle), ctypes.byref(mount), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return f"{handle.kind:08x}{bytes(handle.data[: handle.size]).hex()}"


def is_gone(handle: str, directory: int) -> bool:
    """Whether nothing in a filesystem has this handle any more; `directory`: a descriptor of any
    directory in it. OSError: that cannot be told (it takes CAP_DAC_READ_SEARCH)."""
    data = bytes.fromhex(handle[8:])
    found = _Handle(size=len(data), kind=int(handle[:8], 16))
    ctypes.memmove(found.data, data, len(data))
    fd = _libc.open_by_handle_at(directory, ctypes.byref(found), os.O_PATH | os.O_CLOEXEC)
    if fd >= 0:
        os.close(fd)
        return False
    if ctypes.get_errno() != errno.ESTALE:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True
