"""Every exception of a request handler becomes an errno.

An exception other than FUSEError that reaches pyfuse3 ends the mount, so nothing may pass here but
cancellation. What is expected (OSError, CachefsError) keeps its errno; anything else is a bug: it
is logged with its traceback, counted, and answered with EIO, and the mount lives on.
"""

from __future__ import annotations

import errno
import functools
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pyfuse3
import structlog

from cachefs.errors import CachefsError
from cachefs.fuse import failpoints
from cachefs.meta.applied import current_request
from cachefs.meta.database import disk_error, is_broken

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])

log = structlog.get_logger("cachefs.fuse")


class RequestObserver:
    """Counts requests; the metrics plug in here."""

    def __init__(
        self,
        seconds: Callable[[str], Callable[[float], None]],
        failed: Callable[[str, str, bool], None],
    ) -> None:
        """`seconds(op)` gives what observes durations of an operation; `failed(op, errno name,
        whether somebody foresaw that)`."""
        self.seconds = seconds
        self.failed = failed


def errno_of(error: Exception) -> tuple[int, bool]:
    """(errno for the caller, whether the error is one of the expected kinds). Of those that several
    tasks met together it is the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, OSError):
        return error.errno or errno.EIO, True
    if isinstance(error, CachefsError):
        return error.errno, True
    disk = disk_error(error)
    if disk is not None:
        return disk, True
    return errno.EIO, is_broken(error)


def _tell(op: str, error: Exception, expected: bool) -> None:
    """What whoever runs the mount should know."""
    if not expected:
        log.exception("request failed", op=op, reason=str(error))
    elif is_broken(error):
        reason = f"{error}; unmount, and run `cachefs fsck` on the cache directory"
        log.error("the metadata database is damaged", op=op, reason=reason)
    elif isinstance(error, sqlite3.Error):
        log.error("the metadata database cannot be written", op=op, reason=str(error))


def once(handler: Handler) -> Handler:
    """For mutations that must not happen twice: a request that is sent again after a takeover and
    was applied already goes to the method `_again_<name>`, which only answers it. A mutation comes
    after every file that was closed before it. It does not begin while so many wait for the disk
    that there is no room for more."""
    name = f"_again_{handler.__name__}"

    @functools.wraps(handler)
    async def call(self: Any, *args: Any) -> Any:
        self.settle()
        request = self.current_request()
        if request in self.applied:
            self.applied.discard(request)
            return await getattr(self, name)(*args)
        current_request.set(request)
        try:
            await self.room()
            return await handler(self, *args)
        finally:
            current_request.set(0)

    return call  # type: ignore[return-value]


def guarded(handler: Handler) -> Handler:
    """Wrap a method of an `Operations` class that has an `observer` and `askers`. First of all the
    namespace is brought up to date (`gather`)."""
    op = handler.__name__
    handler = failpoints.instrumented(handler)

    @functools.wraps(handler)
    async def call(self: Any, *args: Any) -> Any:
        started = time.perf_counter()
        self.askers.begins()
        try:
            self.gather()
            return await handler(self, *args)
        except pyfuse3.FUSEError:
            raise
        except Exception as error:
            number, expected = errno_of(error)
            self.observer.failed(op, errno.errorcode.get(number, str(number)), expected)
            _tell(op, error, expected)
            raise pyfuse3.FUSEError(number) from None
        finally:
            self.askers.ends()
            self.durations[op](time.perf_counter() - started)

    return call  # type: ignore[return-value]
