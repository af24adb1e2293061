"""Messages between the daemon and its movers: pickles behind a four-byte length.

Both ends are the same program of the same version on one socket pair, so pickle is safe here and
keeps the store's values and errors as they are.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cachefs.store.base import Capabilities

_LENGTH = struct.Struct("!I")


ARITHMETIC = frozenset({"checksum", "combine"})
"""Methods that are the movers' own: of files here, and of numbers."""

SENDING = ARITHMETIC | {"put", "upload_part", "copy", "copy_part", "complete_upload"}
"""Methods that have threads of their own in a mover."""

UNREPEATED = frozenset({"create_upload"})
"""Methods that are not simply carried out again when their mover died: what the first try may have
begun in the store is known by its answer alone, so whoever asked must hear that it is lost."""


@dataclass(frozen=True, slots=True)
class Job:
    """Call a method of the store."""

    number: int
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody waits for this job any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Reload:
    """Read the credentials anew."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """What a probe of the store found in another mover."""

    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class Done:
    """A job ended: with a value, or with an error to raise."""

    number: int
    value: Any = None
    error: Exception | None = None


def pack(message: object) -> bytes:
    """A message in its wire form."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """The bodies of the complete messages at the buffer's start, removed from it."""
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        body = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield body


def unpack(body: bytes) -> Any:
    """The message in a body."""
    return pickle.loads(body)


def receive(sock: socket.socket) -> Any:
    """The next message from a blocking socket; None at its end."""
    header = _receive_exactly(sock, _LENGTH.size)
    body = _receive_exactly(sock, _LENGTH.unpack(header)[0]) if header else b""
    return unpack(body) if body else None


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)
