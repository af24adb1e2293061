"""What the shards hold: random bytes, with each block's place written into it.

A block that lands in the wrong file or at the wrong offset therefore changes the checksum. Each
open file has its own buffer: with aiofiles several writes are under way in threads at once.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import zlib
from collections.abc import Iterator

from cachefs.bench.workload import ALIGNMENT, Workload

_PLACE = struct.Struct("=QQ")


class Content:
    """The blocks of one file, in a page-aligned buffer that every block reuses."""

    def __init__(self, workload: Workload, rank: int, number: int) -> None:
        self._workload = workload
        self._file = rank << 32 | number
        room = -(-workload.block // ALIGNMENT) * ALIGNMENT
        self._memory = mmap.mmap(-1, room)
        self._memory.write(random.Random(self._file).randbytes(workload.block))
        self._view = memoryview(self._memory)

    def blocks(self) -> Iterator[memoryview]:
        """Every block in order; each is valid until the next one is asked for."""
        size, block = self._workload.size, self._workload.block
        for offset in range(0, size, block):
            length = min(block, size - offset)
            if length >= _PLACE.size:
                _PLACE.pack_into(self._memory, 0, self._file, offset)
            yield self._view[:length]

    def checksum(self) -> int:
        """CRC32 of the whole file."""
        crc = 0
        for block in self.blocks():
            crc = zlib.crc32(block, crc)
        return crc


def read_blocks(path: str, block: int, *, direct: bool) -> Iterator[memoryview]:
    """The content of a file, block by block, each valid until the next one is asked for."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    view = memoryview(mmap.mmap(-1, -(-block // ALIGNMENT) * ALIGNMENT))[:block]
    try:
        while length := os.readv(fd, [view]):
            yield view[:length]
    finally:
        os.close(fd)
