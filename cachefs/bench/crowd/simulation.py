"""The simulation: one store with a budget of requests, many clients of it, one queue of events.

The store serves what its token bucket allows and refuses the rest with 503 SlowDown; refusing is
free. A request is decided on when it is sent, and answered after the latency. Each client has so
many *calls* to make, each an object or a part of one: a request, repeated until it is served.

A client library that gives a call up raises an error. What is sent in parts then begins anew, as
boto3's `upload_file` does: the upload is aborted, what arrived of it is lost, and the program calls
again after a pause, since no checkpoint is thrown away for an error.

Times are simulated seconds. Clients begin at random within the first `skew` of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Protocol

_SOON = 1e-9
"""Seconds that count as none: what floating point leaves of a wait that is over."""


@dataclass(slots=True)
class Call:
    """Something a client wants done, over as many requests as it takes."""

    attempts: int = 0
    """Requests sent for it."""
    sent_at: float = 0.0
    life: int = 0
    """Which try of the whole upload it belongs to."""
    context: dict[str, object] = field(default_factory=dict)
    """What a policy wants to remember."""


@dataclass(frozen=True, slots=True)
class Again:
    """Verdict on a refused request: send another one in `pause` seconds."""

    pause: float
    failed: bool = False
    """The library gave the call up; it is the program that tries again."""


class Policy(Protocol):
    """How one client behaves."""

    in_flight: int
    """Most requests at a time."""
    in_progress: int
    """Most calls at a time, waiting ones included."""

    def delay(self, now: float) -> float:
        """Seconds until a request may go out: 0 for now, inf for when an answer came."""

    def start(self, now: float) -> None:
        """A request goes out."""

    def succeeded(self, call: Call, now: float) -> None:
        """The answer to the last request of `call` was yes."""

    def refused(self, call: Call, now: float) -> Again:
        """The answer was 503 SlowDown."""


@dataclass(slots=True)
class Store:
    """Serves `rate` requests a second, having saved up `burst` seconds' worth at most."""

    rate: float
    burst: float = 0.2
    _level: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._level = self.rate * self.burst

    def serves(self, now: float) -> bool:
        """Whether a request that comes now is served."""
        self._level = min(self.rate * self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


@dataclass(slots=True)
class Client:
    """One client's work and what became of it."""

    policy: Policy
    calls: int
    fresh: int = 0
    """Calls not begun."""
    waiting: list[tuple[float, int, Call]] = field(default_factory=list)
    """Calls to be repeated: when, order, call."""
    in_flight: int = 0
    served: int = 0
    refused: int = 0
    failed: int = 0
    """Calls that the library gave up."""
    life: int = 0
    not_before: float = 0.0
    """When the program calls again after a failure."""
    done_at: float = inf
    awake_at: float = inf
    """When the client looks again by itself."""

    def __post_init__(self) -> None:
        self.fresh = self.calls

    @property
    def in_progress(self) -> int:
        """Calls begun and not done."""
        return len(self.waiting) + self.in_flight


_Event = tuple[float, int, int, Call | None, bool]
"""When, order, client; the call that is answered (None: it wakes up), and whether by yes."""


class Crowd:
    """Runs every client until nothing is left to do.

    `latency`: mean seconds of an answer, which takes half to one and a half times as long.
    """

    def __init__(
        self, store: Store, *, latency: float = 0.05, skew: float = 0.02, seed: int = 1
    ) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.clients: list[Client] = []
        self._store = store
        self._latency = latency
        self._skew = skew
        self._events: list[_Event] = []
        self._serial = 0
        self._served = 0

    def clock(self) -> float:
        """The simulated time."""
        return self.now

    def join(self, make: Callable[[Random, Callable[[], float]], Policy], calls: int) -> None:
        """One more client, with so many calls to make (at least one)."""
        client = Client(make(self.random, self.clock), calls)
        self.clients.append(client)
        self._wake(client, len(self.clients) - 1, self._skew * self.random.random())

    def run(self, until: float = inf, served: float = inf) -> Sequence[Client]:
        """Run on to the end, to the simulated time `until`, or until so many were `served`."""
        while self._events and self._events[0][0] <= until and self._served < served:
            self.now, _, index, call, good = heapq.heappop(self._events)
            client = self.clients[index]
            if call is not None:
                self._answer(client, call, good)
            elif self.now == client.awake_at:
                client.awake_at = inf
            else:
                continue  # It has looked again before.
            self._go_on(client, index)
        return self.clients

    def _push(self, when: float, index: int, call: Call | None, served: bool) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when, self._serial, index, call, served))

    def _answer(self, client: Client, call: Call, served: bool) -> None:
        client.in_flight -= 1
        if served:
            client.served += 1
            self._served += 1
            client.policy.succeeded(call, self.now)
            if client.fresh == 0 and client.in_progress == 0:
                client.done_at = self.now
            return
        client.refused += 1
        again = client.policy.refused(call, self.now)
        if call.life != client.life:
            return
        if again.failed:
            self._begin_anew(client, again.pause)
            return
        self._serial += 1
        heapq.heappush(client.waiting, (self.now + again.pause, self._serial, call))

    def _begin_anew(self, client: Client, pause: float) -> None:
        client.failed += 1
        client.life += 1
        client.waiting.clear()
        client.fresh = client.calls
        client.not_before = self.now + pause

    def _go_on(self, client: Client, index: int) -> None:
        """Send what may be sent, and see to it that the client wakes up for the rest."""
        while client.in_flight < client.policy.in_flight:
            due = self._due(client)
            wait = max(due, client.policy.delay(self.now)) if due < inf else inf
            if wait > _SOON:
                self._wake(client, index, self.now + wait)
                return
            self._send(client, index, self._next_call(client))

    def _due(self, client: Client) -> float:
        """Seconds until there is something to send."""
        due = client.waiting[0][0] - self.now if client.waiting else inf
        if client.fresh and client.in_progress < client.policy.in_progress:
            due = min(due, max(0.0, client.not_before - self.now))
        return due

    def _next_call(self, client: Client) -> Call:
        if client.waiting and client.waiting[0][0] - self.now <= _SOON:
            return heapq.heappop(client.waiting)[2]
        client.fresh -= 1
        return Call(life=client.life)

    def _send(self, client: Client, index: int, call: Call) -> None:
        client.policy.start(self.now)
        client.in_flight += 1
        call.attempts += 1
        call.sent_at = self.now
        takes = self._latency * (0.5 + self.random.random())
        self._push(self.now + takes, index, call, self._store.serves(self.now))

    def _wake(self, client: Client, index: int, when: float) -> None:
        if when < client.awake_at:
            client.awake_at = when
            self._push(when, index, None, False)
