"""Bytes of objects that are read while the cache has no room for them.

They come from the store in blocks, through memory: no cache file, ledger or database knows of them,
so nothing is to be counted, and a kill leaves nothing behind. Who reads the same block shares it.
Blocks get shorter when they have to go before much of them was read (readers are many, or read here
and there), and longer again when they are read. Memory: `KEPT` bytes that have arrived, and as much
on its way, over all files.

One version, as with fills: every request carries the etag. Once all of an object has been read,
with what is in its cache file, it is compared with the object's checksum. On the trio thread.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from cachefs.cache.filler import Fill, stale_error
from cachefs.errors import NotFound, PreconditionFailed

LONGEST = 4 << 20
"""Bytes of a block at most."""
SHORTEST = 256 << 10
"""Bytes of a block at least."""
AT_ONCE = 8
"""Requests under way at a time."""
KEPT = AT_ONCE * LONGEST
"""Bytes of blocks that are kept in memory."""

FetchBytes = Callable[[str, int, int, str | None], Awaitable[bytes]]
"""Bytes [start, end) of an object (key, start, end, etag); all of them. StoreError."""

Checksum = Callable[[bytes], Awaitable[int]]
"""CRC64NVME of bytes."""
Combine = Callable[[Sequence[tuple[int, int]]], Awaitable[int]]
"""That of adjoining ranges: (CRC64NVME, size in bytes) of each, in order."""


class Damaged(OSError):
    """What was read of an object has not the checksum that this was stored with."""


async def _uncounted(*_: object) -> int:
    return 0


_Name = tuple[str, str, str | None, int, int]
"""Cache file, key, etag, first byte, length."""


@dataclass(slots=True, eq=False)
class _Block:
    """Bytes [start, end) of an object, once they are here."""

    name: _Name
    start: int
    end: int
    data: bytes = b""
    read: int = 0
    """Bytes that were handed out of it."""
    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held while they are on their way."""


@dataclass(slots=True, eq=False)
class _Passed:
    """Checksums of what was read of an object and not kept."""

    fill: Fill
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Start -> (end, CRC64NVME): the longest from there."""
    total: int = 0

    def note(self, start: int, end: int, crc64: int) -> list[tuple[int, int]] | None:
        """One more; all of the object's, with those that were kept, if this is what lacked."""
        before = self.pieces.get(start, (start, 0))
        if end < before[0] or before == (end, crc64):
            return None
        self.pieces[start] = (end, crc64)
        self.total += end - before[0]
        is_all = self.total + self.fill.present.total >= self.fill.size
        return self.fill.pieces(self.pieces) if is_all else None


class Unkept:
    """Reads through memory, for fills whose files get no room."""

    def __init__(
        self,
        fetch: FetchBytes,
        *,
        checksum: Checksum = _uncounted,
        combine: Combine = _uncounted,
        on_fetched: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """`on_fetched(bytes)` is called with what has arrived."""
        self._fetch = fetch
        self._checksum = checksum
        self._combine = combine
        self._on_fetched = on_fetched
        self._blocks: OrderedDict[_Name, _Block] = OrderedDict()
        """What was used last comes last."""
        self._passed: dict[str, _Passed] = {}
        """By cache file."""
        self._limit = trio.CapacityLimiter(AT_ONCE)
        self._length = LONGEST

    @property
    def held(self) -> int:
        """Bytes in memory, but for those on their way."""
        return sum(len(block.data) for block in self._blocks.values())

    def at_hand(self, fill: Fill, start: int, end: int) -> bytes | None:
        """Bytes [start, end), if one block has them all."""
        block = self._find(fill, start) if self._blocks else None
        if block is None or not block.data or end > block.end:
            return None
        return self._take(block, start, end)

    async def read(self, fill: Fill, start: int, end: int) -> bytes:
        """Bytes [start, end) of the object, which has them. StoreError; ESTALE as for a fetch;
        Damaged."""
        pieces = []
        while start < end:
            block = self._find(fill, start) or self._begin(fill, start)
            async with block.lock:
                if not block.data:
                    await self._bring(fill, block)
            pieces.append(self._take(block, start, min(end, block.end)))
            start += len(pieces[-1])
        return b"".join(pieces)

    def forget(self, path: str) -> None:
        """Nobody has this cache file open any more, or what was read of it was damaged."""
        self._passed.pop(path, None)
        for name in [each for each in self._blocks if each[0] == path]:
            del self._blocks[name]

    def _find(self, fill: Fill, at: int) -> _Block | None:
        length = LONGEST
        while length >= SHORTEST:
            block = self._blocks.get(_name(fill, at, length))
            if block is not None:
                return block
            length //= 2
        return None

    def _begin(self, fill: Fill, at: int) -> _Block:
        name = _name(fill, at, self._length)
        block = _Block(name, name[-2], min(name[-2] + self._length, fill.size))
        self._blocks[name] = block
        return block

    def _take(self, block: _Block, start: int, end: int) -> bytes:
        data = block.data[start - block.start : end - block.start]
        block.read += len(data)
        if block.name in self._blocks:
            self._blocks.move_to_end(block.name)
        return data

    async def _bring(self, fill: Fill, block: _Block) -> None:
        if fill.stale:
            raise stale_error(fill)
        try:
            async with self._limit:
                data = await self._fetch(fill.key, block.start, block.end, fill.etag)
                await self._compare(fill, block, data)
            block.data = data
        except PreconditionFailed as error:
            fill.stale = True
            raise stale_error(fill) from error
        except NotFound as error:
            raise stale_error(fill) from error
        finally:
            if not block.data and self._blocks.get(block.name) is block:
                del self._blocks[block.name]
        self._on_fetched(len(block.data))
        self._blocks[block.name] = block
        self._blocks.move_to_end(block.name)
        self._let_go()

    async def _compare(self, fill: Fill, block: _Block, data: bytes) -> None:
        if fill.crc64 is None:
            return
        crc64 = await self._checksum(data)
        passed = self._passed.get(fill.path)
        if passed is None or passed.fill is not fill:
            passed = self._passed[fill.path] = _Passed(fill)
        pieces = passed.note(block.start, block.end, crc64)
        if pieces is not None and await self._combine(pieces) != fill.crc64:
            raise Damaged(errno.EIO, "the object has not the checksum that it was stored with")

    def _let_go(self) -> None:
        """Drop what was not used for longest, until the rest is little enough."""
        while self.held > KEPT:
            gone = next(each for each in self._blocks.values() if each.data)
            del self._blocks[gone.name]
            if 2 * gone.read < len(gone.data):
                self._length = max(SHORTEST, self._length // 2)
            else:
                self._length = min(LONGEST, 2 * self._length)


def _name(fill: Fill, at: int, length: int) -> _Name:
    return fill.path, fill.key, fill.etag, at - at % length, length
