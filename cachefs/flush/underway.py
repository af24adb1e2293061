"""Requests that may show something and have no answer yet, by key.

An effect that is given up (its name is deleted, or it is superseded) is out of line at once, but
the request that it may have sent is not: it lands when it lands. What comes next on that key waits
until it is answered, else a deletion could be overtaken by what it is to delete.

A deletion without an answer (the connection broke, the daemon died) has no condition that would
keep it from taking away what is shown under its key afterwards. So nothing is shown there until it
cannot be on its way any more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cachefs.errors import Refused, StoreError, Throttled
from cachefs.model.names import above

DOUBT = 10.0
"""Seconds after which a store has carried out a deletion that it had received, or never will. Its
connection is gone then, and a mover that died with its daemon sends nothing more."""


class UnderWay:
    """Keys with such a request. On the trio thread."""

    def __init__(self, on_answered: Callable[[], None]) -> None:
        """`on_answered` is called when the last one of a key is over."""
        self._counts: Counter[str] = Counter()
        self._above: Counter[str] = Counter()
        self._on_answered = on_answered

    def __contains__(self, key: str) -> bool:
        return key in self._counts

    def is_near(self, key: str) -> bool:
        """Whether there is one of the key, or of one above or below it: a store of files can hold
        only one of a file and what is below its name."""
        if not self._counts:
            return False
        return key in self or self._above[key] > 0 or any(each in self for each in above(key))

    @contextmanager
    def sending(self, key: str) -> Iterator[None]:
        """Around a request. Whoever waits runs only at the caller's next await: until then there
        is time to record the answer."""
        self._counts[key] += 1
        self._above.update(above(key))
        try:
            yield
        finally:
            self._above.subtract(above(key))
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._above += Counter()  # without the zeros
                self._on_answered()


class Doubts:
    """Keys with a deletion that has no answer. On the trio thread."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys`: those that a daemon before may have asked to be deleted."""
        self._until: dict[str, float] = {}
        self._note(keys)

    def _note(self, keys: Iterable[str]) -> None:
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        self._until.update(dict.fromkeys(keys, now + DOUBT))

    @contextmanager
    def deleting(self, keys: Iterable[str]) -> Iterator[None]:
        """Around the request that deletes keys."""
        try:
            yield
        except StoreError as error:
            if not isinstance(error, Refused | Throttled):
                self._note(keys)
            raise

    def remaining(self, key: str) -> float:
        """Seconds until something may be shown under a key."""
        return max(0.0, self._until.get(key, 0.0) - time.monotonic()) if self._until else 0.0
