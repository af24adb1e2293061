"""One mountpoint under test: starts supervisors and commands, knows every process they made."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cachefs.fuse import kernelmount
from cachefs.observe import runfiles
from tests.support.mounts import alive, ended, poll

CHECKOUT = Path(__file__).resolve().parents[2]
TOY = "tests.lifecycle.toydaemon"


class Lab:
    """Mounts toys; `close` ends whatever is left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mountpoint = root / "mnt"
        self.cache = root / "cache"
        self.log_file = root / "log"
        for directory in (self.mountpoint, self.cache, root / "store"):
            directory.mkdir()
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.seen: set[int] = set()

    # ---- starting ------------------------------------------------------------------------------

    def environment(self, **plan: Any) -> dict[str, str]:
        """For commands and supervisors: the toy's plan, none of this machine's settings."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CACHEFS_"))}
        plan.setdefault("socket", str(runfiles.socket_path(str(self.mountpoint))))
        return {**kept, "PYTHONPATH": str(CHECKOUT), "TOYDAEMON": json.dumps(plan)}

    def start(
        self, *, takeover: str = "auto", takeover_timeout: float = 600.0, **plan: Any
    ) -> dict[str, Any]:
        """Start a supervisor with a toy; returns what it reports."""
        settings = {
            "store": {"url": f"file://{self.root}/store"},
            "cache": {"dirs": [str(self.cache)]},
            "mount": {
                "takeover": takeover,
                "takeover_timeout": takeover_timeout,
                "standby": "off",
                "allow_other": True,
            },
            "log": {"format": "text"},
        }
        path = self.root / "settings"
        path.write_text(json.dumps(settings))
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "cachefs.supervisor", str(path), str(self.mountpoint)]
        command += ["--daemon-module", TOY, "--ready-fd", str(write_end)]
        command += ["--log", str(self.log_file)]
        with self.log_file.open("ab") as log:
            self.supervisor = subprocess.Popen(
                command, env=self.environment(**plan), stderr=log, pass_fds=[write_end], cwd="/"
            )
        os.close(write_end)
        self.seen.add(self.supervisor.pid)
        report = _read_line(read_end, 30.0)
        assert not report["ok"] or kernelmount.answers(str(self.mountpoint), 10)
        return report

    def command(
        self, *words: str | Path, timeout: float = 30.0, **plan: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `cachefs WORDS` to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "cachefs", *map(str, words)],
            env=self.environment(**plan),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd="/",
        )
        self.note_processes()
        return done

    def mount(self, *extra: str, timeout: float = 30.0, **plan: Any) -> tuple[int, str]:
        """`cachefs mount` with a toy; returns exit code and standard error."""
        words = ["mount", f"file://{self.root}/store", str(self.mountpoint)]
        words += ["--cache-dir", str(self.cache), "--daemon-module", TOY, *extra]
        done = self.command(*words, timeout=timeout, **plan)
        return done.returncode, done.stderr

    # ---- looking -------------------------------------------------------------------------------

    @property
    def mounted(self) -> bool:
        return kernelmount.mount_at(str(self.mountpoint)) is not None

    @property
    def run(self) -> runfiles.RunFile:
        """The run file, which has to be there."""
        found = runfiles.read(str(self.mountpoint))
        assert found is not None, "no run file"
        return found

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def header(self) -> tuple[int, int, int]:
        """flags, epoch and takeovers in the state that daemons share."""
        words = Path(f"/proc/{self.run.pid}/cmdline").read_bytes().split(b"\0")
        fd = int(words[words.index(b"--state-fd") + 1])
        with open(f"/proc/{self.run.pid}/fd/{fd}", "rb") as state:
            _, _, flags, epoch, takeovers = struct.unpack("=4sIIIQ", state.read(24))
        return flags, epoch, takeovers

    def note_processes(self) -> None:
        """Remember the pids of the run file, to end them at last."""
        found = runfiles.read(str(self.mountpoint))
        if found is not None:
            self.seen |= {found.pid, found.supervisor_pid}

    # ---- doing ---------------------------------------------------------------------------------

    def kill_daemon(self) -> int:
        """SIGKILL; returns the pid it had."""
        self.note_processes()
        pid = self.run.pid
        os.kill(pid, signal.SIGKILL)
        assert ended([pid], 10)
        return pid

    def next_daemon(self, old: int, timeout: float = 20.0) -> int:
        """Wait for the run file to name another daemon that runs."""

        def other() -> int:
            found = runfiles.read(str(self.mountpoint))
            return found.pid if found and found.pid != old and alive(found.pid) else 0

        pid: int = poll(other, timeout, what="another daemon")
        self.note_processes()
        return pid

    def leave(self, number: int = signal.SIGTERM, timeout: float = 15.0) -> int:
        """Signal the supervisor and return its exit code."""
        assert self.supervisor is not None
        self.note_processes()
        self.supervisor.send_signal(number)
        return self.exit_code(timeout)

    def exit_code(self, timeout: float = 15.0) -> int:
        """Wait for the supervisor; nothing may be left behind."""
        assert self.supervisor is not None
        code = self.supervisor.wait(timeout)
        assert not self.mounted
        assert runfiles.read(str(self.mountpoint)) is None
        assert ended(self.seen, 5)
        return code

    def eventually(self, condition: Callable[[], Any], timeout: float = 10.0) -> None:
        poll(condition, timeout)

    def close(self) -> None:
        """End mount and processes, whatever state they are in."""
        self.note_processes()
        mountpoint = str(self.mountpoint)
        for pid in self.seen:
            with contextlib.suppress(OSError):
                if b"cachefs" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        while kernelmount.mount_at(mountpoint) is not None:
            kernelmount.abort(mountpoint)
        if self.supervisor is not None:
            self.supervisor.wait(10)
        ended(self.seen, 5)
        runfiles.remove(mountpoint)
        for log in Path("/var/log/cachefs").glob(f"*{self.root.name}*"):
            log.unlink()
        for suffix in (".settings", ".lock"):
            runfiles.run_path(mountpoint).with_suffix(suffix).unlink(missing_ok=True)


def _read_line(fd: int, timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    text = b""
    try:
        while not text.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            assert select.select([fd], [], [], left)[0], "no report in time"
            block = os.read(fd, 4096)
            assert block, "the supervisor ended without a report"
            text += block
    finally:
        os.close(fd)
    report: dict[str, Any] = json.loads(text)
    return report
