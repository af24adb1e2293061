"""After the machine went down: cache files whose bytes may never have reached the disk.

The database and a file's size may have survived while its bytes did not. What was synced is known
to be whole (`generation.synced`); of the rest, what the store has is read from there again, and
what it lacks is held for somebody to judge: neither trusted nor thrown away.

The row of a new file may have survived without the file: the kernel writes the database's log when
it likes, and neither that nor a sync of the log brings anybody's directory entry to the disk. So of
a file that was never synced nothing may be left. That is told by its name, and is no damage: what
was ever synced has its entry (`generation.anchored`).
"""

from __future__ import annotations

from collections.abc import Callable

from cachefs.cache.system import boot_id
from cachefs.meta import Meta
from cachefs.model.states import GenState

_BOOT = "boot"
NOT_ON_DISK = "the machine went down before it was on the disk; see whether it is whole"


class Reboots:
    """Notices that the machine was started anew."""

    def __init__(self, meta: Meta, boot: Callable[[], str] = boot_id) -> None:
        """`boot()` names the present run of the machine."""
        self._meta = meta
        self._boot = boot

    def happened(self) -> bool:
        """Whether the machine went down since the cache was last in use, unless that ended with
        everything on the disk."""
        return self._meta.setting(_BOOT) not in (None, "", self._boot())

    def in_use(self) -> bool:
        """Whether the cache was in use when its database was last brought up to date."""
        return self._meta.setting(_BOOT) not in (None, "")

    def remember(self) -> None:
        """From now on bytes may be in memory only."""
        self._meta.set_setting(_BOOT, self._boot())

    def all_is_on_disk(self) -> None:
        """Whatever happens to the machine from now on changes nothing."""
        self._meta.set_setting(_BOOT, "")

    def forget_copies(self) -> None:
        """Copies of what the store has, that were not synced, are copies of anything."""
        for row in self._meta.generations.in_states(GenState.DURABLE):
            if not row.synced and self._meta.objects.holding(row.ino, row.gen):
                self._meta.generations.remove(row.gen)
                self._meta.inodes.clear_gen(row.ino, row.gen)
