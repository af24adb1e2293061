"""Holding uploads back while the machine is short of something that training needs.

The kernel counts the time in which some task had to wait for I/O or a CPU (pressure stall
information). Uploads wait and compute as well, so what is seen is partly their own doing, and the
number of them is found as congestion control finds a rate: halved when there is too much waiting,
one more when there is clearly less. One always goes on: bytes that only this machine has are at
risk, and an endless training run would otherwise never upload.

Source: https://docs.kernel.org/accounting/psi.html
"""

from __future__ import annotations

import re

_CLEARLY_LESS = 0.7
"""Share of the threshold below which another upload may go on."""
_SOME = re.compile(r"^some .*\btotal=(\d+)$", re.MULTILINE)


def stalled_seconds(text: str) -> float:
    """Seconds since boot in which some task was held up, from a file in `/proc/pressure`.

    Raises ValueError when the text is something else.
    """
    found = _SOME.search(text)
    if found is None:
        raise ValueError("no line that begins with `some` and ends in `total=`")
    return int(found[1]) / 1e6


class Valve:
    """How many uploads may go on at a time, `most` without pressure."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.slots = most

    def update(self, load: float) -> int:
        """Return the number for the next interval.

        `load`: time that was lost to waiting in the last one, in multiples of what is acceptable.
        """
        if load > 1:
            self.slots = max(1, self.slots // 2)
        elif load < _CLEARLY_LESS:
            self.slots = min(self._most, self.slots + 1)
        return self.slots

    def open(self) -> int:
        """Something is more urgent than training: let all go on."""
        self.slots = self._most
        return self.slots
