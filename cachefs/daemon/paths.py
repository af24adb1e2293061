"""From the absolute paths of requests to names in the mount, and back."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from cachefs.daemon.services import Services
from cachefs.errors import UsageError
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, InodeRow
from cachefs.observe.protocol import ControlError
from cachefs.vfs.attributes import ROOT


@dataclass(frozen=True, slots=True)
class Spot:
    """A name in the mount, as it was when it was asked for."""

    path: str
    """Below the mountpoint, without slashes at its ends; the root's is empty."""
    row: InodeRow
    dentry: int
    """0 for the root."""

    @property
    def is_dir(self) -> bool:
        """Whether it stands for a whole tree."""
        return stat.S_ISDIR(self.row.mode)

    def covers(self, key: str) -> bool:
        """Whether a key is this name's, or lies below it."""
        inner = key.rstrip("/")
        return not self.path or inner == self.path or inner.startswith(self.path + "/")


def absolute(services: Services, key: str) -> str:
    """The path that people know a key by."""
    return f"{services.mountpoint.rstrip('/')}/{key.rstrip('/')}".rstrip("/") or "/"


def inside(services: Services, path: object) -> str:
    """A request's path below the mountpoint. Raises UsageError when it is not there."""
    if not isinstance(path, str) or not path:
        raise UsageError("malformed request: a path must be text")
    norm, top = os.path.normpath(path), services.mountpoint.rstrip("/")
    if norm != (top or "/") and not norm.startswith(f"{top}/"):
        raise UsageError(f"{path} is not below {services.mountpoint}")
    return norm[len(top) :].strip("/")


async def locate(services: Services, path: object) -> Spot:
    """The name at a path; symlinks are not followed, neither at its end nor on the way.

    Asks the store only for names in directories that were never listed. Raises ControlError (exit
    code 1) when there is nothing.
    """
    inner = inside(services, path)
    row, dentry = services.namespace.get(ROOT), 0
    try:
        for name in os.fsencode(inner).split(b"/") if inner else ():
            parent = row.ino
            services.namespace.directory(parent)
            known = services.meta.inodes.lookup(parent, name)
            row = known or await services.namespace.lookup(parent, name)
            dentry = services.namespace.require(parent, name).id
    except OSError as err:
        raise ControlError(f"{path}: {err.strerror or err}") from None
    return Spot(inner, row, dentry)


def entry_at(meta: Meta, path: str) -> DentryRow | None:
    """The entry at a path below the mountpoint now; None when there is none."""
    entry: DentryRow | None = None
    parent = ROOT
    for name in os.fsencode(path).split(b"/"):
        entry = meta.dentries.get(parent, name)
        if entry is None:
            return None
        parent = entry.ino
    return entry


def key_in(meta: Meta, spot: Spot, ino: int) -> str | None:
    """The first name of a file that the spot covers, None when it covers none."""
    for name in meta.dentries.of_inode(ino):
        if name.id == spot.dentry:
            return spot.path
        path = meta.dentries.path(name.parent, name.name).decode()
        if spot.is_dir and spot.covers(path):
            return path
    return None
