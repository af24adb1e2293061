"""CRC64NVME of file ranges, its arithmetic and its wire form.

The checksum S3 keeps for whole objects. Checksums of adjoining ranges combine into that of the
whole without reading anything again, which is how parts prove an object.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable

from awscrt.checksums import (  # type: ignore[import-untyped]
    combine_crc64nvme,
    crc64nvme,
)

from cachefs.store.base import Body
from cachefs.store.transfer import pieces


def crc64_of(body: Body) -> int:
    """Checksum of a body, read once through a small buffer. Raises CacheFileLost."""
    value = 0
    for piece in pieces(body):
        value = extend(value, piece)
    return value


def extend(value: int, piece: memoryview | bytes) -> int:
    """Checksum of what had the checksum `value` (0: nothing) followed by `piece`."""
    longer: int = crc64nvme(piece, value)
    return longer


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """Checksum of adjoining ranges, given (checksum, size in bytes) of each, in order."""
    whole = 0
    for value, size in parts:
        whole = combine_crc64nvme(whole, value, size)
    return whole


def encode(value: int) -> str:
    """The form of HTTP headers: base64 of eight big-endian bytes."""
    return base64.b64encode(value.to_bytes(8, "big")).decode("ascii")


def decode(text: str | None) -> int | None:
    """Inverse of `encode`; None for a missing or malformed header."""
    try:
        raw = base64.b64decode(text or "", validate=True)
    except binascii.Error:
        return None
    return int.from_bytes(raw, "big") if len(raw) == 8 else None


ARITHMETIC: dict[str, Callable[..., int]] = {"checksum": crc64_of, "combine": combine}
"""What movers compute, by the names of the jobs."""
