"""Requests to the store, as the flusher makes them.

Keys inside cachefs are relative to the store's prefix; here they get it. Each request waits for
its turn with the pacer, and what comes of it is told to the pacer and the metrics. `call` tries
once; `patiently` goes on until the store answers for good, since passing trouble is no reason to
lose data: only refusals and questions for the caller (preconditions, missing objects) are raised.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import trio

from cachefs import failpoints
from cachefs.errors import Refused, Retry, StoreError, StoreUnreachable, Throttled
from cachefs.store.base import Body

FIRST_DELAY = 0.1
MAX_DELAY = 30.0
MAX_THROTTLED_DELAY = 1.0
"""Seconds; the pacer slows down for what was throttled, and waiting twice starves the last ones."""

_RECORDED_FIRST = {"put", "copy", "complete_upload", "create_upload", "delete"}
"""What changes the store: after a power cut the database must know of it. Parts need no record."""
_PARTS = {"upload_part", "copy_part"}
_KEYS = ("key", "src", "dst", "prefix")


class Jobs(Protocol):
    """Who carries requests out: the mover pool."""

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Result of a method of `ObjectStore`. Raises what it raised."""

    async def restart_clients(self) -> None:
        """Read the credentials anew."""


class Pacing(Protocol):
    """Decides when a request may go out."""

    def turn(self, key: str, nbytes: int) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a request that sends `nbytes`; hold it for as long as it takes."""

    def told(self, key: str, error: StoreError | None) -> None:
        """What came of a request."""


class StoreClient:
    """The store behind its prefix."""

    def __init__(
        self,
        jobs: Jobs,
        pacing: Pacing,
        prefix: str,
        *,
        observe: Callable[[str, str, float, int], None] = lambda op, outcome, seconds, sent: None,
    ) -> None:
        """`prefix` ends in a slash or is empty. `observe(op, outcome, seconds, bytes sent)`."""
        self._jobs = jobs
        self._pacing = pacing
        self.prefix = prefix
        self._observe = observe
        self._reloading = trio.Lock()
        self._reloaded_at = float("-inf")
        self.barred: str | None = None
        """Why nothing at all may be asked of this store; None: it may."""
        self.is_unreachable = False
        """Whether the last request found no store to answer it."""
        self.before_change: Callable[[], Awaitable[None]] = _nothing
        """Awaited before each request that changes the store: makes every commit so far survive a
        power cut. Else the store could be ahead of a database that went back in time: an object
        that is not known to be ours, or a name whose object was deleted. OSError."""
        self.before_part: Callable[[], Awaitable[None]] = _nothing
        """Awaited before each part: until there is room for its record, which waits for nobody."""

    def turn(self, key: str, sends: int = 0) -> AbstractAsyncContextManager[None]:
        """Wait for a request's turn; `send` it within. `sends`: bytes that go out with it."""
        return self._pacing.turn(self.prefix + key, sends)

    async def call(self, method: str, *, sends: int = 0, **arguments: Any) -> Any:
        """One request in its turn. Raises StoreError."""
        key = str(arguments.get("key") or arguments.get("dst") or "")
        async with self.turn(key, sends):
            return await self.send(method, sends=sends, **arguments)

    async def send(self, method: str, *, sends: int = 0, **arguments: Any) -> Any:
        """One request now. Raises StoreError; OSError when it cannot be recorded before."""
        for name in _KEYS:
            if name in arguments:
                arguments[name] = self.prefix + arguments[name]
        if "keys" in arguments:
            arguments["keys"] = [self.prefix + key for key in arguments["keys"]]
        key = str(arguments.get("key") or arguments.get("dst") or self.prefix)
        if self.barred is not None:
            raise Refused(self.barred)
        if method in _RECORDED_FIRST:
            await self.before_change()
        elif method in _PARTS:
            await self.before_part()
        started = time.monotonic()
        failpoints.before_request(method)
        try:
            result = await self._jobs.call(method, **arguments)
            failpoints.after_answer(method)
        except StoreError as error:
            self._told(method, key, error, time.monotonic() - started, 0)
            raise
        self._told(method, key, None, time.monotonic() - started, sends)
        return result

    def _told(
        self, method: str, key: str, error: StoreError | None, seconds: float, sent: int
    ) -> None:
        self._pacing.told(key, error)
        self.is_unreachable = isinstance(error, StoreUnreachable)
        self._observe(method, error.outcome if error is not None else "ok", seconds, sent)

    async def checksum(self, body: Body) -> int:
        """CRC64NVME of bytes or of a range of a file here, computed where it keeps nobody waiting.
        Raises CacheError."""
        value: int = await self._jobs.call("checksum", body=body)
        return value

    async def combine(self, parts: Sequence[tuple[int, int]]) -> int:
        """CRC64NVME of adjoining ranges, from (CRC64NVME, size in bytes) of each, in order."""
        value: int = await self._jobs.call("combine", parts=parts)
        return value

    async def patiently(
        self,
        method: str,
        *,
        sends: int = 0,
        on_failure: Callable[[StoreError], None] = lambda error: None,
        **arguments: Any,
    ) -> Any:
        """As `call`, again and again through passing trouble. For requests that show nothing.

        `on_failure` is told of each try that failed.
        """
        attempt = 0
        while True:
            try:
                return await self.call(method, sends=sends, **dict(arguments))
            except StoreError as error:
                on_failure(error)
                if error.retry in (Retry.NEVER, Retry.SLOWLY):
                    raise
                await self.recover(error)
                await trio.sleep(delay(attempt, error))
                attempt += 1

    async def recover(self, error: StoreError) -> None:
        """What can be done about an error before the next try: new credentials may be there."""
        if error.retry is not Retry.RELOAD:
            return
        async with self._reloading:
            if time.monotonic() - self._reloaded_at > 1.0:
                self._reloaded_at = time.monotonic()
                await self._jobs.restart_clients()

    def relative(self, key: str) -> str:
        """A full key without the prefix."""
        return key.removeprefix(self.prefix)


async def _nothing() -> None:
    """No power is ever cut, and there always is room."""


def delay(attempt: int, error: StoreError) -> float:
    """Seconds to wait before try number `attempt` + 2: exponential with full jitter.

    Source: https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/
    """
    most, asked = MAX_DELAY, 0.0
    if isinstance(error, Throttled):
        most, asked = MAX_THROTTLED_DELAY, error.retry_after or 0.0
    return asked + random.uniform(0, min(most, FIRST_DELAY * 2.0 ** min(attempt, 16)))
