"""Which of several like cache devices is slow: measured once, and remembered by the devices' names.

A volume that calls itself a disk may be far slower than another one. Devices of one kind are
compared; without a second one of its kind there is nothing to be found out about a device.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import structlog
import trio

from cachefs.cache import identity, speed
from cachefs.cache.ledger import SpaceLedger
from cachefs.cache.system import DeviceKind
from cachefs.meta import Meta

log = structlog.get_logger("cachefs.daemon")

_KEY = "device_speeds"
_AFTER = 5.0
"""Seconds after the start: that writes to the devices itself."""


class Speeds:
    """Measures the devices of one cache. On the trio thread."""

    def __init__(
        self,
        meta: Meta,
        ledgers: Sequence[SpaceLedger],
        *,
        measure: Callable[[Path], float] = speed.measure,
        after: float = _AFTER,
    ) -> None:
        self._meta = meta
        self._ledgers = tuple(ledgers)
        self._measure = measure
        self._after = after
        self._known: dict[str, float] = {}

    def recall(self) -> None:
        """Tell the devices what is known of them."""
        try:
            found = json.loads(self._meta.setting(_KEY) or "{}")
            self._known = {str(name): float(value) for name, value in found.items()}
        except (ValueError, TypeError, AttributeError):
            self._known = {}
        for ledger in self._ledgers:
            if ledger.device.healthy:
                ledger.device.write_speed = self._known.get(_name(ledger) or "")

    async def run(self) -> None:
        """Measure those of which nothing is known, one after the other."""
        await trio.sleep(self._after)
        for ledger in list(self._unknown()):
            await self._find_out(ledger)

    def _unknown(self) -> Iterator[SpaceLedger]:
        alike: defaultdict[tuple[DeviceKind, bool], list[SpaceLedger]] = defaultdict(list)
        for ledger in self._ledgers:
            device = ledger.device
            if device.healthy and device.kind is not DeviceKind.RAM:
                alike[device.kind, device.spins].append(ledger)
        for group in alike.values():
            if len(group) > 1:
                yield from (each for each in group if each.device.write_speed is None)

    async def _find_out(self, ledger: SpaceLedger) -> None:
        name = _name(ledger)
        if name is None or not ledger.try_admit(speed.BYTES):
            return  # It is full: at another start.
        try:
            found = await trio.to_thread.run_sync(
                self._measure, ledger.device.directory, abandon_on_cancel=True
            )
            self._known[name] = ledger.device.write_speed = found
            self._meta.set_setting(_KEY, json.dumps(self._known))
        except (OSError, sqlite3.Error) as error:
            log.info("the speed of a device was not noted", reason=str(error))
            return
        finally:
            ledger.settle(speed.BYTES, 0)
        where = str(ledger.device.directory)
        log.info("a device was measured", device=where, bytes_per_second=int(found))


def _name(ledger: SpaceLedger) -> str | None:
    try:
        return identity.read(ledger.device.directory)
    except OSError:
        return None
