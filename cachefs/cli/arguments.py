"""Arguments that several verbs share."""

from __future__ import annotations

from cachefs.errors import UsageError


def seconds(text: str, option: str) -> float:
    """Seconds from `90`, `500ms` or `5min`. Raises UsageError naming the option."""
    from cachefs.config import parse_duration

    try:
        value = parse_duration(text)
    except ValueError as exc:
        raise UsageError(f"{option}: {exc}") from None
    assert isinstance(value, float)
    return value
