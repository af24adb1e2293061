"""How large files of a directory are, so that a new one gets room enough.

Each checkpoint has a directory of its own, and its first file finds that empty: then those of the
directories beside it tell. What was there before this daemon is looked up once.
"""

from __future__ import annotations

from cachefs.meta import Meta
from cachefs.vfs.sealing import Sealed

_REMEMBERED = 100_000


class Sizes:
    """The largest file of each directory that is or was there."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._in: dict[int, int] = {}
        self._below: dict[int, int] = {}
        self._noted: dict[int, int] = {}
        """Of each directory the largest that was sealed there: no smaller one changes anything."""

    def note(self, sealed: Sealed) -> None:
        """A generation was sealed."""
        parent = self._parent(sealed.ino) if sealed.parent is None else sealed.parent
        if not parent or sealed.size <= self._noted.get(parent, -1):
            return
        if len(self._in) > _REMEMBERED:
            self._in.clear()
            self._below.clear()
            self._noted.clear()
        above = self._parent(parent)
        self._noted[parent] = sealed.size
        self._in[parent] = max(sealed.size, self.seen(parent))
        self._below[above] = max(sealed.size, self._seen_below(above))

    def _parent(self, ino: int) -> int:
        """Directory of the oldest name of an inode; 0: it has none."""
        names = self._meta.dentries.of_inode(ino)
        return names[0].parent if names else 0

    def seen(self, folder: int) -> int:
        """Bytes of the largest file seen in a directory; 0: none was."""
        if folder not in self._in:
            self._in[folder] = self._meta.inodes.largest_in(folder)
        return self._in[folder]

    def _seen_below(self, above: int) -> int:
        if above not in self._below:
            self._below[above] = self._meta.inodes.largest_below(above)
        return self._below[above]

    def likely(self, folder: int) -> int:
        """The same; of a directory where none was, in those beside it."""
        return self.seen(folder) or self._seen_below(self._parent(folder))
