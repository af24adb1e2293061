"""Cache directories called `ram` count as RAM, all others as disks, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs.cache.device import CacheDevice
from cachefs.cache.system import DeviceKind
from cachefs.model.survival import Level


@contextmanager
def pretended() -> Iterator[None]:
    """For as long as the block lasts, in this process."""
    kind, survives = CacheDevice.kind, CacheDevice.survives
    CacheDevice.kind = property(_kind)  # type: ignore[assignment,method-assign]
    CacheDevice.survives = property(_survives)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        CacheDevice.kind, CacheDevice.survives = kind, survives  # type: ignore[method-assign]


def directories(root: Path, *, ram: bool) -> list[Path]:
    """The cache directories below `root`, the one in RAM first."""
    return [root / "ram", root / "cache"] if ram else [root / "cache"]


def _kind(device: CacheDevice) -> DeviceKind:
    return DeviceKind.RAM if device.directory.name == "ram" else DeviceKind.DISK


def _survives(device: CacheDevice) -> Level:
    return Level.PROCESS if device.directory.name == "ram" else Level.REBOOT
