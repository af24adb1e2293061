"""Keeps a mount while its daemons come and go.

The supervisor opens /dev/fuse, mounts, and starts the daemon with the descriptor. As long as it
holds that descriptor a dead daemon does not end the mount: requests wait, passthrough I/O goes on,
and the next daemon continues the same connection. It also owns what else has to outlive a daemon:
the tap's state (a memfd, see `TapState`) and the run file.

It is kept small because nobody restarts it: standard library only, one thread, no allocation that
grows, and it never looks at anything below its mountpoint, so the filesystem it serves cannot block
it. If it is killed all the same, the daemon serves on; nothing in the daemon needs it.

How the daemon ends says what happens next:
  0, 3        drained (3: something remains in the cache): unmount and end with the same code
  75          planned upgrade, whatever was in flight is answered: start the new code at once
  else        restart if takeover is possible; otherwise abort the connection, unmount, end with 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

from cachefs.fuse import kernelmount
from cachefs.observe import runfiles
from cachefs.supervised import (
    Daemon,
    Report,
    Restarts,
    Signals,
    Standby,
    TapState,
    describe,
    failure,
    python_module,
)

DRAINED, REMAINS, UPGRADE = 0, 3, 75
"""Exit codes of the daemon that are not failures (75: EX_TEMPFAIL)."""
START_TIMEOUT = 120.0
"""Seconds the first daemon may take until it reports ready or failed."""
LEAVE_TIMEOUT = 10.0
"""Seconds a daemon may take to exit after it has reported a failure."""
STANDBY_AFTER = 5.0
"""Seconds of service after which a daemon is put in reserve: those that end sooner need none."""
MAX_BACKGROUND = 512
"""Asynchronous requests (releases, readahead) the kernel may queue: the default of 12 is held up by
one slow request, and with it every close() that should have been noticed."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start another daemon after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class End:
    """Unmount and end with this exit code; `report` is for whoever still waits for the mount."""

    code: int
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What the supervisor is told on its command line and in the settings file."""

    settings: Path
    mountpoint: str
    daemon_module: str
    source: str
    allow_other: bool
    takeover: bool
    takeover_timeout: float
    standby: bool
    """Keep a daemon in reserve."""
    cache_dirs: tuple[str, ...]
    log: str = ""
    """File that standard error goes to; empty: a terminal or a service manager."""
    json_log: bool = False
    ready_fd: int | None = None
    inherited: tuple[int, int] | None = None
    """Descriptors of a connection whose supervisor died, and of its state."""


class Supervisor:
    """One mount, from mount(2) to umount2(2)."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._signals = Signals()
        self._restarts = Restarts(options.takeover_timeout)
        self._stopping = False
        self._answered = False
        self._daemon: Daemon | None = None
        self._fuse_fd = -1
        self._standby: Standby | None = None
        self._standby_at = inf
        self._connections: set[int] = set()
        """Ours, and those of dead mounts that it covers."""

    def run(self) -> int:
        """Serve until the mount ends; returns the exit code of the process."""
        verdict: Restart | End
        try:
            self._mount()
            verdict = Restart(0.0)
        except OSError as exc:
            reason = f"cannot mount on {self._options.mountpoint}: {exc.strerror}"
            verdict = End(1, failure(reason))
        while isinstance(verdict, Restart):
            self._pause(verdict.delay)
            verdict = self._next_daemon()
        self._unmount()
        self._answer(verdict.report or failure("it ended before it was mounted"))
        return verdict.code

    def _mount(self) -> None:
        options = self._options
        if options.inherited is not None:
            self._fuse_fd, state_fd = options.inherited
            self._state = TapState(state_fd)
            self._connections = kernelmount.connections_at(options.mountpoint)
            self._state.next_epoch(takeover=False)
            return
        self._state = TapState()
        self._fuse_fd = kernelmount.open_device()
        # A dead mount stays below: without it, for an instant, programs that go on would find the
        # bare directory, and what they save there would be hidden from then on.
        connection = kernelmount.mount(
            self._fuse_fd, options.mountpoint, options.source, allow_other=options.allow_other
        )
        self._connections = kernelmount.connections_at(options.mountpoint)
        try:
            kernelmount.raise_limits(connection, MAX_BACKGROUND, MAX_BACKGROUND * 3 // 4)
        except OSError as exc:
            self._log("warning", f"cannot raise max_background: {exc}")
        try:
            kernelmount.raise_readahead(connection, kernelmount.MAX_READ)
        except OSError as exc:
            self._log("info", f"cannot raise the readahead: {exc}")

    def _next_daemon(self) -> Restart | End:
        """One daemon from its start to its end, and what follows."""
        if self._stopping or not kernelmount.connection_alive(self._fuse_fd):
            reason = "it was asked to stop" if self._stopping else "it was unmounted"
            return End(1, failure(reason))
        try:
            self._daemon = daemon = self._start()
        except OSError as exc:
            return self._after_failure(f"cannot be started: {exc}", killed=False)
        self._write_run_file(daemon.pid)
        self._watch(daemon)
        self._daemon = None
        daemon.close()
        return self._after(daemon)

    def _start(self) -> Daemon:
        fds = (self._fuse_fd, self._state.fd)
        standby, self._standby = self._standby, None
        promoted = standby.promote(fds) if standby is not None else None
        return promoted or Daemon.start(self._command(), fds)

    def _command(self) -> list[str]:
        options = self._options
        words = [str(options.settings), "--mountpoint", options.mountpoint]
        return [*python_module(options.daemon_module), *words]

    def _prepare_standby(self) -> None:
        """The next daemon, if the present one has served long enough to be worth one."""
        self._standby_at = inf
        try:
            self._standby = Standby(self._command())
        except OSError as exc:
            self._log("warning", f"no daemon in reserve: {exc.strerror}")

    def _drop_standby(self) -> None:
        if self._standby is not None:
            self._standby.close()
            self._standby = None

    def _watch(self, daemon: Daemon) -> None:
        """Until the daemon has ended; it is killed if it does not get ready in time."""
        now = time.monotonic()
        deadline = self._restarts.give_up_at(now) if self._answered else now + START_TIMEOUT
        while daemon.exit_code() is None:
            if daemon.has_failed:
                deadline = min(deadline, time.monotonic() + LEAVE_TIMEOUT)
            left = (self._standby_at if daemon.is_ready else deadline) - time.monotonic()
            if left > 0:
                self._wait(left)
            elif daemon.is_ready:
                self._prepare_standby()
            else:
                self._log("error", f"daemon {daemon.pid} did not get ready in time: killing it")
                daemon.send(signal.SIGKILL)
                deadline = inf
        self._note_report(daemon)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and (left := until - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, timeout: float) -> None:
        """Until a signal, news from the daemon, or the timeout (seconds)."""
        poll = select.poll()
        poll.register(self._signals.fd, select.POLLIN)
        if self._daemon is not None and not self._daemon.is_silent:
            poll.register(self._daemon.ready_fd, select.POLLIN)
        events = poll.poll(None if timeout == inf else max(0.0, timeout) * 1000)
        if self._signals.read():
            self._stop()
        if self._daemon is not None and any(fd == self._daemon.ready_fd for fd, _ in events):
            self._note_report(self._daemon)

    def _stop(self) -> None:
        # A daemon that is just taking over could not drain yet: it is told once it is ready, or
        # when asked a second time.
        taking_over = self._daemon is not None and not self._daemon.is_ready and self._answered
        if self._daemon is not None and (self._stopping or not taking_over):
            self._daemon.send(signal.SIGTERM)
        self._stopping = True
        _notify("STOPPING=1")

    def _note_report(self, daemon: Daemon) -> None:
        if daemon.read_report() and daemon.is_ready:
            self._restarts.started_ready(time.monotonic())
            if self._options.standby and self._standby is None and not self._stopping:
                self._standby_at = time.monotonic() + STANDBY_AFTER
            self._answer(daemon.report or {})
            if self._stopping:
                daemon.send(signal.SIGTERM)

    def _after(self, daemon: Daemon) -> Restart | End:
        """What follows the end of a daemon."""
        code = daemon.exit_code() or 0
        if not self._answered:
            report = daemon.report or failure(f"the daemon ended at its start ({describe(code)})")
            return End(int(report.get("exit_code", 1)), report)
        if code in (DRAINED, REMAINS):
            return End(code)
        if code == UPGRADE and daemon.is_ready and not self._stopping:
            self._log("info", "planned upgrade")
            self._drop_standby()  # it has the old code
            self._state.next_epoch(takeover=False)
            return Restart(0.0)
        if daemon.has_failed and (daemon.report or {}).get("retry") is False:
            self._log("error", "no other daemon could do better: giving up the mount")
            return End(1)
        killed = code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
        return self._after_failure(f"ended unexpectedly ({describe(code)})", killed=killed)

    def _after_failure(self, what: str, *, killed: bool) -> Restart | End:
        self._log("error", f"the daemon {what}")
        options = self._options
        if not (options.takeover and self._state.can_take_over()) or self._stopping:
            self._log("info", "no takeover: unmounting; the cache keeps what is not uploaded")
            return End(1, failure(f"the daemon {what}"))
        new_outage = self._restarts.is_new_outage()
        delay = self._restarts.died(time.monotonic(), killed=killed)
        if delay is None:
            self._log("error", f"no daemon for {options.takeover_timeout:g} s: giving up the mount")
            return End(1)
        self._state.next_epoch(takeover=new_outage, killed=killed)
        return Restart(delay)

    def _answer(self, report: Report) -> None:
        """Pass the first outcome on. A failure is passed on when nothing is left of the mount."""
        if self._answered:
            return
        self._answered = True
        if report.get("ok"):
            self._log("info", f"mounted on {self._options.mountpoint}")
            _notify("READY=1")
        else:
            self._log("error", "; ".join(filter(None, map(report.get, ("message", "hint")))))
        if self._options.ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._options.ready_fd, json.dumps(report).encode() + b"\n")
            os.close(self._options.ready_fd)

    def _unmount(self) -> None:
        """Take the mount away, whatever is left of it; never somebody else's on the same place."""
        self._drop_standby()
        mountpoint = self._options.mountpoint
        while (top := kernelmount.mount_at(mountpoint)) and top.connection in self._connections:
            kernelmount.abort(mountpoint)
        if self._fuse_fd >= 0:
            os.close(self._fuse_fd)
        with contextlib.suppress(OSError):
            self._options.settings.unlink()
            runfiles.remove(self._options.mountpoint)
            # Held by inheritance; last, because without it the mountpoint is free for the next.
            runfiles.run_path(self._options.mountpoint).with_suffix(".lock").unlink()

    def _write_run_file(self, daemon_pid: int) -> None:
        options = self._options
        run = runfiles.RunFile(
            mountpoint=options.mountpoint,
            pid=daemon_pid,
            supervisor_pid=os.getpid(),
            socket=str(runfiles.socket_path(options.mountpoint)),
            cache_dirs=options.cache_dirs,
            log=options.log,
        )
        try:
            runfiles.write(run)
        except OSError as exc:
            self._log("warning", f"cannot write the run file: {exc}")

    def _log(self, level: str, event: str) -> None:
        """One line in the form of the daemon's log."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"time": stamp, "level": level, "event": event, "logger": "cachefs.supervisor"}
        text = " ".join(f"{key}={_quoted(value)}" for key, value in line.items())
        with contextlib.suppress(OSError):
            print(json.dumps(line) if self._options.json_log else text, file=sys.stderr, flush=True)


def _quoted(value: str) -> str:
    return json.dumps(value) if " " in value or '"' in value else value


def _notify(state: str) -> None:
    """Tell systemd, if it started us as a service of Type=notify (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def _options(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m cachefs.supervisor")
    parser.add_argument("settings", type=Path, help="settings as JSON; removed at the end")
    parser.add_argument("mountpoint", help="absolute, without symbolic links")
    parser.add_argument("--log", default="", help="name of the file that standard error goes to")
    parser.add_argument("--ready-fd", type=int, help="where to report the outcome of the start")
    parser.add_argument("--connection", type=int, nargs=2, metavar=("FUSE_FD", "STATE_FD"))
    parser.add_argument("--daemon-module", default="cachefs.daemon")
    known = parser.parse_args(arguments)
    settings = json.loads(known.settings.read_bytes())
    return Options(
        settings=known.settings,
        mountpoint=known.mountpoint,
        daemon_module=known.daemon_module,
        source=settings["store"]["url"],
        allow_other=settings["mount"]["allow_other"],
        takeover=settings["mount"]["takeover"] == "auto",
        takeover_timeout=settings["mount"]["takeover_timeout"],
        standby=settings["mount"]["standby"] == "auto" and settings["mount"]["takeover"] == "auto",
        cache_dirs=tuple(settings["cache"]["dirs"]),
        log=known.log,
        json_log=settings["log"]["format"] == "json",
        ready_fd=known.ready_fd,
        inherited=tuple(known.connection) if known.connection else None,
    )


def main() -> int:
    """Run as `python -m cachefs.supervisor`."""
    options = _options(sys.argv[1:])
    os.chdir("/")
    return Supervisor(options).run()


if __name__ == "__main__":
    sys.exit(main())
