"""What a daemon has read and not answered, and what programs wait for: to kill it just then.

The table of requests in flight outlives the daemon in memory that its supervisor shares (the head
of cachefs/fuse/_tap.c has the layout). FLUSH is answered in microseconds, so that one is hit where
a program waits in close(2) for it, read or not.
"""

from __future__ import annotations

import mmap
import os
import platform
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cachefs.fuse.kernelmount import take_fd
from cachefs.fuse.tap import Opcode
from cachefs.supervised import TapState
from tests.support.mounts import Mount

KINDS = ("CREATE", "RENAME", "UNLINK", "OPEN_TRUNC", "SETATTR", "FLUSH", "RELEASE")
"""Each run of kills has to hit all of these."""
_SLOTS_AT, _TABLE_AT, _WORDS = 44, 4096, 16
_STATE, _OPCODE, _CHARGE, _FLAGS = 0, 1, 10, 11
"""Words of a slot: state, opcode, charge and open flags."""
_LIVE, _DISPATCHED = 3, 1 << 31
_CLOSE = {"x86_64": "3", "aarch64": "57"}[platform.machine()]
"""close(2), as /proc/PID/syscall has it."""


class Aim:
    """Looks at the daemon of a mount, whichever that is, and at the programs that use it."""

    def __init__(self, mount: Mount, programs: Sequence[int], rng: random.Random) -> None:
        self._mount, self._programs, self._rng = mount, programs, rng
        _, fd = TapState.descriptors_of(mount.daemon_pid)
        fd = take_fd(mount.daemon_pid, fd)
        self._words = memoryview(mmap.mmap(fd, 0)).cast("I")
        os.close(fd)

    def in_flight(self) -> set[str]:
        """What the daemon is at, and FLUSH if somebody waits for one."""
        waiting = {"FLUSH"} if any(map(_is_closing, self._programs)) else set()
        return waiting | set(self._read())

    def _read(self) -> Iterator[str]:
        start, slots = _TABLE_AT // 4, self._words[_SLOTS_AT // 4]
        states = self._words[start : start + slots * _WORDS : _WORDS].tolist()
        for index, state in enumerate(states):
            at = start + index * _WORDS
            if state & 0xFF == _LIVE and self._words[at + _CHARGE] & _DISPATCHED:
                yield _name(self._words[at + _OPCODE], self._words[at + _FLAGS])

    def wait_for(self, kind: str, timeout: float = 30.0) -> None:
        """Until a request of this kind is in flight: the daemon is stopped then."""
        until, pid = time.monotonic() + timeout, self._mount.daemon_pid
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.002)  # until it has stopped, and some wait for it
            if kind in self.in_flight():
                return
            os.kill(pid, signal.SIGCONT)
            assert time.monotonic() < until, f"no {kind} was in flight"
            time.sleep(self._rng.uniform(0.0, 0.002))

    def kill(self) -> set[str]:
        """What was in flight."""
        os.kill(self._mount.daemon_pid, signal.SIGKILL)
        return self.in_flight()


def _name(opcode: int, flags: int) -> str:
    name = Opcode(opcode).name
    if name == "OPEN" and flags & os.O_TRUNC:
        return "OPEN_TRUNC"
    return "RENAME" if name == "RENAME2" else name


def _is_closing(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] == _CLOSE
    except OSError:
        return False
