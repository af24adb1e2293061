"""Which listings of directories the kernel may give out again without asking.

It keeps the entries of a directory that was read to its end, drops them at the next change through
the mount, and gives them to whoever reads the directory from its start (FOPEN_CACHE_DIR). What it
does not know is decided here, at every open:

- Entries are good for as long as names and attributes are, counted from the open that began to
  read them. After that they are read anew, attributes with them: asking for these name by name
  would take ten times as long.
- A change that did not come through the mount ends them (`forget`).
- Only one handle of a directory at a time may use them. In the middle of a directory the kernel
  finds its place by the entry that it gave out last. If somebody removes that one, and another
  reader has the entries filled anew meanwhile, it asks us; but if they fill their last page to the
  last byte, it takes this for the end, and the rest would be skipped.

Source: linux, fs/fuse/readdir.c.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_REMEMBERED = 100_000


class Listings:
    """Decides at each opendir; see the module docstring."""

    def __init__(
        self,
        grant: Callable[[int, bool], None] | None,
        handles: Mapping[int, int],
        *,
        lifetime: float,
    ) -> None:
        """`grant(fh, keep)`: the open of `fh` may use entries, and those that are there too if
        `keep`; None: there is nobody to tell the kernel. `handles`: of directories that are open,
        with their inodes. `lifetime` in seconds; 0: never."""
        self._grant = grant
        self._handles = handles
        self._lifetime = lifetime
        self._began: dict[int, float] = {}
        """Directory -> when the reading of its entries began (monotonic)."""

    def opened(self, fh: int, ino: int, *, is_old: bool) -> None:
        """To be called before the open of a directory is answered, with its handle among the
        others; `is_old`: who else has access to the store may have changed it since it was listed.
        """
        if self._grant is None or not self._lifetime or self._has_others(fh, ino):
            return
        now = time.monotonic()
        keep = not is_old and now - self._began.get(ino, float("-inf")) < self._lifetime
        if not keep:
            if len(self._began) >= _REMEMBERED:
                self._began.clear()
            self._began[ino] = now
        self._grant(fh, keep)

    def _has_others(self, fh: int, ino: int) -> bool:
        return any(other == ino and each != fh for each, other in self._handles.items())

    def forget(self, ino: int) -> None:
        """The entries of a directory are not what the kernel may think they are."""
        self._began.pop(ino, None)
