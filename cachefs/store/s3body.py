"""The body of a reply, read without copies.

urllib3 hands out bytes objects that it puts together from smaller ones: half of what receiving
costs. The reply of http.client below it reads from the socket into the caller's memory. urllib3
still says what an error means, and gets its connection back at the end.
"""

from __future__ import annotations

from typing import Any


class Body:
    """A reply's body as a `receiving.Source`. `stream` is what boto3 has: urllib3's response."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        reply = getattr(stream, "_fp", None)
        inner = hasattr(reply, "readinto") and hasattr(stream, "_error_catcher")
        self._reply = reply if inner else None

    def readinto(self, buffer: memoryview, /) -> int:
        """See `receiving.Source`. Raises urllib3's errors."""
        if self._reply is None:
            data = self._stream.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)
        with self._stream._error_catcher():
            count: int = self._reply.readinto(buffer)
        return count
