"""What the supervisor handles: one daemon process, the state daemons share, when to restart.

Standard library only, like the supervisor itself.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import site
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

STEADY = 1.0
"""Seconds of service after which a failure counts as a new one, restarted without delay."""
MAX_DELAY = 5.0
"""Longest pause between two restarts, seconds."""
REHEARSAL_PATIENCE = 60.0
"""Seconds that a rehearsal may take: most of it is the start of Python."""
MAX_DELAY_KILLED = 0.5
"""The same where a daemon that served was killed from outside, which is no fault of its own."""

Report: TypeAlias = dict[str, Any]
"""The daemon's word on its start: {"ok": true, ...} or {"ok": false, "message", "exit_code"}.

Optional: "warnings" (a list); in a failure "hint", and "retry": false when a restart is useless.
"""


class TapState:
    """The memory that every daemon's tap of this mount shares, and the fields in it that are ours.

    Offset 8: flags u32 (bit 0, set by the daemon: the kernel resends requests, so a takeover is
    possible), 12: epoch u32 (restarts), 16: takeovers u64, 24: death u32 (1: the last daemon was
    ended from outside, so it says little about the requests in flight). All else is the tap's.
    """

    SIZE = 4 << 20
    _FIELDS = struct.Struct("=8xIIQI")
    _TAKEOVER_POSSIBLE = 1
    _NAME = "cachefs-tap"

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create(self._NAME, os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.SIZE)
        self._memory = mmap.mmap(self.fd, self._FIELDS.size)

    @classmethod
    def descriptors_of(cls, pid: int) -> tuple[int, int]:
        """The numbers of a daemon's descriptors: its connection and this memory.

        Raises OSError or KeyError when there is no such process, or when it is no daemon.
        """
        links = {}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a busy daemon opens and closes files
                links[os.readlink(fd)] = int(fd.name)
        return links["/dev/fuse"], links[f"/memfd:{cls._NAME} (deleted)"]

    def can_take_over(self) -> bool:
        """Whether the next daemon can get back what this one had read but not answered."""
        flags: int = self._FIELDS.unpack_from(self._memory)[0]
        return bool(flags & self._TAKEOVER_POSSIBLE)

    def next_epoch(self, *, takeover: bool, killed: bool = False) -> None:
        """Before a restart, with no daemon alive; a takeover is counted."""
        _, epoch, takeovers, _ = self._FIELDS.unpack_from(self._memory)
        struct.pack_into("=IQI", self._memory, 12, epoch + 1, takeovers + takeover, killed)


@dataclass(slots=True)
class Restarts:
    """When to start the next daemon. Pure: every method is told the time (monotonic seconds)."""

    timeout: float
    """Longest time without a ready daemon."""
    _failures: int = 0
    _down_since: float | None = None
    _ready_at: float | None = None

    def is_new_outage(self) -> bool:
        """Whether a daemon was ready since the last failure."""
        return self._down_since is None

    def started_ready(self, now: float) -> None:
        self._down_since = None
        self._ready_at = now

    def died(self, now: float, *, killed: bool = False) -> float | None:
        """Seconds to wait before the next start; None: too long already, give up.

        `killed`: by SIGKILL or another signal from outside.
        """
        longest = MAX_DELAY_KILLED if killed and self._ready_at is not None else MAX_DELAY
        if self._ready_at is not None and now - self._ready_at >= STEADY:
            self._failures = 0
        self._ready_at = None
        delay = min(longest, 0.1 * 2 ** (self._failures - 1)) if self._failures else 0.0
        self._failures = min(self._failures + 1, 16)
        return delay if now + delay < self.give_up_at(now) else None

    def give_up_at(self, now: float) -> float:
        """When to give up unless a daemon gets ready before; an outage begins with this call."""
        if self._down_since is None:
            self._down_since = now
        return self._down_since + self.timeout


class Signals:
    """Signals as something to wait for: a pipe that receives the number of each."""

    def __init__(self) -> None:
        self.fd, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        # Handlers instead of SIG_IGN: the children would inherit the latter.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._woken)

    @staticmethod
    def _woken(_number: int, _frame: FrameType | None) -> None:
        """Nothing to do: the pipe has the number."""

    def read(self) -> bool:
        """Empty the pipe; True if one of the signals asked to stop."""
        with contextlib.suppress(BlockingIOError):
            return bool({signal.SIGTERM, signal.SIGINT} & set(os.read(self.fd, 4096)))
        return False


def spawn(command: list[str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start one of our processes with these descriptors. Raises OSError."""
    return subprocess.Popen(
        command,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env=environment(),
        # Out of reach of Ctrl-C: the supervisor forwards what is meant for the daemon.
        start_new_session=True,
    )


