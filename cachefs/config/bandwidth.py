"""How a bandwidth limit is written: `200MiB`, `off`, or `08:00-18:00=50MiB,otherwise=off`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, PlainSerializer

from cachefs.config.units import parse_rate
from cachefs.model.bandwidth import DAY, BandwidthPlan, Window

_SPAN = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")
_EXAMPLE = "write for example 200MiB, or 08:00-18:00=50MiB,otherwise=off"


def parse_bandwidth(value: object) -> object:
    """The plan that a text, a list of texts or a number of bytes per second stands for.

    Plans pass through; None means no limit. Raises ValueError with what is wrong.
    """
    if value is None:
        return BandwidthPlan()
    if isinstance(value, int) and not isinstance(value, bool):
        return BandwidthPlan(otherwise=_positive(value))
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return _plan([each.strip() for each in value if each.strip()])
    return value


def _plan(items: list[str]) -> BandwidthPlan:
    if len(items) == 1 and "=" not in items[0]:
        return BandwidthPlan(otherwise=_rate(items[0]))
    windows: list[Window] = []
    rest: list[int | None] = []
    for item in items:
        when, found, rate = (part.strip() for part in item.partition("="))
        if not found:
            raise ValueError(f"{item!r} has no time; {_EXAMPLE}")
        if when == "otherwise":
            rest.append(_rate(rate))
        else:
            windows.append(_window(when, rate))
    if len(rest) > 1:
        raise ValueError("`otherwise` is there more than once")
    _check_apart(windows)
    return BandwidthPlan(tuple(sorted(windows, key=lambda w: w.start)), rest[0] if rest else None)


def _window(when: str, rate: str) -> Window:
    match = _SPAN.fullmatch(when)
    if match is None:
        raise ValueError(f"{when!r} is not a time of day such as 08:00-18:00; {_EXAMPLE}")
    hours, minutes = (int(match[1]), int(match[3])), (int(match[2]), int(match[4]))
    start, end = (60 * hour + minute for hour, minute in zip(hours, minutes, strict=True))
    if max(minutes) > 59 or start >= DAY or end > DAY:
        raise ValueError(f"{when!r} is not a time of day: hours go to 23, minutes to 59")
    if start == end:
        raise ValueError(f"{when!r} begins where it ends; a whole day is 00:00-24:00")
    return Window(start, end, _rate(rate))


def _check_apart(windows: Iterable[Window]) -> None:
    for one, other in combinations(windows, 2):
        if one.meets(other):
            spans = [str(window).partition("=")[0] for window in (one, other)]
            raise ValueError(f"{spans[0]} and {spans[1]} overlap")


def _rate(text: str) -> int | None:
    if text.lower() in ("off", "none"):
        return None
    rate = parse_rate(text)
    assert isinstance(rate, int)
    return _positive(rate)


def _positive(rate: int) -> int:
    if rate <= 0:
        raise ValueError("a rate must be greater than 0; write off for no limit")
    return rate


Bandwidth: TypeAlias = Annotated[
    BandwidthPlan, BeforeValidator(parse_bandwidth), PlainSerializer(str, return_type=str)
]
