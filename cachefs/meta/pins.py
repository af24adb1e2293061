"""Paths whose cached copies are never evicted."""

from __future__ import annotations

import json
from collections.abc import Callable

_KEY = "pins"


class Pins:
    """A few paths below the mountpoint, each of which stands for all below it. Pins are of paths:
    what comes to be at one is pinned too."""

    def __init__(
        self, read: Callable[[str], str | None], write: Callable[[str, str], None]
    ) -> None:
        """`read` and `write` a setting."""
        self._write = write
        self._paths = frozenset(json.loads(read(_KEY) or "[]"))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._paths)

    def add(self, path: str) -> None:
        """Pin a path; the root's is empty."""
        self._save(self._paths | {path})

    def remove(self, path: str) -> bool:
        """Unpin a path and all below it; False when none was pinned."""
        left = frozenset(each for each in self._paths if not _is_at(each, path))
        found = left != self._paths
        if found:
            self._save(left)
        return found

    def over(self, path: str) -> str | None:
        """The pin that a path is under, its own or one above it."""
        return next((each for each in sorted(self._paths) if _is_at(path, each)), None)

    def _save(self, paths: frozenset[str]) -> None:
        self._write(_KEY, json.dumps(sorted(paths)))
        self._paths = paths


def _is_at(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(top + "/")
