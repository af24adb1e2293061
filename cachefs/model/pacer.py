"""How fast requests may go out: a rate and a window, raised on success and cut when throttled.

Every node that writes below one key prefix shares the store's budget with others it knows nothing
of. So the rules are those of congestion control. Per response the rate moves by a fraction of a
*step*, chosen so that a whole round trip of refusals cuts it by the configured factor, once, and a
round trip with few refusals by little: a node that is only just too fast hardly slows down.
Success raises it so that it settles where a small share of requests is refused, a share that is
smaller for faster nodes: at the same share the slower ones gain and the faster ones lose, which is
what makes rates equal. A long run without refusal speeds the search up. The window (requests in
flight) follows classical AIMD; it limits the first burst, before any answer is known, and slow
stores.

Times are seconds of a monotonic clock, passed as ``now``; ``chance`` is a random number in [0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

_BURST = 0.02
"""Seconds' worth of requests that may go out at once: timers are no finer."""
_SMALL_ROUND = 5
"""Answers that count as a round trip when fewer are in flight."""
_PATIENCE = 1.0
"""Length of a run of successes, in expected runs, from which the search speeds up: by its cube, so
that who comes late soon has what those who are done leave."""
_OVERSHOT = 0.25
"""What remains of the rate where slow start ends: the refusals tell of a round trip ago, since when
it doubled, and that was too much already."""
_RTT_WEIGHT = 0.125
_FIRST_RTT = 0.1


@dataclass(frozen=True, slots=True)
class PacerRules:
    """Bounds of the rate (requests per second) and of the window (requests in flight)."""

    initial_rate: float = 30.0
    min_rate: float = 1.0
    max_rate: float = 3500.0
    decrease: float = 0.5
    """Factor on rate and window when a whole round trip is refused."""
    initial_window: float = 4.0
    max_window: float = 256.0

    def __post_init__(self) -> None:
        if not 0 < self.min_rate <= self.initial_rate <= self.max_rate:
            raise ValueError("rates must satisfy 0 < min_rate <= initial_rate <= max_rate")
        if not 0 < self.decrease < 1:
            raise ValueError("decrease must be between 0 and 1")


