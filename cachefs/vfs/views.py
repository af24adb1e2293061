"""What the namespace asks of whoever keeps its listings up to date."""

from __future__ import annotations

from typing import Protocol


class Views(Protocol):
    """How old the listings of directories are."""

    def is_old(self, ino: int) -> bool:
        """Note a look at a directory; whether it should wait (`renew`) for a new listing."""

    async def renew(self, ino: int) -> None:
        """Return once the directory's view is a new one, or that takes too long."""


class AsListed:
    """A directory stays as it was when it was first listed."""

    def is_old(self, ino: int) -> bool:
        """Never."""
        return False

    async def renew(self, ino: int) -> None:
        """There is nothing to wait for."""
