"""The control client: synchronous, standard library only."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from cachefs.observe.protocol import (
    REPLY_LIMIT,
    REQUEST_LIMIT,
    ControlError,
    decode,
    decode_error,
    encode,
)

_SILENCE = 1.0
"""Seconds without a word between two looks at the daemon."""


class NoAnswer(ControlError):
    """The daemon is not there, went away, or does not answer in time."""


class ControlClient:
    """A connection to one daemon; requests go one after the other."""

    def __init__(self, path: str | os.PathLike[str], *, connect_timeout: float = 5.0) -> None:
        """Connect. Raises NoAnswer when no daemon listens there."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = bytearray()
        self._sock.settimeout(connect_timeout)
        try:
            self._sock.connect(os.fspath(path))
        except PermissionError:
            self.close()
            raise ControlError("not permitted", hint="ask as root or as the mount's user") from None
        except OSError as exc:
            self.close()
            raise NoAnswer(exc.strerror or str(exc)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the daemon withdraws a request that is running."""
        self._sock.close()

    def call(
        self,
        op: str,
        args: Mapping[str, Any] | None = None,
        *,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        timeout: float | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> Any:
        """The result of one operation; `timeout` seconds in all, None without end.

        `on_silence` is called about every second in which nothing comes; it may raise. Raises
        ControlError with the daemon's message, NoAnswer when none comes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        request = encode({"op": op, "args": dict(args or {})})
        if len(request) > REQUEST_LIMIT:
            raise ControlError("too many paths for one request", exit_code=2)
        try:
            self._sock.settimeout(timeout)
            self._sock.sendall(request)
            while True:
                reply = self._reply(deadline, on_silence)
                if "progress" not in reply:
                    break
                if on_progress is not None:
                    on_progress(reply["progress"])
        except TimeoutError:
            raise NoAnswer("no answer in time") from None
        except OSError as exc:
            raise NoAnswer(exc.strerror or str(exc)) from None
        if "error" in reply:
            raise decode_error(reply["error"])
        return reply.get("result")

    def _reply(
        self, deadline: float | None, on_silence: Callable[[], None] | None
    ) -> dict[str, Any]:
        line = self._line(deadline, on_silence)
        try:
            return decode(line)
        except ValueError as exc:
            raise ControlError(f"the daemon's answer is malformed: {exc}") from None

    def _line(self, deadline: float | None, on_silence: Callable[[], None] | None) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > REPLY_LIMIT:
                raise ControlError("the daemon's answer is too long")
            data = self._receive(deadline, on_silence)
            if not data:
                raise NoAnswer("the connection was closed")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _receive(self, deadline: float | None, on_silence: Callable[[], None] | None) -> bytes:
        """What comes next; b"" at the end. Raises TimeoutError at the deadline."""
        while True:
            left = math.inf if deadline is None else max(0.001, deadline - time.monotonic())
            self._sock.settimeout(min(left, _SILENCE))
            try:
                return self._sock.recv(1 << 16)
            except TimeoutError:
                if left <= _SILENCE:
                    raise
            if on_silence is not None:
                on_silence()
