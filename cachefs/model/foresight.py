"""Whether the next checkpoint will fit into the cache, learned from those before it.

A checkpoint is expected to be as large as the largest of the last few, and to come as long after
the last one as those came after each other. While half of that time is left there is nothing to
be said about what is still to be uploaded until then; afterwards there is.

Sizes in bytes, times in nanoseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_SIZES = 3
"""Checkpoints whose largest counts: one may have been odd, and models grow."""
_INTERVALS = 5


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint, as far as it was written; `changed_ns`: when its newest file was."""

    nbytes: int
    changed_ns: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is to be expected of the next checkpoint."""

    nbytes: int
    """How large it will be."""
    room: int
    """Bytes that can be written now before anybody has to wait."""
    fits: bool
    look_again_ns: int
    """When the answer may be another one, though nothing changes."""


def foresee(saves: Sequence[Save], *, room: int, capacity: int, now_ns: int) -> Forecast | None:
    """What is known of the next checkpoint; None before there was a whole one.

    `room`: bytes of the cache that hold nothing, or what can be evicted; `capacity`: all of it.
    """
    complete = sorted((each for each in saves if each.complete), key=lambda each: each.changed_ns)
    if not complete:
        return None
    nbytes = max(each.nbytes for each in complete[-_SIZES:])
    last = complete[-1].changed_ns
    # Of the one that is being written the cache has a part already.
    begun = sum(e.nbytes for e in saves if not e.complete and e.changed_ns > last)
    gaps = [later.changed_ns - each.changed_ns for each, later in pairwise(complete)]
    soon = last + int(median(gaps[-_INTERVALS:])) // 2 if gaps else None
    is_due = soon is not None and now_ns >= soon
    fits = nbytes <= capacity and not (is_due and nbytes - begun > room)
    return Forecast(nbytes, room, fits, soon if soon is not None and not is_due else now_ns)
