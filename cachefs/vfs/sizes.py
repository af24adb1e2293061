"""How large files of a directory are, so that a new one gets room enough.

Each checkpoint has a directory of its own, and its first file finds that empty: then those of the
directories beside it tell.
"""

from __future__ import annotations

from cachefs.meta import Meta

_REMEMBERED = 100_000


class Sizes:
    """The largest file of each directory, as far as they were closed by this daemon."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._in: dict[int, int] = {}
        self._below: dict[int, int] = {}

    def note(self, gen: int) -> None:
        """A generation was sealed."""
        row = self._meta.generations.get(gen)
        names = self._meta.dentries.of_inode(row.ino) if row is not None else []
        if row is None or not names:
            return
        if len(self._in) > _REMEMBERED:
            self._in.clear()
            self._below.clear()
        parent = names[0].parent
        for sizes, folder in ((self._in, parent), (self._below, self._above(parent))):
            sizes[folder] = max(row.size, sizes.get(folder, 0))

    def _above(self, folder: int) -> int:
        names = self._meta.dentries.of_inode(folder)
        return names[0].parent if names else 0

    def seen(self, folder: int) -> int:
        """Bytes of the largest file seen in a directory; 0: none was."""
        return self._in.get(folder, 0)

    def likely(self, folder: int) -> int:
        """The same; of a directory where none was, in those beside it."""
        return self._in.get(folder) or self._below.get(self._above(folder), 0)
