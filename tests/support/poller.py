"""A look at the bucket that never ends: what a reader could see, whenever it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Poller:
    """Looks at the bucket all the time; notes every marker that is ahead of its data.

    A listing is not one instant, so a marker is looked at first and the files are listed after it:
    whatever the marker stands for must be in a listing that began later.
    """

    def __init__(self, bucket: Any, check: Callable[[Any], list[str]]) -> None:
        self._bucket = bucket
        self._check = check
        self._stop = threading.Event()
        self.looks = 0
        self.violations: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.violations += self._check(self._bucket)
            self.looks += 1

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def assert_ordered(self) -> None:
        self.violations += self._check(self._bucket)
        assert not self.violations, self.violations[:5]
        assert self.looks > 3
