"""Calls that may wait for a disk, away from the event loop's thread.

A stall may begin within any system call that changes a filesystem, and in many that only look (a
name that is not in memory). On the event loop's thread it would stop every request of the mount, so
such calls are made here: by `run` in some thread, which somebody waits for, or by `later` in the
device's own one, in order, which nobody does. On a device in memory both make them at once.

Concurrency: `run` and `later` on the event loop's thread. The thread of `later` is a daemon thread
and is never joined: a call that hangs in the kernel must not keep the process. `run` counts its
threads for each device, so those that hang on one are not missed by the others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog
import trio

log = structlog.get_logger()

T = TypeVar("T")

_THREADS = 40
"""Calls at a time."""
_GATHER = 0.002
"""Seconds in which calls gather that are made later: the thread is woken once for all of them."""

_Call = Callable[[], object]


class Apart:
    """Of one device; `direct` when nothing there ever waits."""

    def __init__(self, name: str, *, direct: bool) -> None:
        self._name = name
        self.direct = direct
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """`call(*args)`. Whatever was known before is to be looked at anew after it."""
        if self.direct:
            return call(*args)
        return await trio.to_thread.run_sync(call, *args, limiter=self._limiter)

    def later(self, call: _Call) -> None:
        """Make a call soon, after those that were given before. Its OSError is logged."""
        if self.direct:
            self._make(call)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(call)

    def stop(self) -> None:
        """End the thread once it has made the calls that it was given; does not wait for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._make(call)
            if self._calls.empty():
                time.sleep(_GATHER)

    def _make(self, call: _Call) -> None:
        try:
            call()
        except OSError as error:
            log.warning("the cache device refused", device=self._name, reason=str(error))
