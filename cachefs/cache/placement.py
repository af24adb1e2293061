"""Which cache device a new file goes to."""

from __future__ import annotations

from collections.abc import Sequence

from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.system import DeviceKind
from cachefs.model.survival import Level

_SPEED = {DeviceKind.RAM: 0, DeviceKind.DISK: 1, DeviceKind.NETWORK: 2}

# Devices whose headroom is within this part of the largest count as equal and take turns, so that
# files opened together spread over all of them: bandwidth adds up.
_ABOUT_EQUAL = 0.9


class Placement:
    """Chooses among the devices of one cache; remembers whose turn it is."""

    def __init__(self, ledgers: Sequence[SpaceLedger]) -> None:
        self._ledgers = tuple(ledgers)
        self._turn = 0
        self._chosen_at = {ledger.device.index: 0 for ledger in ledgers}

    def choose(self, expected_size: int, *, outlives: Level = Level.NONE) -> SpaceLedger | None:
        """The device for a new file of about `expected_size` bytes; None when no device is healthy
        whose bytes survive more than `outlives`.

        The fastest kind that has room and is below its high watermark; among devices of one kind
        the one with most headroom. A device that is slow at the moment comes last of its kind. When
        nothing has room: the device with most headroom, and admission decides.
        """
        healthy = [
            each
            for each in self._ledgers
            if each.device.healthy and each.device.survives > outlives
        ]
        if not healthy:
            return None
        if len(healthy) == 1:
            return healthy[0]
        roomy = [ledger for ledger in healthy if _has_room(ledger, expected_size)]
        if roomy:
            best = min(_rank(ledger) for ledger in roomy)
            chosen = self._take_turns([ledger for ledger in roomy if _rank(ledger) == best])
        else:
            chosen = max(healthy, key=SpaceLedger.headroom)
        self._turn += 1
        self._chosen_at[chosen.device.index] = self._turn
        return chosen

    def _take_turns(self, equals: Sequence[SpaceLedger]) -> SpaceLedger:
        most = max(ledger.headroom() for ledger in equals)
        near = [ledger for ledger in equals if ledger.headroom() >= _ABOUT_EQUAL * most]
        return min(near, key=lambda ledger: self._chosen_at[ledger.device.index])


def _has_room(ledger: SpaceLedger, expected_size: int) -> bool:
    return ledger.headroom() >= max(1, expected_size) and not ledger.above_high


def _rank(ledger: SpaceLedger) -> tuple[int, bool]:
    return _SPEED[ledger.device.kind], ledger.device.stalled
