"""How a client behaves: as the daemon of a node with cachefs, or as a process that uses boto3.

Nothing is imitated: `Paced` asks the pacer of `cachefs.model`, the others drive botocore's own
handlers (`botocore.retries`) as its endpoint does, with the simulation's clock. Only what botocore
would sleep on is asked for first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from botocore.retries import adaptive, bucket, quota, standard, throttling

from cachefs.bench.crowd.simulation import Again, Call
from cachefs.model.pacer import Pacer, PacerRules

Clock = Callable[[], float]

CONCURRENCY = 16
"""Requests that cachefs has in flight on a node (default of `flush.concurrency`)."""
_CALLS_PER_REQUEST = 4
"""Files that cachefs has in progress for each request in flight."""
THREADS = 10
"""Requests that boto3's `upload_file` has in flight (default of its `max_concurrency`)."""

# What is driven here is not public, so no types describe it.
_adaptive: Any = adaptive
_bucket: Any = bucket
_standard: Any = standard

_PUT = SimpleNamespace(
    name="PutObject", error_shapes=[], service_model=SimpleNamespace(service_name="s3")
)
_YES: Any = (SimpleNamespace(status_code=200, headers={}), {})
_NO: Any = (
    SimpleNamespace(status_code=503, headers={}),
    {"Error": {"Code": "SlowDown", "Message": "Please reduce your request rate."}},
)


class Paced:
    """A node with cachefs: one daemon, whose pacer alone says when a refused request goes again."""

    def __init__(
        self,
        random: Random,
        clock: Clock,
        rules: PacerRules | None = None,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self.in_flight = concurrency
        self.in_progress = concurrency * _CALLS_PER_REQUEST
        self._random = random
        self.pacer = Pacer(rules or PacerRules(), clock(), random.random())

    def delay(self, now: float) -> float:
        """See `simulation.Policy`."""
        return self.pacer.delay(now)

    def start(self, now: float) -> None:
        """See `simulation.Policy`."""
        self.pacer.start(now)

    def succeeded(self, call: Call, now: float) -> None:
        """See `simulation.Policy`."""
        self.pacer.succeeded(call.sent_at, now)

    def refused(self, call: Call, now: float) -> Again:
        """See `simulation.Policy`."""
        self.pacer.throttled(call.sent_at, now, chance=self._random.random())
        return Again(0.0)


@dataclass(frozen=True, slots=True)
class Habits:
    """How a program uses boto3."""

    max_attempts: int = 10
    """Requests for one call until it fails; boto3's own default is 3."""
    pause: float = 1.0
    """Seconds from a failure until the program tries again."""


@dataclass(slots=True)
class _Client:
    """Handlers of one boto3 client, as `register_retry_handler` puts them together."""

    handler: Any
    checker: Any

    @classmethod
    def made(cls, random: Random, max_attempts: int) -> _Client:
        adapter = _standard.RetryEventAdapter()
        detector = _standard.ThrottlingErrorDetector(adapter)
        checker = _standard.RetryQuotaChecker(quota.RetryQuota(), detector)
        policy = _standard.RetryPolicy(
            retry_checker=_standard.StandardRetryConditions(max_attempts=max_attempts),
            retry_backoff=_standard.ExponentialBackoff(
                random=random.random, service_name="s3", throttling_detector=detector
            ),
        )
        handler = _standard.RetryHandler(policy, adapter, checker, service_name="s3")
        return cls(handler, checker)


class Standard:
    """A process that uploads with boto3 in mode `standard`; its threads sleep out their backoff."""

    def __init__(self, random: Random, clock: Clock, habits: Habits | None = None) -> None:
        self.in_flight = self.in_progress = THREADS
        self._habits = habits or Habits()
        self._client = _Client.made(random, self._habits.max_attempts)

    def delay(self, now: float) -> float:
        """See `simulation.Policy`: nothing holds a request back."""
        return 0.0

    def start(self, now: float) -> None:
        """See `simulation.Policy`."""

    def succeeded(self, call: Call, now: float) -> None:
        """See `simulation.Policy`."""
        self._ask(call, _YES)
        self._client.checker.release_retry_quota(call.context, _YES[0])

    def refused(self, call: Call, now: float) -> Again:
        """See `simulation.Policy`."""
        pause = self._ask(call, _NO)
        if pause is None:
            self._client.checker.release_retry_quota(call.context, _NO[0])
            return Again(self._habits.pause, failed=True)
        return Again(pause)

    def _ask(self, call: Call, response: Any) -> float | None:
        """What botocore's event `needs-retry` comes to."""
        pause: float | None = self._client.handler.needs_retry(**_event(call, response))
        return pause


class Adaptive(Standard):
    """A process that uploads with boto3 in mode `adaptive`: a rate limiter before `standard`."""

    def __init__(self, random: Random, clock: Clock, habits: Habits | None = None) -> None:
        super().__init__(random, clock, habits)
        ticking = _Ticking(clock)
        self._bucket = _bucket.TokenBucket(max_rate=1, clock=ticking)
        adapter = _standard.RetryEventAdapter()
        self._limiter = _adaptive.ClientRateLimiter(
            rate_adjustor=throttling.CubicCalculator(starting_max_rate=0, start_time=clock()),
            rate_clocker=_adaptive.RateClocker(ticking),
            token_bucket=self._bucket,
            throttling_detector=_standard.ThrottlingErrorDetector(adapter),
            clock=ticking,
        )

    def delay(self, now: float) -> float:
        """See `simulation.Policy`: how long `before-send` would block."""
        if not self._limiter._enabled:
            return 0.0
        self._bucket._refill()
        return max(0.0, float(self._bucket._sleep_amount(1)))

    def start(self, now: float) -> None:
        """See `simulation.Policy`."""
        if self._limiter._enabled:
            # Rounding must not leave it a hair short: it would wait for a clock that stands still.
            self._bucket._current_capacity = max(self._bucket._current_capacity, 1.0)
        self._limiter.on_sending_request(request=None)

    def _ask(self, call: Call, response: Any) -> float | None:
        self._limiter.on_receiving_response(**_event(call, response))
        return super()._ask(call, response)


@dataclass(slots=True)
class _Ticking:
    """The simulation's time as botocore asks for it."""

    clock: Clock

    def current_time(self) -> float:
        return self.clock()


def _event(call: Call, response: Any) -> dict[str, Any]:
    return {
        "response": response,
        "attempts": call.attempts,
        "operation": _PUT,
        "caught_exception": None,
        "request_dict": {"context": call.context},
    }
