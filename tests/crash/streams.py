"""What the stage does to files that are larger than their cache."""

from __future__ import annotations

from cachefs.daemon.compose import Parts
from cachefs.vfs.offloading import _Piece
from cachefs.vfs.opened import OpenInode, Stream


class StreamCalls:
    """Calls by name, as in `stage.Stage`."""

    parts: Parts
    handles: dict[str, int]

    async def handle(self, path: str) -> int:
        """Of a file that is open."""
        raise NotImplementedError

    async def do_offload(self, path: str, at: int) -> None:
        """There is no room, and this is cold: 8 MiB from MiB `at` on."""
        opened = self.parts.files.handle(await self.handle(path)).inode
        await self._offload(opened, self.parts.streams.begin(opened), at << 20)

    async def do_outdated(self, path: str, at: int) -> None:
        """As `offload`, but it is written to before all is sent."""
        opened = self.parts.files.handle(await self.handle(path)).inode
        stream = self.parts.streams.begin(opened)
        stream.spoiled.add(at << 20)
        await self._offload(opened, stream, at << 20)

    async def _offload(self, opened: OpenInode, stream: Stream, start: int) -> None:
        if stream.spans.within(start, start + (8 << 20)):
            return  # By a daemon that died.
        if not opened.writing:
            await self.parts.files.write(next(iter(self.handles.values())), 0, b"")
        offloader, ledger = self.parts.offloader, self.parts.storage.ledgers[0]
        await offloader._offload(_Piece(0, opened, start, start + (8 << 20)), stream, ledger)

    async def do_tight(self) -> None:
        """From now on no file of the bucket fits into the cache."""
        borrower = self.parts.borrower
        borrower._is_too_large = lambda opened: opened.fill is not None  # type: ignore[method-assign]
        borrower.can_copy = lambda: True

    async def do_forget_spans(self) -> None:
        await self.parts.hidden.sweep()
