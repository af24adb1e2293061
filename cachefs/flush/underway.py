"""Requests that may show something and have no answer yet, by key.

An effect that is given up (its name is deleted, or it is superseded) is out of line at once, but
the request that it may have sent is not: it lands when it lands. What comes next on that key waits
until it is answered, else a deletion could be overtaken by what it is to delete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UnderWay:
    """Keys with such a request. On the trio thread."""

    def __init__(self, on_answered: Callable[[], None]) -> None:
        """`on_answered` is called when the last one of a key is over."""
        self._counts: Counter[str] = Counter()
        self._on_answered = on_answered

    def __contains__(self, key: str) -> bool:
        return key in self._counts

    @contextmanager
    def sending(self, key: str) -> Iterator[None]:
        """Around a request. Whoever waits runs only at the caller's next await: until then there
        is time to record the answer."""
        self._counts[key] += 1
        try:
            yield
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._on_answered()
