"""What the fault-injecting proxy can do to a request, as rules; and seeded random sets of them."""

from __future__ import annotations

import fnmatch
import random
from dataclasses import dataclass, field
from enum import StrEnum

READS = ("head", "get", "list", "list_parts", "list_uploads")
WRITES = ("put", "copy", "upload_part", "copy_part", "create_upload", "complete_upload", "delete")
OPS = (*READS, *WRITES, "abort_upload")


class Fault(StrEnum):
    """Kinds of trouble."""

    LATENCY = "latency"
    """Wait `seconds` before anything else."""
    BUDGET = "budget"
    """Answer 503 SlowDown beyond `rate` requests a second (a token bucket of one second)."""
    ERROR = "error"
    """Answer `status` and `code` without asking the store; with `retry_after` if that is set."""
    HANG = "hang"
    """Never answer, without asking the store; `seconds` later close the connection."""
    RESET_REQUEST = "reset_request"
    """Reset the connection after `after` bytes of the request's body."""
    RESET_REPLY = "reset_reply"
    """Let the store do it, then reset the connection after `after` bytes of the reply's body (if
    it has none, before the reply)."""
    LOST_REPLY = "lost_reply"
    """Let the store do it, then close the connection without a word."""
    ERROR_BODY = "error_body"
    """Answer 200 with an error as body, as S3 does for long requests, without asking the store."""
    COMMITTED_ERROR_BODY = "committed_error_body"
    """The same after the store did it."""
    TRICKLE = "trickle"
    """Pass the reply's body on at `rate` bytes a second."""
    SHORT_READ = "short_read"
    """End the reply's body in a clean way after `after` bytes, whatever its header said."""
    CORRUPT_REQUEST = "corrupt_request"
    """Flip a bit of the request's body on its way to the store."""
    WRONG_CHECKSUM = "wrong_checksum"
    """Change the checksum in the reply."""
    STALE_ETAG = "stale_etag"
    """Answer with an etag that is not the object's."""


@dataclass
class Rule:
    """When to do what. The first rule of a kind other than LATENCY that applies decides."""

    fault: Fault
    ops: tuple[str, ...] = ()
    """Operations, named as in OPS; empty: all."""
    key: str = "*"
    """Pattern of the key (without bucket); for a batch delete it matches any of the keys."""
    skip: int = 0
    """Let that many pass first."""
    count: int | None = None
    """Apply that often; None: for ever."""
    chance: float = 1.0
    seconds: float = 0.0
    rate: float = 0.0
    status: int = 500
    code: str = "InternalError"
    retry_after: float | None = None
    after: int = 0
    used: int = field(default=0, compare=False)
    """How often it applied."""

    def matches(self, op: str, keys: list[str], rng: random.Random) -> bool:
        """Whether it applies to this request; counts."""
        if self.ops and op not in self.ops:
            return False
        if not any(fnmatch.fnmatchcase(key, self.key) for key in keys):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.count is not None and self.used >= self.count:
            return False
        if self.chance < 1.0 and rng.random() >= self.chance:
            return False
        self.used += 1
        return True


def slow_down(rate: float, **when: object) -> Rule:
    """A store that takes `rate` requests a second."""
    return Rule(Fault.BUDGET, rate=rate, **when)  # type: ignore[arg-type]


def expired_token(**when: object) -> Rule:
    """Credentials that have run out."""
    return Rule(Fault.ERROR, status=400, code="ExpiredToken", **when)  # type: ignore[arg-type]


def refused(status: int = 403, code: str = "AccessDenied", **when: object) -> Rule:
    """A store that says no."""
    return Rule(Fault.ERROR, status=status, code=code, **when)  # type: ignore[arg-type]


def weather(seed: int, *, rules: int = 6) -> list[Rule]:
    """Bad weather: a seeded mix of every kind of passing trouble, each a few times only, so that
    patience wins in the end. Nothing in it may lose data or show it out of order."""
    rng = random.Random(seed)
    made = [_gust(rng) for _ in range(rules)]
    if rng.random() < 0.3:
        made.append(Rule(Fault.LATENCY, seconds=rng.choice([0.005, 0.02]), chance=0.5))
    return made


def _gust(rng: random.Random) -> Rule:
    fault = rng.choice(
        [
            Fault.ERROR, Fault.ERROR, Fault.RESET_REQUEST, Fault.RESET_REPLY, Fault.LOST_REPLY,
            Fault.LOST_REPLY, Fault.ERROR_BODY, Fault.COMMITTED_ERROR_BODY, Fault.SHORT_READ,
            Fault.CORRUPT_REQUEST, Fault.WRONG_CHECKSUM,
        ]
    )  # fmt: skip
    rule = Rule(fault, skip=rng.randrange(6), count=rng.randint(1, 3), after=rng.randrange(20_000))
    match fault:
        case Fault.ERROR:
            rule.ops = tuple(rng.sample(OPS, rng.randint(1, 5)))
            rule.status, rule.code, rule.retry_after = rng.choice(
                [
                    (500, "InternalError", None),
                    (503, "SlowDown", 0.1),
                    (503, "ServiceUnavailable", None),
                    (429, "TooManyRequests", 0.05),
                    (400, "RequestTimeout", None),
                    (403, "RequestTimeTooSkewed", None),
                    (400, "ExpiredToken", None),
                    (409, "OperationAborted", None),
                ]
            )
        case Fault.ERROR_BODY | Fault.COMMITTED_ERROR_BODY:
            rule.ops = ("copy", "complete_upload", "copy_part")
        case Fault.CORRUPT_REQUEST | Fault.WRONG_CHECKSUM | Fault.RESET_REQUEST:
            rule.ops = ("put", "upload_part")
        case Fault.SHORT_READ | Fault.RESET_REPLY:
            rule.ops = ("get", "list", "complete_upload")
        case _:
            rule.ops = tuple(rng.sample(WRITES, rng.randint(1, 4)))
    return rule
