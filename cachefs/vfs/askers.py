"""Who waits for the store on somebody's behalf, and stops when that somebody is being killed.

The kernel lets nobody go whose request a daemon has read: a process that is killed while its
request waits for a silent store would stay, in state D, until the store's time-out. A request is
handled by one task, so where that task waits for the store (`wanted`) it is known whose request it
is. Now and then it is asked after those who wait for long.

Only waiting that may end anywhere is wrapped in `wanted`: what it waits for goes on for others, or
is begun anew by the next who asks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
from trio.lowlevel import Task, current_task

from cachefs.vfs.admission import Asker

LOOK = 0.25
"""Seconds between looks at those who wait."""


class Askers:
    """The callers of one mount whose requests are being handled."""

    def __init__(
        self,
        caller: Callable[[], Asker] = lambda: (0, 0),
        is_given_up: Callable[[Asker], bool] = lambda asker: False,
    ) -> None:
        """`caller`: who made the request that was read last; `is_given_up`: whether one is being
        killed, and waits for the answer alone."""
        self._caller = caller
        self._is_given_up = is_given_up
        self._of: dict[Task, Asker] = {}
        self._waiting: dict[trio.CancelScope, Asker] = {}
        self._somebody = trio.Event()

    def begins(self) -> None:
        """This task handles the request that was read last. Before it awaits anything."""
        self._of[current_task()] = self._caller()

    def ends(self) -> None:
        """This task has handled it."""
        self._of.pop(current_task(), None)

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Around what this task waits for. EINTR once nobody wants it any more; never for tasks
        that handle no request."""
        asker = self._of.get(current_task())
        if asker is None:
            yield
            return
        with trio.CancelScope() as scope:
            self._waiting[scope] = asker
            self._somebody.set()
            try:
                yield
            finally:
                del self._waiting[scope]
        if scope.cancelled_caught:
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))

    async def run(self) -> None:
        """Task: look after those who wait, forever."""
        while True:
            await self._somebody.wait()
            await trio.sleep(LOOK)
            for scope, asker in self._waiting.items():
                if self._is_given_up(asker):
                    scope.cancel()
            if not self._waiting:
                self._somebody = trio.Event()
