"""Quantities as text: sizes, rates, times, lists. The types that settings are made of."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from cachefs.model import names

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_SIZE_UNITS = {
    "": 1, "B": 1,
    "K": KIB, "KB": 1000, "KIB": KIB,
    "M": MIB, "MB": 1000**2, "MIB": MIB,
    "G": GIB, "GB": 1000**3, "GIB": GIB,
    "T": TIB, "TB": 1000**4, "TIB": TIB,
}  # fmt: skip
_TIME_UNITS = {
    "": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0,
    "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> object:
    """Bytes from `2GiB`, `64M` (binary), `1.5GB` (decimal), `4096`. Other types pass through.

    Raises ValueError for text that is not a size.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size; write for example 512MiB or 2GiB")
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 512MiB or 2GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def parse_rate(value: object) -> object:
    """Bytes per second: a size, with or without `/s`."""
    return parse_size(value.removesuffix("/s") if isinstance(value, str) else value)


def parse_duration(value: object) -> object:
    """Seconds from `500ms`, `10s`, `5min`, `1h`, `2d`, `1.5`. Other types pass through.

    Raises ValueError for text that is not a time.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a time; write for example 500ms, 10s or 5min")
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2].lower() not in _TIME_UNITS:
        raise ValueError(f"{value!r} is not a time; write for example 500ms, 10s or 5min")
    return float(match[1]) * _TIME_UNITS[match[2].lower()]


def auto_movers() -> int:
    """Mover processes for this machine: they scale with it, so no one GIL caps the network."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def none_word(value: object) -> object:
    """The word `none` unsets an optional setting: TOML and the environment have no null."""
    return None if isinstance(value, str) and value.strip().lower() in ("none", "") else value


def parse_list(value: object) -> object:
    """A list from `a,b` or a JSON list. Other types pass through."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as exc:
            raise ValueError(f"not a JSON list: {exc.msg}") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def parse_octal(value: object) -> object:
    """An octal number from `022` or `0o22`. Other types pass through."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"(0o)?[0-7]{1,4}", value.strip()):
        raise ValueError(f"{value!r} is not an octal number such as 022")
    return int(value.strip().removeprefix("0o"), 8)


def parse_movers(value: object) -> object:
    """The word `auto` becomes what suits this machine."""
    return auto_movers() if value == "auto" else value


def absolute(path: Path) -> Path:
    """The daemon changes directory, so paths must not depend on one."""
    return Path(os.path.abspath(path.expanduser()))


def checked_pattern(pattern: str) -> str:
    """The pattern itself. Raises ValueError when it is none."""
    names.check_pattern(pattern)
    return pattern


Size: TypeAlias = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Duration: TypeAlias = Annotated[float, BeforeValidator(parse_duration), Field(ge=0)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
AbsolutePath: TypeAlias = Annotated[Path, AfterValidator(absolute)]
Pattern: TypeAlias = Annotated[str, AfterValidator(checked_pattern)]
Patterns: TypeAlias = Annotated[tuple[Pattern, ...], BeforeValidator(parse_list)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
OptSize: TypeAlias = Annotated[Size | None, BeforeValidator(none_word)]
OptDuration: TypeAlias = Annotated[Duration | None, BeforeValidator(none_word)]
OptCount: TypeAlias = Annotated[Count | None, BeforeValidator(none_word)]
OptPath: TypeAlias = Annotated[AbsolutePath | None, BeforeValidator(none_word)]
OptText: TypeAlias = Annotated[Text | None, BeforeValidator(none_word)]
