"""New cache files, made before they are asked for.

To make a file waits for the disk, and costs more than most of what else is to be done for it. So
while files are being made there are always some ready, empty and open, which are made in a thread:
who needs one takes it without a system call that could wait. When nobody does any more, what is
left is removed. Where the device is in memory none is kept: it is made when it is asked for.

A file bears the time at which it was made, which was before it was asked for. It counts from the
first write on (`write_time`).

Concurrency: the event loop's thread; files are made and removed in others. What is taken is
nobody's but the taker's.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
import trio

from cachefs.cache.device import CacheDevice

log = structlog.get_logger()

_MANY = 64
"""Files kept ready on a device as they go on being taken; to begin with it is one."""
_IDLE = 1.0
"""Seconds in which none is taken before they are removed."""


@dataclass(frozen=True, slots=True)
class FreshFile:
    """An empty cache file."""

    device: CacheDevice
    file: int
    """Its number there."""
    fd: int
    reading: bool
    """`fd` is for reading only: the daemon must not look like a writer where the kernel writes."""
    made_ns: int
    """Time of writing that it bears."""

    def make_writable(self) -> None:
        """`fd` is to be for writing as well. OSError."""
        if self.reading:
            fd = reopened(self.fd, os.O_RDWR)
            os.dup2(fd, self.fd, inheritable=False)  # The file stays open: nothing to wait for.
            os.close(fd)

    def discard(self) -> None:
        """It is not needed. Waits for the disk."""
        os.close(self.fd)
        self.device.remove(self.file)


class FreshFiles:
    """Those of all devices. `number` gives a number that no cache file ever had; `reading` tells
    what descriptors are for (see `FreshFile`)."""

    def __init__(self, number: Callable[[], int], reading: Callable[[], bool]) -> None:
        self._number = number
        self._reading = reading
        self._ready: dict[CacheDevice, deque[FreshFile]] = {}
        self._wanted: Counter[CacheDevice] = Counter()
        self._asked = trio.Event()
        self._stopped = False

    def take_nowait(self, device: CacheDevice) -> FreshFile | None:
        """One that is ready; None: there is none. More are made for the next ones."""
        if device.apart.direct:
            return None
        ready = self._ready.get(device)
        while ready:
            fresh = ready.popleft()
            self._ask(device)
            if os.fstat(fresh.fd).st_nlink and fresh.reading == self._reading():
                return fresh
            device.apart.later(fresh.discard)
        self._ask(device)
        return None

    async def take(self, device: CacheDevice) -> FreshFile:
        """One, though it has to be waited for. OSError."""
        fresh = self.take_nowait(device)
        if fresh is None:
            number, reading = self._number(), self._reading()
            fresh = await device.apart.run(lambda: make(device, number, reading=reading))
        return fresh

    def _ask(self, device: CacheDevice) -> None:
        ready = len(self._ready.get(device, ()))
        if not ready:
            self._wanted[device] = min(2 * self._wanted[device] or 1, _MANY)
        if 2 * ready <= self._wanted[device]:
            self._asked.set()

    async def run(self) -> None:
        """Keep files ready as long as some are taken."""
        while True:
            with trio.move_on_after(_IDLE) as idle:
                await self._asked.wait()
            if idle.cancelled_caught:
                await self.give_up()
                await self._asked.wait()
            self._asked = trio.Event()
            for device, wanted in list(self._wanted.items()):
                await self._refill(device, wanted - len(self._ready.get(device, ())))

    async def _refill(self, device: CacheDevice, count: int) -> None:
        numbers = [self._number() for _ in range(count)]
        try:
            made = await device.apart.run(_make_all, device, numbers, self._reading())
        except OSError as error:  # Who needs one hears of it.
            log.info("no new files are kept ready", device=device.index, reason=str(error))
            return
        if self._stopped:
            device.apart.later(lambda: _discard_all(made))
        else:
            self._ready.setdefault(device, deque()).extend(made)

    async def give_up(self) -> None:
        """Remove those that nobody took. OSError."""
        given_up, self._ready = self._ready, {}
        self._wanted.clear()
        for device, files in given_up.items():
            await device.apart.run(_discard_all, list(files))

    async def stop(self) -> None:
        """The end is near: none is kept ready any more. OSError."""
        self._stopped = True
        await self.give_up()


def reopened(fd: int, flags: int) -> int:
    """Another descriptor of an open file. Since its name is in memory that waits for no disk: none
    is looked up. OSError."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def make(device: CacheDevice, file: int, *, reading: bool) -> FreshFile:
    """A new cache file. Waits for the disk. OSError."""
    fd = device.create(file)
    try:
        if reading:
            writer, fd = fd, device.open(file, os.O_RDONLY)
            os.close(writer)
        return FreshFile(device, file, fd, reading, os.fstat(fd).st_mtime_ns)
    except BaseException:
        os.close(fd)
        device.remove(file)
        raise


def _make_all(device: CacheDevice, files: Sequence[int], reading: bool) -> list[FreshFile]:
    """Those that could be made. OSError: none."""
    made: list[FreshFile] = []
    for file in files:
        try:
            made.append(make(device, file, reading=reading))
        except OSError:
            if not made:
                raise
            break
    return made


def _discard_all(files: Sequence[FreshFile]) -> None:
    for fresh in files:
        with suppress(OSError):  # A device that is gone.
            fresh.discard()


def write_time(found: os.stat_result, recorded_ns: int) -> int:
    """When a cache file that is open for writing was last written to; `recorded_ns`: what the
    database says. One that never was bears the time at which it was made, before its inode."""
    untouched = not found.st_size and found.st_mtime_ns < recorded_ns
    return recorded_ns if untouched else found.st_mtime_ns
