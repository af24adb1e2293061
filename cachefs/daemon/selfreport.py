"""What a daemon is doing, told to its log on SIGUSR1: for a call that does not return.

Threads come from the C side and are there even if the event loop stands still; tasks and the
requests in hand follow if it does not.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from types import FrameType

import structlog
import trio

log = structlog.get_logger("cachefs.daemon")

SIGNAL = signal.SIGUSR1


async def run(requests: Callable[[], Iterable[object]]) -> None:
    """Task: answer the signal; `requests` are those that the kernel has had no answer to."""
    with trio.open_signal_receiver(SIGNAL) as signals:
        faulthandler.register(SIGNAL, file=sys.stderr, all_threads=True, chain=True)
        try:
            async for _ in signals:
                for request in requests():
                    log.info("in hand", request=str(request))
                for (name, place), count in Counter(tasks()).items():
                    log.info("task", name=name, at=place, count=count)
        finally:
            faulthandler.unregister(SIGNAL)


def tasks() -> Iterator[tuple[str, str]]:
    """Every task's name and where it waits, innermost first."""
    root = trio.lowlevel.current_root_task()
    waiting = [root] if root is not None else []
    while waiting:
        task = waiting.pop()
        waiting += [each for nursery in task.child_nurseries for each in nursery.child_tasks]
        places = [_place(frame) for frame in _frames(task) if _is_ours(frame)]
        yield task.name, " < ".join(reversed(places))


def _frames(task: trio.lowlevel.Task) -> Iterator[FrameType]:
    awaited: object = task.coro
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield frame
        awaited = _next(awaited)


def _next(awaited: object) -> object:
    """What a coroutine waits for. Those of Cython hide behind an object that tells nothing."""
    for name in ("cr_await", "gi_yieldfrom"):
        if hasattr(awaited, name):
            return getattr(awaited, name)
    hidden = (each for each in gc.get_referents(awaited) if hasattr(each, "cr_await"))
    return next(hidden, None)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({PurePath(code.co_filename).name}:{frame.f_lineno})"


def _is_ours(frame: FrameType) -> bool:
    """Not of the event loop, which always waits for something at the end."""
    return "/trio/" not in frame.f_code.co_filename