class Standby:
    """A daemon that has loaded its code and waits to be needed: starting Python is most of what a
    takeover takes.

    It holds nothing of the mount; the descriptors (connection, state, report pipe) are sent to it
    when it is its turn. It ends by itself when our end of the socket closes, however we end.
    """

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn(
                    [*command, "--standby-fd", str(theirs.fileno())], (theirs.fileno(),)
                )
            except OSError:
                self._ours.close()
                raise

    def promote(self, fds: tuple[int, int]) -> Daemon | None:
        """Its turn: the daemon that it is now; None if it is not alive any more."""
        ready_fd, write_end = report_pipe()
        try:
            socket.send_fds(self._ours, [b"go"], [*fds, write_end])
        except OSError:
            os.close(ready_fd)
            self.close()
            return None
        finally:
            os.close(write_end)
        self._ours.close()
        return Daemon(self._process, ready_fd)

    def close(self) -> None:
        """It is not needed; returns when it has ended."""
        self._ours.close()
        self._process.kill()
        self._process.wait()


def report_pipe() -> tuple[int, int]:
    """Where a daemon reports once whether it serves: (our end, its end)."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


class Daemon:
    """One daemon process and the pipe on which it reports once whether it serves."""

    def __init__(self, process: subprocess.Popen[bytes], ready_fd: int) -> None:
        self._process = process
        self.ready_fd = ready_fd
        self.pid = process.pid
        self.report: Report | None = None
        self.is_silent = False
        """Nothing more will come through the pipe."""
        self._received = b""

    @classmethod
    def start(cls, command: list[str], fds: tuple[int, int]) -> Daemon:
        """Start one with the connection and the state. Raises OSError."""
        ready_fd, write_end = report_pipe()
        words = ["--fuse-fd", str(fds[0]), "--state-fd", str(fds[1]), "--ready-fd", str(write_end)]
        try:
            return cls(spawn([*command, *words], (*fds, write_end)), ready_fd)
        except OSError:
            os.close(ready_fd)
            raise
        finally:
            os.close(write_end)

    def read_report(self) -> bool:
        """Take in what has come through the pipe; True when the report is complete now."""
        if self.is_silent:
            return False
        try:
            chunk = os.read(self.ready_fd, 1 << 16)
        except BlockingIOError:
            return False
        self._received += chunk
        line, newline, _ = self._received.partition(b"\n")
        if newline:
            self.report = _parse_report(line)
        self.is_silent = bool(newline) or not chunk
        return bool(newline)

    @property
    def is_ready(self) -> bool:
        return self.report is not None and bool(self.report.get("ok"))

    @property
    def has_failed(self) -> bool:
        return self.report is not None and not self.report.get("ok")

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        os.close(self.ready_fd)


def _parse_report(line: bytes) -> Report:
    try:
        report = json.loads(line)
    except ValueError:
        report = None
    return report if isinstance(report, dict) else failure(f"the daemon reported {line[:200]!r}")


def failure(message: str, exit_code: int = 1) -> Report:
    """A report of what went wrong, in the daemon's form."""
    return {"ok": False, "message": message, "exit_code": exit_code}


def objection(command: list[str], state_fd: int) -> str:
    """Why a daemon started by `command` could not take the mount over; empty if it could.

    It rehearses that with a copy of the state and a descriptor that leads nowhere, while the daemon
    before it serves on. Waits for it; OSError if it cannot be started.
    """
    nowhere, copy = os.eventfd(0, os.EFD_CLOEXEC), os.memfd_create("cachefs-rehearsal")
    try:
        os.pwrite(copy, os.pread(state_fd, TapState.SIZE, 0), 0)
        process = Daemon.start([*command, "--rehearsal"], (nowhere, copy))
    finally:
        os.close(nowhere)
        os.close(copy)
    deadline = time.monotonic() + REHEARSAL_PATIENCE
    while (code := process.exit_code()) is None:
        if time.monotonic() > deadline:
            process.send(signal.SIGKILL)
        time.sleep(0.02)
        process.read_report()
    process.read_report()
    process.close()
    if process.has_failed:
        return str((process.report or {}).get("message"))
    return "" if code == 0 else f"the daemon ended at its start ({describe(code)})"


def python_module(name: str) -> list[str]:
    """The command that runs a module of this package, with `environment`, in any directory."""
    return [sys.executable, "-P", "-m", name]


def environment() -> dict[str, str]:
    """For our processes: they must find this package, and have no business with systemd."""
    env = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    root = str(Path(__file__).resolve().parent.parent)
    if root not in site.getsitepackages():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env


def describe(code: int) -> str:
    """A process's end in words; `code` as subprocess has it."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
