"""A cache device that the database knows and that is not there.

It stands in the list of devices so that the others keep their numbers. Nothing is ever written to
it, and nothing is found on it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

from cachefs.cache.apart import Apart
from cachefs.cache.device import CacheDevice
from cachefs.cache.heartbeat import NoHeartbeat
from cachefs.cache.system import DeviceKind
from cachefs.model.survival import Level


class AbsentDevice(CacheDevice):
    """Number `index`, which was at `path`; `why` says what is the matter."""

    def __init__(self, index: int, name: str, path: str, kind: DeviceKind, why: str) -> None:
        self.index = index
        self.name = name
        self.retired = False
        """Nobody asked for it, and all that it had is in the store."""
        self.directory = Path(path)
        self.size_limit = 0
        self.fine_times = self.spins = False
        self._kind = kind
        self._survives: Level | None = None
        self.in_memory = False
        self.write_speed = None
        self._fs_type = 0
        self._files = f"{path}/absent"  # Never made: what may lie at `path` is somebody else's.
        self._heartbeat = NoHeartbeat(why)
        self.apart = Apart(f"apart {path}", direct=True)
        self.closings = None
        self._sync_state = threading.Lock()
        self._unsynced: set[int] = set()
        self._clean_shards: set[str] = set()

    def close(self) -> None:
        """There is nothing to be given up."""

    @property
    def kind(self) -> DeviceKind:
        """What it was."""
        return self._kind

    @property
    def total(self) -> int:
        """No bytes."""
        return 0

    def free_bytes(self) -> int:
        """No bytes."""
        return 0

    def create(self, gen: int) -> int:
        """ENODEV."""
        raise OSError(errno.ENODEV, f"the cache device {self.directory} is missing")

    def list_generations(self) -> Iterator[int]:
        """None."""
        return iter(())

    def allocated_total(self) -> int:
        """No bytes."""
        return 0
