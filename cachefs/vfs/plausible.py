"""A bucket's answers as far as they can be believed.

Names are looked at where they become entries. Here it is about the rest: sizes and times that no
object has, and text that is none, would otherwise be met by whoever stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cachefs.errors import Corrupt
from cachefs.vfs.remote import RemoteObject, RemoteReader

_MOST = 1 << 62
"""Bytes, and nanoseconds before or after the epoch, beyond which there is nothing."""


class PlausibleReader:
    """A `RemoteReader` that passes over what makes no sense in listings of another."""

    def __init__(self, reader: RemoteReader) -> None:
        self._reader = reader

    async def list_page(
        self, prefix: str, token: str | None
    ) -> tuple[Sequence[RemoteObject], Sequence[str], str | None]:
        """See `RemoteReader`."""
        objects, prefixes, token = await self._reader.list_page(prefix, token)
        believed = [found for item in objects if (found := _believed(item)) is not None]
        return believed, prefixes, token

    async def head(self, key: str) -> RemoteObject:
        """See `RemoteReader`. Raises Corrupt: it is there, and what it is makes no sense."""
        item = _believed(await self._reader.head(key))
        if item is None:
            raise Corrupt(f"{key!r} has a size or an etag that no object has")
        return item

    async def read(self, key: str, limit: int) -> bytes:
        """See `RemoteReader`."""
        return await self._reader.read(key, limit)


def _believed(item: RemoteObject) -> RemoteObject | None:
    try:
        f"{item.key}{item.etag}".encode()
    except UnicodeEncodeError:
        return None
    if not 0 <= item.size < _MOST:
        return None
    if abs(item.mtime_ns) >= _MOST:
        return replace(item, mtime_ns=0)
    return item
