"""Starting a supervisor, and waiting until its mount answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cachefs.cli.claim import Claim, Connection, settings_path
from cachefs.config import Settings
from cachefs.errors import MountError
from cachefs.fuse import kernelmount
from cachefs.observe import runfiles
from cachefs.supervised import environment, python_module
from cachefs.supervisor import START_TIMEOUT

PATIENCE = START_TIMEOUT + 30.0
"""Seconds to wait for the supervisor's report; it has a limit of its own."""
ANSWER_TIMEOUT = 30.0
"""Seconds a mount may take over its first stat."""
_LOG_DIR = Path("/var/log/cachefs")


@dataclass(frozen=True, slots=True)
class Launch:
    """A mount about to begin."""

    settings: Settings
    mountpoint: str
    claim: Claim
    connection: Connection | None
    daemon_module: str

    def command(self, log: str, *extra: str) -> list[str]:
        """The supervisor's command line; writes the settings file it names."""
        path = settings_path(self.mountpoint)
        path.unlink(missing_ok=True)
        with open(path, "x", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            file.write(self.settings.to_json())
        words = [*python_module("cachefs.supervisor"), str(path), self.mountpoint]
        words += ["--log", log, "--daemon-module", self.daemon_module, *extra]
        if self.connection is not None:
            words += ["--connection", *map(str, self.connection)]
        return words

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that go to the supervisor."""
        return (self.claim.fd, *(self.connection or ()))


def in_foreground(launch: Launch) -> NoReturn:
    """Become the supervisor. Its log, and the daemon's, go to standard error."""
    command = launch.command("")
    for fd in launch.fds:
        os.set_inheritable(fd, True)
    env = environment()
    if "NOTIFY_SOCKET" in os.environ:
        env["NOTIFY_SOCKET"] = os.environ["NOTIFY_SOCKET"]
    sys.stdout.flush()
    os.execve(command[0], command, env)


def in_background(launch: Launch) -> dict[str, Any]:
    """Start the supervisor and wait until the mount answers; returns the daemon's report.

    Raises MountError with the reason otherwise; then nothing is mounted and nothing runs.
    """
    log = _log_path(launch.mountpoint)
    read_end, write_end = os.pipe()
    command = launch.command(str(log), "--ready-fd", str(write_end))
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            pass_fds=(*launch.fds, write_end),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd="/",
            env=environment(),
            start_new_session=True,
        )
    launch.claim.handed_over = True
    os.close(write_end)
    with _ended_on_failure(process):
        report = _report(read_end, log)
        if not report.get("ok"):
            process.wait(PATIENCE)
            raise _failed(report)
        if not kernelmount.answers(launch.mountpoint, ANSWER_TIMEOUT):
            raise MountError(f"{launch.mountpoint} does not answer", hint=f"see {log}")
    return {**report, "log": str(log)}


def _log_path(mountpoint: str) -> Path:
    """The log of a mountpoint: same name each time, so that the past can be looked up."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", mountpoint)[-80:].strip("-")
    name = f"{slug}-{runfiles.run_path(mountpoint).stem[:8]}.log"
    try:
        _LOG_DIR.mkdir(mode=0o750, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(_LOG_DIR / name, flags, 0o640))  # It names files: not for everybody.
    except OSError:
        return runfiles.run_dir() / name
    return _LOG_DIR / name


@contextlib.contextmanager
def _ended_on_failure(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """An error, or Ctrl-C, on the way to the mount ends what was started."""
    try:
        yield
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ANSWER_TIMEOUT)
        raise


def _report(fd: int, log: Path) -> dict[str, Any]:
    """The supervisor's one line."""
    deadline = time.monotonic() + PATIENCE
    text = b""
    try:
        while not text.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([fd], [], [], left)[0]:
                raise MountError(f"not mounted within {PATIENCE:g} s", hint=f"see {log}")
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise MountError("the supervisor ended unexpectedly", hint=f"see {log}")
            text += chunk
    finally:
        os.close(fd)
    report: dict[str, Any] = json.loads(text)
    if not report.get("ok"):
        report["hint"] = report.get("hint") or f"see {log}"
    return report


def _failed(report: dict[str, Any]) -> MountError:
    error = MountError(str(report.get("message", "")), hint=str(report.get("hint", "")))
    error.exit_code = int(report.get("exit_code", 1)) or 1
    return error
