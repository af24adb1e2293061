"""The control server: runs in the daemon, answers the command line over a unix socket.

Invariants: a peer other than root and the daemon's own user is refused; a peer that vanishes
cancels its handler; no input and no handler failure ends the server; memory per peer is bounded by
the request limit. One task per peer runs the requests of that peer in turn, with a second task
beside each handler that watches the socket for the peer's end.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

import trio

from cachefs.errors import CachefsError, UsageError
from cachefs.observe.protocol import REQUEST_LIMIT, ControlError, decode, encode, encode_error

log = logging.getLogger(__name__)

SEND_TIMEOUT = 30.0
"""Seconds a peer may leave an answer unread before it counts as gone."""


class Progress(Protocol):
    """Streams one progress line to the peer."""

    async def __call__(self, values: Mapping[str, Any], /) -> None:
        """Send `values`; cancels the handler when the peer is gone."""


Handler: TypeAlias = Callable[[dict[str, Any], Progress], Awaitable[Any]]
"""`handler(args, progress) -> result`; CachefsError becomes an answer with its exit code."""


async def serve_control(
    path: str | os.PathLike[str],
    handlers: Mapping[str, Handler],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; started once the socket is in place.

    The socket replaces whatever is at `path` in one step, so a daemon that takes over leaves no
    instant without one. Raises OSError when it cannot be made.
    """
    sock = _bind(os.fspath(path))
    identity = _identity(path)
    try:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        async with trio.open_nursery() as nursery:
            await nursery.start(
                partial(trio.serve_listeners, partial(_serve_peer, handlers), [listener])
            )
            task_status.started()
    finally:
        if _identity(path) == identity:
            os.unlink(path)


def _bind(path: str) -> socket.socket:
    fresh = f"{path}.new"
    if os.path.lexists(fresh):
        os.unlink(fresh)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)  # before bind: Linux gives the new file this mode
        sock.bind(fresh)
        sock.listen(64)
        os.rename(fresh, path)
    except BaseException:
        sock.close()
        raise
    return sock


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class _Peer:
    """One connection: whole lines in, whole lines out."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._sending = trio.Lock()

    @property
    def uid(self) -> int:
        credentials = self._stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        uid: int = struct.unpack("3i", credentials)[1]
        return uid

    async def fill(self) -> bool:
        """Take in what the peer sends next; False at its end or beyond the limit."""
        if len(self._buffer) > REQUEST_LIMIT:
            return False
        try:
            data = await self._stream.receive_some()
        except trio.BrokenResourceError:
            return False
        self._buffer += data
        return bool(data)

    async def read_line(self) -> bytes | None:
        """The next request line; None at the end. Raises ControlError when it is too long."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if not await self.fill():
                if searched > REQUEST_LIMIT:
                    raise UsageError(f"request longer than {REQUEST_LIMIT} bytes")
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def send(self, line: bytes) -> None:
        """Raises trio.BrokenResourceError when the peer is gone or does not read."""
        with trio.move_on_after(SEND_TIMEOUT) as scope:
            async with self._sending:
                await self._stream.send_all(line)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError("the peer does not read its answer")


async def _serve_peer(handlers: Mapping[str, Handler], stream: trio.SocketStream) -> None:
    async with stream:
        try:
            await _converse(_Peer(stream), handlers)
        except trio.BrokenResourceError:
            log.debug("control peer vanished")
        except OSError:
            log.exception("control connection failed")


async def _converse(peer: _Peer, handlers: Mapping[str, Handler]) -> None:
    if peer.uid not in (0, os.geteuid()):
        owner = "" if os.geteuid() == 0 else f" and user {os.geteuid()}"
        await peer.send(encode_error(ControlError(f"only root{owner} may ask this daemon")))
        with trio.move_on_after(SEND_TIMEOUT):
            await peer.fill()  # a request that finds us gone makes its sender miss the answer
        return
    while True:
        try:
            line = await peer.read_line()
        except UsageError as exc:
            await peer.send(encode_error(exc))
            return
        if line is None:
            return
        answer = await _answer(peer, handlers, line)
        if answer is None:
            return
        await peer.send(answer)


async def _answer(peer: _Peer, handlers: Mapping[str, Handler], line: bytes) -> bytes | None:
    """The final line for one request; None when the peer went away meanwhile."""
    try:
        handler, args = _parse(handlers, line)
    except CachefsError as exc:
        return encode_error(exc)
    answer: bytes | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, peer, nursery.cancel_scope)
        answer = await _run(handler, args, _progress_to(peer, nursery.cancel_scope))
        nursery.cancel_scope.cancel()
    return answer


def _parse(handlers: Mapping[str, Handler], line: bytes) -> tuple[Handler, dict[str, Any]]:
    try:
        request = decode(line)
    except ValueError as exc:
        raise UsageError(f"malformed request: {exc}") from None
    op, args = request.get("op"), request.get("args", {})
    if not isinstance(op, str) or not isinstance(args, dict):
        raise UsageError("malformed request: wants {op: text, args: object}")
    if op not in handlers:
        hint = "is the command line newer than the daemon? `cachefs upgrade` replaces the daemon"
        raise UsageError(f"unknown operation {op[:80]!r}", hint=hint)
    return handlers[op], args


async def _watch(peer: _Peer, scope: trio.CancelScope) -> None:
    while await peer.fill():
        pass
    scope.cancel()


def _progress_to(peer: _Peer, scope: trio.CancelScope) -> Progress:
    async def progress(values: Mapping[str, Any], /) -> None:
        try:
            await peer.send(encode({"progress": dict(values)}))
        except trio.BrokenResourceError:
            scope.cancel()
            await trio.lowlevel.checkpoint()

    return progress


async def _run(handler: Handler, args: dict[str, Any], progress: Progress) -> bytes:
    try:
        return encode({"result": await handler(args, progress)})
    except Exception as exc:
        known = _known(exc)
        if known is not None:
            return encode_error(known)
        log.exception("control operation failed")
        what = f"internal error: {type(exc).__name__}: {exc}"
        return encode_error(ControlError(what, hint="see the daemon's log"))


def _known(exc: BaseException) -> CachefsError | None:
    """The error raised on purpose, also out of a group that a handler's nursery made of it."""
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc if isinstance(exc, CachefsError) else None
