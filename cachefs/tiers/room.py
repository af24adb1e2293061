"""What finds no room in the warm tier, and how much would have to go for it."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import trio

from cachefs.cache.warmdir import WarmDirectory
from cachefs.meta import Meta
from cachefs.tiers.complete import Complete
from cachefs.tiers.plan import Copy
from cachefs.tiers.staging import Stager

log = structlog.get_logger("cachefs.warm")


@dataclass(frozen=True, slots=True)
class Shortage:
    """`name`: a checkpoint, or another file; `nbytes`: what has to go for it; `changed_ns`: when
    the youngest of its files was changed."""

    name: str
    is_checkpoint: bool
    nbytes: int
    changed_ns: int


class Room:
    """On the trio thread."""

    def __init__(
        self, meta: Meta, directory: WarmDirectory, complete: Complete, stager: Stager
    ) -> None:
        self._meta = meta
        self._directory = directory
        self._complete = complete
        self._stager = stager
        self.can_be_made = False
        """Whether there are rules by which older checkpoints give way."""
        self.lacking: Shortage | None = None
        """What found no room in the last round."""
        self.stays = False
        """Nothing gives way to that now."""
        self._told: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why nothing is to be expected of the tier now."""
        if self.lacking is None or (self.can_be_made and not self.stays):
            return None
        return f"the warm tier {self._directory.directory} has no room for {self.lacking.name}"

    def comes_first(self, copy: Copy) -> bool:
        """Whether a copy is of the checkpoint for which room was made."""
        lacking = self.lacking
        return lacking is not None and lacking.name in (self._root(copy), copy.path)

    def _root(self, copy: Copy) -> str | None:
        return self._complete.root(copy.path)

    async def note(self, left: Sequence[Copy], error: OSError | None) -> bool:
        """How a round ended: `left` found no room, if there was an error. True for news."""
        before = self.lacking
        self.lacking = await self._find(left, error) if left and error is not None else None
        name = self.lacking.name if self.lacking is not None else None
        if name != (before.name if before is not None else None):
            self.stays = False
        return self.lacking != before

    def note_judged(self, *, stays: bool) -> bool:
        """Whether anything gives way to what finds no room was looked at; whether that is news."""
        is_news, self.stays = stays != self.stays, stays
        name = self.lacking.name if self.lacking is not None and stays else None
        if name is not None and name != self._told:
            log.warning("no room in the warm tier, and nothing gives way", path=name)
        self._told = name
        return is_news

    async def _find(self, left: Sequence[Copy], error: OSError) -> Shortage:
        """The newest checkpoint that is whole comes first; else the first in line."""
        groups: dict[str | None, list[Copy]] = defaultdict(list)
        for copy in left:
            groups[self._root(copy)].append(copy)
        changed = {root: max(map(self._changed, found)) for root, found in groups.items()}
        whole = [each for each in groups if each is not None and self._complete.is_finished(each)]
        root = max(whole, key=lambda each: changed[each], default=self._root(left[0]))
        copies = groups[root] if root is not None else list(left[:1])
        needed, free = await trio.to_thread.run_sync(
            lambda: (self._stager.allocated(copies), self._directory.free())
        )
        if error.errno == errno.EDQUOT or free is None:
            free = 0  # Nobody tells.
        name = root if root is not None else copies[0].path
        when = max(map(self._changed, copies))
        return Shortage(name, root is not None, max(1, needed - free), when)

    def _changed(self, copy: Copy) -> int:
        inode = self._meta.inodes.get(copy.wanted.ino)
        return inode.mtime_ns if inode is not None else 0
