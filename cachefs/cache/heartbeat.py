"""Is the device quick enough for calls on the event loop's own thread?

A direct system call is cheaper than a thread hop by tens of microseconds, but on a stalled disk it
stops every request of the mount. So a thread of its own writes a few bytes into a preallocated file
ten times a second; while that is slow, or a direct call was, `quick` is False and callers hop to a
thread.

Concurrency: one thread writes the times, any thread reads them; each is a single float, so no lock.
The thread is a daemon thread and is never joined: a write that hangs in the kernel must not keep
the process. It owns its descriptor and closes it itself, so a hung write never meets a reused
number.

No fsync, and no writes at all while nobody asks: an idle mount lets its disk sleep. The first
question after a pause is answered by False, which costs that caller one thread hop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cachefs.errors import NO_SPACE

INTERVAL = 0.1
"""Seconds between beats."""
SLOW = 0.100
"""Seconds: a beat or a direct call that took longer means that the device is not to be trusted. A
busy machine takes tens of milliseconds to run a thread again: less would blame the disk for it."""
DISTRUST = 1.0
"""Seconds of thread hops after something was slow."""
IDLE = 10.0
"""Seconds without a question after which the beats stop."""

_STALE = 5 * INTERVAL  # no news for so long is bad news
_BEAT_BYTES = 8
_FILE_BYTES = 4096


class Heartbeat:
    """Watches one device.

    `check` runs once a second in the thread and raises OSError when all is lost.
    """

    def __init__(
        self,
        path: Path,
        check: Callable[[], None],
        *,
        write: Callable[[int, bytes, int], int] = os.pwrite,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check = check
        self._write = write
        self._clock = clock
        self._wanted = threading.Event()
        self._stopped = False
        self._beat_started = 0.0  # 0: none under way
        self._beat_done = 0.0
        self._distrust_until = 0.0
        self._asked = clock()
        self.slow_total = 0
        self.failure: str | None = None
        self._fd = _open_preallocated(path)
        self._thread = threading.Thread(target=self._run, name=f"heartbeat {path}", daemon=True)
        self._thread.start()

    @property
    def quick(self) -> bool:
        """Whether a direct call is likely to return at once. Costs a clock reading."""
        now = self._clock()
        self._asked = now
        if self._is_stalled(now):
            return False
        if now - self._beat_done > _STALE:
            self._wanted.set()
            return False
        return True

    @property
    def stalled(self) -> bool:
        """Whether the device is known to be slow now, or to have been a moment ago."""
        return self._is_stalled(self._clock())

    def _is_stalled(self, now: float) -> bool:
        started = self._beat_started
        return (
            now < self._distrust_until
            or self.failure is not None
            or (started > 0 and now - started > SLOW)
        )

    def note(self, seconds: float) -> None:
        """Tell how long a direct call took."""
        if seconds > SLOW:
            self.slow_total += 1
            self._distrust_until = self._clock() + DISTRUST

    def check_now(self) -> None:
        """Look whether all is lost, beats or no beats. Blocks while the device does."""
        try:
            self._check()
        except OSError as err:
            self.fail(err)

    def fail(self, err: OSError) -> None:
        """All is lost, for that reason."""
        if self.failure is None:
            self.failure = err.strerror or str(err)

    def stop(self) -> None:
        """End the beats without waiting for one that hangs. Idempotent."""
        self._stopped = True
        self._wanted.set()

    def _run(self) -> None:
        beats_per_check = round(1 / INTERVAL)
        beat = 0
        try:
            while not self._stopped and self.failure is None:
                self._beat(check=beat % beats_per_check == 0)
                beat += 1
                self._pause()
        finally:
            os.close(self._fd)

    def _pause(self) -> None:
        self._wanted.clear()
        idle = self._clock() - self._asked > IDLE
        if not self._stopped:
            self._wanted.wait(None if idle else INTERVAL)

    def _beat(self, *, check: bool) -> None:
        started = self._clock()
        self._beat_started = started
        try:
            self._write(self._fd, int(started * 1e9).to_bytes(_BEAT_BYTES, "little"), 0)
            if check:
                self._check()
        except OSError as err:
            if err.errno not in NO_SPACE:  # full is not broken
                self.fail(err)
        self._beat_started = 0.0
        self._beat_done = self._clock()
        self.note(self._beat_done - started)


class NoHeartbeat(Heartbeat):
    """Of a device that is not there."""

    def __init__(self, why: str) -> None:
        self.slow_total = 0
        self.failure = why

    @property
    def quick(self) -> bool:
        """Never."""
        return False

    @property
    def stalled(self) -> bool:
        """Always."""
        return True

    def note(self, seconds: float) -> None:
        """Nothing takes any time."""

    def stop(self) -> None:
        """Nothing runs."""


def _open_preallocated(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, _FILE_BYTES)
    except OSError:
        pass  # a full disk, or a filesystem without it: the beat then writes what it can
    return fd
