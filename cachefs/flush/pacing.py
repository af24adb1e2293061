"""Turns: when a request may go out.

Each group of keys (the first folders of the key, as stores divide their budgets by prefix) has a
pacer that learns the rate and the number in flight that the store bears: additive increase,
multiplicative decrease, jitter, Retry-After, slow start (`model.pacer`). Over all groups at most
`concurrency` requests that send data are in flight at a time, and as many others, so that somebody
who reads never waits behind uploads. What may be sent can be limited further, and differently from
one moment to the next (`restrain`).

Requests of a group stand in line, those that send data in one of their own; only the first of a
line looks at pacer, slots and bandwidth, so that a crowd of them costs nothing, and a group that is
throttled keeps no slot from the others.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio

from cachefs.errors import Retry, StoreError, StoreUnreachable, Throttled
from cachefs.model.pacer import Bucket, Pacer, PacerRules

_DEPTH = 3
"""Folders of a key that tell its group."""
_GROUPS = 256
_BURST = 0.1
"""Seconds' worth of bytes that may go out at once under a bandwidth limit."""


@dataclass(slots=True)
class _Group:
    pacer: Pacer
    ended: trio.Event = field(default_factory=trio.Event)
    """Set, and replaced, whenever a request ends."""
    sending: trio.Lock = field(default_factory=trio.Lock)
    others: trio.Lock = field(default_factory=trio.Lock)


class Pacing:
    """Paces all requests of a mount; see `client.Pacing`."""

    def __init__(self, rules: PacerRules, *, concurrency: int) -> None:
        self._rules = rules
        self._others = trio.CapacityLimiter(concurrency)
        self._sending = trio.CapacityLimiter(concurrency)
        self._bucket: Bucket | None = None
        self._restrained = trio.Event()
        """Set, and replaced, whenever the limit on bandwidth changes."""
        self._groups: dict[str, _Group] = {}
        self._verdicts: dict[trio.lowlevel.Task, StoreError | None] = {}

    @property
    def rate(self) -> float:
        """Requests per second allowed now, over all groups that are in use."""
        return sum(group.pacer.rate for group in self._groups.values())

    @asynccontextmanager
    async def turn(self, key: str, nbytes: int) -> AsyncIterator[None]:
        """Wait for the turn of a request that sends `nbytes`; hold it for as long as it takes."""
        group = self._group(key)
        line, slots = (group.sending, self._sending) if nbytes else (group.others, self._others)
        async with AsyncExitStack() as held:
            async with line:
                await self._until_paced(group)
                await held.enter_async_context(slots)
                await self._wait_for_bandwidth(nbytes)
                await self._until_paced(group)
                started = trio.current_time()
                group.pacer.start(started)
            task = trio.lowlevel.current_task()
            try:
                yield
            finally:
                self._end(group, started, self._verdicts.pop(task, _NONE))

    @staticmethod
    async def _until_paced(group: _Group) -> None:
        while (wait := group.pacer.delay(trio.current_time())) > 0:
            with trio.move_on_after(wait):
                await group.ended.wait()

    async def _wait_for_bandwidth(self, nbytes: int) -> None:
        while nbytes and (bucket := self._bucket) is not None:
            wait = bucket.delay(trio.current_time())
            if wait <= 0:
                bucket.take(nbytes, trio.current_time())
                return
            with trio.move_on_after(wait):
                await self._restrained.wait()

    def restrain(self, slots: int, bandwidth: float | None) -> None:
        """From now on at most `slots` requests that send data at a time (at least 1), and
        `bandwidth` bytes per second, None for no limit. On the trio thread, within a run."""
        self._sending.total_tokens = slots
        if bandwidth == (self._bucket.rate if self._bucket is not None else None):
            return
        now = trio.current_time()
        if bandwidth is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = Bucket(bandwidth, bandwidth * _BURST, now)
        else:
            self._bucket.set_rate(bandwidth, bandwidth * _BURST, now)
        event, self._restrained = self._restrained, trio.Event()
        event.set()

    def told(self, key: str, error: StoreError | None) -> None:
        """What came of the request of the turn that this task holds."""
        self._verdicts[trio.lowlevel.current_task()] = error

    def _end(self, group: _Group, started: float, verdict: StoreError | object | None) -> None:
        now, pacer = trio.current_time(), group.pacer
        if verdict is _NONE or isinstance(verdict, StoreUnreachable):
            pacer.failed(started, now)
        elif isinstance(verdict, Throttled):
            pacer.throttled(started, now, verdict.retry_after, random.random())
        elif isinstance(verdict, StoreError) and verdict.retry is Retry.SOON:
            pacer.failed(started, now, overload=True)
        else:
            pacer.succeeded(started, now)
        event, group.ended = group.ended, trio.Event()
        event.set()

    def _group(self, key: str) -> _Group:
        name = "/".join(key.split("/")[:-1][:_DEPTH])
        group = self._groups.get(name)
        if group is None:
            self._drop_idle()
            pacer = Pacer(self._rules, trio.current_time(), random.random())
            group = self._groups[name] = _Group(pacer)
        return group

    def _drop_idle(self) -> None:
        if len(self._groups) >= _GROUPS:
            for name in list(self._idle()):
                del self._groups[name]

    def _idle(self) -> Iterator[str]:
        return (name for name, group in self._groups.items() if not group.pacer.in_flight)


_NONE = object()
"""No request was made in the turn, or nobody said what came of it."""
