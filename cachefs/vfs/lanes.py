"""Which lane an open file takes.

Passthrough: the kernel moves data between program and cache file, and the daemon sees no write.
Tracked: every write comes through the daemon, which knows each extent. The kernel's rules
(Documentation/filesystems/fuse/fuse-passthrough.rst): while an inode has a passthrough handle all
its handles share one backing file and one backing id, and no handle may use the page cache. So the
lane belongs to the inode: chosen at its first open, kept until its last handle is gone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from cachefs.cache.device import CacheDevice
from cachefs.vfs.opened import Handle, OpenInode


class Change(NamedTuple):
    """Something that happened to an open file without passing here."""

    fh: int
    start: int
    end: int
    """Bytes whose content or allocation changed (fallocate)."""
    abandoned: bool = False
    """The open was answered to nobody: no release will come."""
    flushed: bool = False
    """A descriptor was closed, perhaps not the last; no bytes changed."""


class LaneKeeper(Protocol):
    """Grants the passthrough lane, handle by handle."""

    def wants(self, mode: int, flags: int) -> bool:
        """Whether a file of this mode, opened with these flags, should take passthrough."""

    def expected(self, parent: int) -> int:
        """Bytes that a new file in a directory should find free on its device."""

    def grant_writer(self, ino: int, parent: int, device: CacheDevice, file: int, fd: int) -> bool:
        """For a new file's first handle: space reserved, backing file registered (`fd` is open for
        reading). False: it cannot be had; nothing is left behind."""

    def grant_reader(self, ino: int, fd: int) -> bool:
        """For the first handle of a complete file that is opened for reading."""

    def join(self, ino: int, fd: int) -> None:
        """A further handle of an inode that is in the lane. OSError: the kernel refuses it."""

    def leave(self, ino: int) -> None:
        """A handle is gone; to be called before its descriptor is closed."""

    def writer_gone(self, device: CacheDevice, file: int) -> int | None:
        """The last writer closed a file: nothing is reserved for it any more.

        Returns the bytes of the file that the ledger has counted, None if it counted none.
        """

    def now_writable(self, handle: Handle) -> None:
        """The handle's generation is open for writing: fallocate may work on its cache file."""

    def now_readable(self, handle: Handle) -> None:
        """Bytes may be read without asking: all, or those that have arrived of the object's."""

    def take_back(self, opened: OpenInode) -> None:
        """What has arrived is all there is, or is no good: reads are to be asked for once more."""

    def keep(self, ino: int) -> None:
        """The kernel's pages of a file that was written without being announced are good."""

    def closed(self, handle: Handle) -> None:
        """A handle is gone, in whatever lane; to be called before its descriptor is closed."""

    def used_up(self, handle: Handle) -> bool:
        """Whether a write came here because what may be written without asking is used up, and more
        may be given (`renew`)."""

    def renew(self, handle: Handle) -> None:
        """More may be written without asking; what was written so far is accounted for."""

    def withdraw(self, handle: Handle) -> None:
        """Every write to the handle is to be asked for from now on."""

    def streams(self, handle: Handle) -> None:
        """Its cache file does not hold all of the file any more: nothing is to be done to it, or
        read from it, without asking."""

    def moved(self, handle: Handle) -> None:
        """Its cache file is another one, on another device, under the same descriptor."""

    def take_read(self) -> int:
        """Bytes that were read without asking since the last call."""

    def resume_writer(self, device: CacheDevice, file: int, parent: int) -> None:
        """Reserve again for a writer that a dead daemon had admitted, as far as there is room."""

    def changes(self) -> Iterable[Change]:
        """What happened since the last call, oldest first; cheap when nothing did."""


class TrackedOnly:
    """Every file in the tracked lane."""

    def wants(self, mode: int, flags: int) -> bool:
        """Never."""
        return False

    def expected(self, parent: int) -> int:
        """Nobody keeps account."""
        return 0

    def grant_writer(self, ino: int, parent: int, device: CacheDevice, file: int, fd: int) -> bool:
        """Never."""
        return False

    def grant_reader(self, ino: int, fd: int) -> bool:
        """Never."""
        return False

    def join(self, ino: int, fd: int) -> None:
        """There is no handle to join."""

    def leave(self, ino: int) -> None:
        """Nothing was held."""

    def writer_gone(self, device: CacheDevice, file: int) -> int | None:
        """Nothing was reserved."""
        return None

    def now_readable(self, handle: Handle) -> None:
        """Nobody asks."""

    def take_back(self, opened: OpenInode) -> None:
        """Nothing was granted."""

    def keep(self, ino: int) -> None:
        """Nothing was granted."""

    def closed(self, handle: Handle) -> None:
        """Nothing was granted."""

    def used_up(self, handle: Handle) -> bool:
        """Nothing was granted."""
        return False

    def renew(self, handle: Handle) -> None:
        """Nothing is granted."""

    def withdraw(self, handle: Handle) -> None:
        """Nothing was granted."""

    def streams(self, handle: Handle) -> None:
        """Nobody asks."""

    def moved(self, handle: Handle) -> None:
        """Nobody asks."""

    def take_read(self) -> int:
        """None: every read is asked for."""
        return 0

    def resume_writer(self, device: CacheDevice, file: int, parent: int) -> None:
        """Nobody had been admitted."""

    def now_writable(self, handle: Handle) -> None:
        """Nobody asks."""

    def changes(self) -> Iterable[Change]:
        """Nothing passes by."""
        return ()


def suits_passthrough(mode: int, flags: int) -> bool:
    """False for what must be tracked: set-id files opened for writing (clearing the bits is ours)
    and synchronous writers (each write is followed by a sync of metadata)."""
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return True
    return not mode & (stat.S_ISUID | stat.S_ISGID) and not flags & os.O_DSYNC
