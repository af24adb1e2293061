"""The kernel's view of mounts: where one is, and how to end one that its daemon no longer serves.

Only mounts that the tests made themselves are ever ended.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

CONNECTIONS = Path("/sys/fs/fuse/connections")
_MNT_FORCE = 1
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/self/mountinfo."""

    mountpoint: str
    minor: int
    fstype: str
    source: str


def _unescape(text: str) -> str:
    return text.encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")


def entries() -> list[MountEntry]:
    """All mounts that this process sees, oldest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        fstype, source = right.split()[:2]
        minor = int(fields[2].partition(":")[2])
        found.append(MountEntry(_unescape(fields[4]), minor, fstype, source))
    return found


def entry_of(path: os.PathLike[str] | str) -> MountEntry | None:
    """The FUSE mount whose mountpoint this is (the topmost one), or None."""
    wanted = os.path.abspath(path)
    matching = [e for e in entries() if e.mountpoint == wanted and e.fstype.startswith("fuse")]
    return matching[-1] if matching else None


def waiting(path: os.PathLike[str] | str) -> int:
    """How many requests of a mount have no answer yet."""
    entry = entry_of(path)
    assert entry is not None, f"{path} is not mounted"
    return int((_control(entry) / "waiting").read_text())


def _control(entry: MountEntry) -> Path:
    """The directory of a connection in the control filesystem, which is mounted if it is absent."""
    folder = CONNECTIONS / str(entry.minor)
    if not folder.exists() and not any(e.fstype == "fusectl" for e in entries()):
        _libc.mount(b"fusectl", os.fsencode(CONNECTIONS), b"fusectl", 0, None)
    return folder


def abort(path: os.PathLike[str] | str) -> bool:
    """Abort the connection of a FUSE mount: every call waiting in it returns ENOTCONN.

    Returns whether there was one. Uses the control filesystem, else a forced umount, which aborts
    the connection too.
    """
    entry = entry_of(path)
    if entry is None:
        return False
    switch = _control(entry) / "abort"
    try:
        switch.write_text("1")
    except OSError:
        _libc.umount2(os.fsencode(path), _MNT_FORCE)
    return True


def detach(path: os.PathLike[str] | str) -> None:
    """Take a mount out of the tree, now; its connection ends with its last user."""
    while entry_of(path) is not None:
        if _libc.umount2(os.fsencode(path), _MNT_DETACH) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


def unmount_below(path: os.PathLike[str] | str) -> None:
    """End every mount at or below a directory, the last one first."""
    top = os.path.abspath(path)
    below = [e for e in entries() if e.mountpoint == top or e.mountpoint.startswith(f"{top}/")]
    for entry in reversed(below):
        if entry.fstype.startswith("fuse"):
            abort(entry.mountpoint)
        _libc.umount2(os.fsencode(entry.mountpoint), _MNT_DETACH)
