"""The body of a reply, read without copies.

urllib3 hands out bytes objects that it puts together from smaller ones: half of what receiving
costs. The reply of http.client below it reads from the socket into the caller's memory, a few
packets at a time, with a system call to wait for each of them. Where nothing is encrypted the
socket itself is read instead: one call fills the buffer, and the kernel does the waiting. urllib3
still says what an error means, and gets its connection back at the end.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

_TIMEVAL = struct.Struct("@ll")


class Body:
    """A reply's body as a `receiving.Source`. `stream` is what boto3 has: urllib3's response."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        reply = getattr(stream, "_fp", None)
        inner = hasattr(reply, "readinto") and hasattr(stream, "_error_catcher")
        self._reply = _direct(reply) or reply if inner else None

    def readinto(self, buffer: memoryview, /) -> int:
        """See `receiving.Source`. Raises urllib3's errors."""
        if self._reply is None:
            data = self._stream.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)
        with self._stream._error_catcher():
            count: int = self._reply.readinto(buffer)
        return count


def _direct(reply: Any) -> _Direct | None:
    """None: it is encrypted, or of a length that nobody knows yet."""
    buffered = getattr(reply, "fp", None)
    link = getattr(getattr(buffered, "raw", None), "_sock", None)
    if type(link) is socket.socket and reply.length and not reply.chunked:
        return _Direct(reply, link)
    return None


class _Direct:
    """A reply of http.client whose socket is read as long as the body lasts.

    Until then the socket blocks, with a timeout of the kernel's: that of Python is a call more for
    each read. What came together with the reply's head is in the reply's own buffer.
    """

    def __init__(self, reply: Any, link: socket.socket) -> None:
        self._reply = reply
        self._link = link
        self._timeout = link.gettimeout()
        self._began = False
        self._buffered = 0

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer, or what there is until the end of the body or the timeout."""
        if not self._began:
            self._begin()
        count = 0
        if self._buffered:
            count = self._reply.readinto(buffer[: self._buffered])
            self._buffered -= count
        if not self._reply.isclosed():
            count += self._receive(buffer[count:])
        if self._reply.isclosed():
            self._link.settimeout(self._timeout)  # as it was, for the next request
        return count

    def _begin(self) -> None:
        self._began = True
        self._buffered = len(self._reply.fp.peek(1))
        seconds = self._timeout or 0.0
        limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._link.settimeout(None)

    def _receive(self, buffer: memoryview) -> int:
        wanted = min(len(buffer), self._reply.length)
        try:
            count = self._link.recv_into(buffer, wanted, socket.MSG_WAITALL) if wanted else 0
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error
        self._reply.length -= count
        if wanted and not (count and self._reply.length):
            self._reply._close_conn()
        return count
