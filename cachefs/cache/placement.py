"""Which cache device a new file goes to."""

from __future__ import annotations

from collections.abc import Sequence

from cachefs.cache.device import CacheDevice
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.system import DeviceKind
from cachefs.model.survival import Level

_SPEED = {DeviceKind.RAM: 0, DeviceKind.DISK: 1, DeviceKind.NETWORK: 2}


class Placement:
    """Chooses among the devices of one cache; remembers whose turn it is.

    Devices that are equally fast take turns, so that files that are written together spread over
    all of them and bandwidth adds up: as often as their headroom is a part of that of all, so that
    a smaller one serves as well and they fill up at the same time (smooth weighted round robin).
    One that was measured to be less than half as fast as the fastest gets so much less of them.
    """

    def __init__(self, ledgers: Sequence[SpaceLedger]) -> None:
        self._ledgers = tuple(ledgers)
        self._credit = {ledger.device.index: 0.0 for ledger in ledgers}

    def choose(self, expected_size: int, *, outlives: Level = Level.NONE) -> SpaceLedger | None:
        """The device for a new file of about `expected_size` bytes; None when no device is healthy
        whose bytes survive more than `outlives`.

        The fastest kind that has room and is below its high watermark: RAM, disks, disks that spin,
        the network. A device that is slow at the moment comes last of its kind. When nothing has
        room: the device with most headroom, and admission decides.
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
        if not roomy:
            return max(healthy, key=SpaceLedger.headroom)
        best = min(map(_rank, roomy))
        return self._take_turns([ledger for ledger in roomy if _rank(ledger) == best])

    def ledger(self, device: CacheDevice) -> SpaceLedger:
        """The ledger of a device."""
        return next(each for each in self._ledgers if each.device is device)

    def _take_turns(self, equals: Sequence[SpaceLedger]) -> SpaceLedger:
        fastest = max(each.device.write_speed or 0.0 for each in equals)
        shares = [each.headroom() * _slowness(each, fastest) for each in equals]
        for ledger, share in zip(equals, shares, strict=True):
            self._credit[ledger.device.index] += share / sum(shares)
        chosen = max(equals, key=lambda ledger: self._credit[ledger.device.index])
        self._credit[chosen.device.index] -= 1.0
        return chosen


def _has_room(ledger: SpaceLedger, expected_size: int) -> bool:
    return ledger.headroom() >= max(1, expected_size) and not ledger.above_high


def _slowness(ledger: SpaceLedger, fastest: float) -> float:
    """How much less a device is to get for being slow; 1.0: as much as any."""
    speed = ledger.device.write_speed
    return speed / fastest if speed is not None and speed < fastest / 2 else 1.0


def _rank(ledger: SpaceLedger) -> tuple[int, bool, bool]:
    device = ledger.device
    return _SPEED[device.kind], device.spins, device.stalled
