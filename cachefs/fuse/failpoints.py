"""Places where a test can stop a request or make it fail, to prove what the mount survives.

Nothing happens, and handlers are not even wrapped, unless `CACHEFS_FAILPOINTS` names a file when
the daemon starts (`cachefs.failpoints`, which ends it at finer steps, reads the same one). While
that file exists, each request that one of its plans describes is stopped:

    [{"point": "applied", "op": "create", "target": "a.bin", "action": "hold"}]

`op` is a handler's name, `target` a name in the request (default: any request of that operation).
FLUSH reaches Python, where the failpoints are, only while they are armed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, TypeVar

import structlog
import trio

from cachefs.failpoints import ARMED, plans

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])

log = structlog.get_logger("cachefs.fuse")


class Point(StrEnum):
    """How far a request has come."""

    BEGUN = "begun"
    """It was read, nothing is done."""
    APPLIED = "applied"
    """All is done and committed, the caller has no answer."""


class Action(StrEnum):
    """What happens there."""

    HOLD = "hold"
    """The request stays there for as long as this daemon lives."""
    RAISE = "raise"
    """The handler has a bug."""
    ABORT = "abort"
    """The daemon dies of the request."""


def instrumented(handler: Handler) -> Handler:
    """The handler with its failpoints; the handler itself while there are none."""
    if not ARMED:
        return handler
    op = handler.__name__

    @functools.wraps(handler)
    async def call(self: Any, *args: Any) -> Any:
        await _reach(Point.BEGUN, op, args)
        result = await handler(self, *args)
        await _reach(Point.APPLIED, op, args)
        return result

    return call  # type: ignore[return-value]


async def _reach(point: Point, op: str, args: tuple[Any, ...]) -> None:
    names = {os.fsdecode(arg) for arg in args if isinstance(arg, bytes)}
    for plan in plans():
        if (plan.get("point"), plan.get("op")) == (point, op) and plan.get("target") in {
            None,
            *names,
        }:
            log.info("failpoint", point=point.value, op=op, action=plan["action"])
            await _act(Action(plan["action"]))


async def _act(action: Action) -> None:
    if action is Action.HOLD:
        await trio.sleep_forever()
    if action is Action.RAISE:
        raise RuntimeError("a failpoint was reached")
    os.abort()