class Bucket:
    """A token bucket with debt: whoever comes at a level of 0 or more takes all that it needs.

    So a cap on bytes per second needs no knowledge of request sizes, and no request is too large.
    """

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now: float, level: float = 0.0) -> None:
        self._rate = rate
        self._burst = burst
        self._level = level
        self._at = now

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self._rate

    def set_rate(self, rate: float, burst: float, now: float) -> None:
        """Change the speed from now on."""
        self._refill(now)
        self._rate = rate
        self._burst = burst
        self._level = min(self._level, burst)

    def delay(self, now: float) -> float:
        """Return the seconds until something may be taken."""
        self._refill(now)
        if self._level >= -1e-9:
            return 0.0
        return -self._level / self._rate if self._rate > 0 else inf

    def take(self, amount: float, now: float) -> None:
        """Take ``amount``; the caller waited for :meth:`delay`."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now


class Pacer:
    """Pace of the requests to one key prefix. Not for use by several threads at once.

    Ask :meth:`delay`; when it says 0, :meth:`start` a request, and report its end by exactly one of
    :meth:`succeeded`, :meth:`throttled` and :meth:`failed` with the time at which it was started.
    """

    def __init__(self, rules: PacerRules, now: float, chance: float = 0.0) -> None:
        self._rules = rules
        self._rate = rules.initial_rate
        self._window = rules.initial_window
        self._slow_start = True
        self._rtt = _FIRST_RTT
        self._in_flight = 0
        self._run = 0  # successes since the last refusal
        self._paused_until = now
        self._window_cut_at = -inf
        self._wanted_until = -inf  # until then the rate counts as used to the full
        # A random first moment: nodes that wake up together do not go on in step.
        self._bucket = Bucket(self._rate, self._rate * _BURST, now, level=-chance)

    @property
    def rate(self) -> float:
        """Requests per second allowed now."""
        return self._rate

    @property
    def window(self) -> int:
        """Requests allowed in flight."""
        return int(self._window)

    @property
    def in_flight(self) -> int:
        """Requests started and not ended."""
        return self._in_flight

    def delay(self, now: float) -> float:
        """Return the seconds until a request may start: 0 for now, inf for when one ends."""
        if self._in_flight >= self.window:
            return inf
        wait = self._bucket.delay(now)
        if wait > 0:
            self._wanted_until = now + wait + 2 * max(self._rtt, 1 / self._rate)
        return max(wait, self._paused_until - now, 0.0)

    def start(self, now: float) -> None:
        """Count a request that starts now."""
        self._bucket.take(1.0, now)
        self._in_flight += 1

    def succeeded(self, started: float, now: float) -> None:
        """Count a request that the store answered."""
        self._end(started, now)
        self._run += 1
        self._grow_window()
        if now <= self._wanted_until:
            self._set_rate(self._rate + self._gain(), now)

    def throttled(
        self, started: float, now: float, retry_after: float | None = None, chance: float = 0.0
    ) -> None:
        """Count a request that the store refused for coming too fast.

        ``retry_after``: seconds that it asked to wait; up to a quarter is added by chance, so that
        all who were told the same do not come back together.
        """
        self._end(started, now)
        self._run = 0
        self._set_rate(self._rate * (_OVERSHOT if self._slow_start else 1 - self._step()), now)
        self._slow_start = False
        self._cut_window(started, now)
        if retry_after is not None:
            self._paused_until = max(self._paused_until, now + retry_after * (1 + chance / 4))

    def failed(self, started: float, now: float, *, overload: bool = False) -> None:
        """Count a request that ended without a verdict on the pace.

        ``overload``: it timed out or the store failed, as stores do under load: fewer at a time.
        """
        self._in_flight -= 1
        if overload:
            self._slow_start = False
            self._cut_window(started, now)

    def _end(self, started: float, now: float) -> None:
        self._in_flight -= 1
        self._rtt += _RTT_WEIGHT * (now - started - self._rtt)

    def _step(self) -> float:
        """Fraction of the rate for one answer: those of a round trip add up to the decrease."""
        in_a_round = max(_SMALL_ROUND, self._rate * self._rtt)
        return (1 - self._rules.decrease) / in_a_round

    def _gain(self) -> float:
        if self._slow_start:
            return 1 / max(self._rtt, 1e-3)  # doubles in a round trip
        share = accepted_share(self._rate)
        search = 1 + (self._run * share / _PATIENCE) ** 3
        return self._rate * min(share * self._step() * search, 0.25)

    def _set_rate(self, rate: float, now: float) -> None:
        rules = self._rules
        self._rate = min(max(rate, rules.min_rate), rules.max_rate)
        self._bucket.set_rate(self._rate, self._rate * _BURST, now)

    def _grow_window(self) -> None:
        gain = 1.0 if self._slow_start else 1 / self._window
        self._window = min(self._window + gain, self._rules.max_window)

    def _cut_window(self, started: float, now: float) -> None:
        """Cut once per round trip: answers to requests sent before the last cut say nothing new."""
        if started >= self._window_cut_at:
            self._window = max(1.0, self._window * self._rules.decrease)
            self._window_cut_at = now


def accepted_share(rate: float) -> float:
    """Return the share of refusals at which ``rate`` requests/s neither grow nor shrink.

    Chosen by simulation: 3.5 % at 30/s, 25 % at 3/s, 0.2 % at 3,000/s. Less, and slow nodes take
    too long to use what finished ones leave; more, and the refusals are a burden.
    """
    return min(0.6 / rate + 0.08 / sqrt(rate), 0.4)


def backoff(attempt: int, chance: float, *, base: float = 0.1, longest: float = 30.0) -> float:
    """Return the seconds to wait before retry ``attempt`` (from 1): full jitter, doubling bound."""
    bound = min(longest, base * 2.0 ** min(attempt - 1, 62))
    return bound * chance
