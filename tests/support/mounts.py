"""A real mount for a test: `python -m cachefs mount ...`, looked at from outside.

`Mount` starts it, asks it (through its control socket, as the command line does), kills it, mounts
it again, and at the end makes sure that nothing of it is left. A `Watchdog` aborts the connections
of mounts whose test ran out of time, so that no call of the test's process can hang for ever.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachefs.fsck import check as fsck
from cachefs.meta import ring
from cachefs.observe.runfiles import memory_dirs
from tests.support import commands, fusectl, lanes, logs, postmortem

CHECKOUT = Path(__file__).resolve().parents[2]
FAST = {
    "flush.settle": "20ms",
    "metrics.listen": "127.0.0.1:0",
    "cache.size": "2GiB",
}
"""Options of every test mount unless a test says otherwise."""


MountFactory = Callable[..., "Mount"]
"""The type of the `mounted` fixture."""


class Failed(AssertionError):
    """A request to the daemon was answered with an error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(f"{message} (exit code {exit_code})")
        self.message = message
        self.exit_code = exit_code


def clean_environment(home: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which nothing of this machine's AWS or cachefs settings is left."""
    foreign = ("AWS_", "CACHEFS_", "PYTHONDONTWRITEBYTECODE")  # the last costs 0.3 s a process
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    if starts := os.environ.get("CACHEFS_TEST_STARTS"):
        kept["CACHEFS_TEST_STARTS"] = starts
    return {
        **kept,
        "PYTHONPATH": str(CHECKOUT),
        "HOME": str(home),
        "AWS_CONFIG_FILE": str(home / "aws-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(home / "aws-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "COLUMNS": "200",
        "NO_COLOR": "1",
        **(extra or {}),
    }


def run_file(mountpoint: Path) -> Path:
    """Where a mount tells its pids and its control socket."""
    folder = Path("/run/cachefs")
    if os.geteuid() != 0:
        folder = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")) / "cachefs"
    return folder / (hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16] + ".json")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def processes(mount: Mount) -> set[int]:
    """Pids of daemons and supervisors of one mountpoint."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(mount.path) in words and b"mount" not in words:
                found.add(int(entry.name))
    return found


def ended(pids: Iterable[int], timeout: float) -> bool:
    """Wait until none of these processes runs any more."""
    deadline = time.monotonic() + timeout
    waiting = list(pids)
    while waiting := [pid for pid in waiting if alive(pid)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def poll(condition: Any, timeout: float = 20.0, step: float = 0.02, what: str = "") -> Any:
    """Call until the answer is true; returns it. AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        time.sleep(step)


@dataclass(slots=True)
class Mount:
    """One mountpoint with its store, cache and options; mounted or not."""

    store: str
    path: Path
    cache_dirs: list[Path]
    options: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    allowed_log: list[str] = field(default_factory=list)
    daemon_pid: int = 0
    supervisor_pid: int = 0
    socket: str = ""
    falls_back: bool = False
    """It may serve in the tracked lane though it was asked for the other one."""
    spoiled: bool = False
    """The test itself has damaged the cache."""
    _log: Path | None = None
    _old_log: str = ""

    # ---- mounting and unmounting ---------------------------------------------------------------

    def command(self) -> list[str]:
        """The arguments after `cachefs`."""
        words = ["mount", self.store, str(self.path)]
        for folder in self.cache_dirs:
            words += ["--cache-dir", str(folder)]
        for name, value in {**FAST, **self.options}.items():
            words += ["-o", f"{name}={value}"]
        return words + self.arguments

    def start(self, timeout: float = 30.0) -> Mount:
        """Mount; AssertionError with everything that was printed if it fails."""
        self.path.mkdir(parents=True, exist_ok=True)
        done = self.cli(*self.command(), timeout=timeout, mount_path=False)
        if done.returncode != 0:
            if told := re.search(r"see (/\S+\.log)", done.stderr):
                self._log = Path(told[1])
            said = f"{done.stdout}\n{done.stderr}\n{self.log[-3000:]}"
            raise AssertionError(f"mount failed ({done.returncode}):\n{said}")
        self.reread()
        if self.lane == "passthrough" and lanes.kernel_has_passthrough() and not self.falls_back:
            told = self.status()["lanes"]
            assert told["passthrough"], f"no passthrough on this kernel: {told['reason']}"
        return self

    def reread(self) -> None:
        """Take pids, socket and log from the run file (they change with a takeover)."""
        told = json.loads(run_file(self.path).read_text())
        self.daemon_pid = told["pid"]
        self.supervisor_pid = told["supervisor_pid"]
        self.socket = told["socket"]
        self._log = Path(told["log"]) if told.get("log") else None

    def cli(
        self, *words: str | Path, timeout: float = 60.0, mount_path: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `cachefs WORDS` (with the mountpoint last if `mount_path`)."""
        arguments = [str(w) for w in words] + ([str(self.path)] if mount_path else [])
        return cachefs(*arguments, env=self.env, timeout=timeout)

    @property
    def mounted(self) -> bool:
        return fusectl.entry_of(self.path) is not None

    def unmount(self, drain_timeout: float | None = None, timeout: float = 60.0) -> int:
        """`cachefs unmount`; returns its exit code."""
        words = ["unmount", str(self.path)]
        if drain_timeout is not None:
            words += ["--drain-timeout", str(drain_timeout)]
        code = self.cli(*words, timeout=timeout).returncode
        self.keep_log()
        return code

    def remount(self, **options: str) -> Mount:
        """Unmount (unless it is down already) and mount again with the same cache."""
        if self.mounted:
            assert self.unmount() in (0, 3)
        self.wait_gone()
        self.options.update({k.replace("__", "."): v for k, v in options.items()})
        return self.start()

    def wait_gone(self, timeout: float = 20.0) -> None:
        """Until neither the mount nor its processes are there."""
        poll(lambda: not self.mounted, timeout, what=f"{self.path} unmounted")
        assert ended([self.daemon_pid, self.supervisor_pid], timeout), "processes left behind"

    # ---- killing -------------------------------------------------------------------------------

    def kill_daemon(self, number: int = signal.SIGKILL, *, wait: bool = True) -> int:
        """Kill the daemon (not its supervisor); returns the pid it had."""
        pid = self.daemon_pid
        self.keep_log()
        os.kill(pid, number)
        if wait:
            assert ended([pid], 10), f"daemon {pid} survived signal {number}"
        return pid

    def crash(self) -> None:
        """Daemon and supervisor die at once; the cache is left as it was."""
        self.keep_log()
        for pid in (self.supervisor_pid, self.daemon_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert ended([self.supervisor_pid, self.daemon_pid], 10)
        fusectl.abort(self.path)
        fusectl.detach(self.path)
        self.check_cache()

    def check_cache(self) -> None:
        """AssertionError if the cache breaks any invariant; nobody uses it now."""
        if self.spoiled or not all((folder / "files").is_dir() for folder in self.cache_dirs):
            return
        report = fsck.check(self.cache_dirs, content=False)
        lines = [f"{each.check}: {each.subject}" for each in report.findings if each.is_trouble]
        assert not lines, f"the cache of {self.path} is not sound:\n" + "\n".join(lines[:20])

    def took_over(self, old_pid: int, timeout: float = 30.0) -> None:
        """Wait until another daemon than `old_pid` serves the mount."""

        def new_one() -> bool:
            with contextlib.suppress(OSError, ValueError, KeyError):
                self.reread()
                return self.daemon_pid != old_pid and bool(self.status())
            return False

        try:
            poll(new_one, timeout, what="a new daemon")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{postmortem.report(self)}") from None

    # ---- asking --------------------------------------------------------------------------------

    def ask(self, op: str, args: dict[str, Any] | None = None, timeout: float = 60.0) -> Any:
        """One request to the control socket; Failed if it is answered with an error."""
        request = json.dumps({"op": op, "args": args or {}}).encode() + b"\n"
        deadline = time.monotonic() + timeout
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(5)
            link.connect(self.socket)
            link.sendall(request)
            return _reply(link, deadline, op)

    def status(self, path: Path | None = None) -> dict[str, Any]:
        """`cachefs status --json`, without starting a process for it."""
        args = {} if path is None else {"path": str(path)}
        told: dict[str, Any] = self.ask("status", args)
        return told

    def wait(self, *paths: Path, survives: str = "site", timeout: float = 60.0) -> None:
        """Until everything closed so far is durable; Failed if it does not come to that."""
        wanted = [str(p) for p in paths] or [str(self.path)]
        args = {"paths": wanted, "survives": survives, "timeout": timeout}
        self.ask("wait", args, timeout + 10)

    def xattr(self, name: str, path: str | Path = "") -> str:
        """A virtual attribute, by its short name."""
        return os.getxattr(self.path / path, f"user.cachefs.{name}", follow_symlinks=False).decode()

    def metric(self, name: str) -> float:
        """A metric's value now (one without labels)."""
        address = self.status()["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))

    @property
    def lane(self) -> str:
        """The lane this mount was asked for: tracked or passthrough."""
        off = self.options.get("mount.passthrough") == "off"
        return "tracked" if off else "passthrough"

    # ---- log -----------------------------------------------------------------------------------

    def keep_log(self) -> None:
        """Remember what the log says now, in case it goes away."""
        self._old_log = self.log

    @property
    def log(self) -> str:
        """The text of the daemon's (and the supervisor's) log so far."""
        if self._log is None or not self._log.exists():
            return self._old_log
        return self._log.read_text(errors="replace")

    def check_log(self) -> None:
        """AssertionError if the log has a warning, an error or a traceback that was not allowed."""
        found = logs.unexpected(self.log, self.allowed_log)
        assert not found, f"unexpected in the log of {self.path}:\n" + "\n".join(found[:20])

    # ---- the end -------------------------------------------------------------------------------

    def tear_down(self, drain: float = 20.0) -> None:
        """Unmount in the ordinary way; if that fails end everything by force, and then complain."""
        trouble = self._leave(drain)
        self.keep_log()
        self.destroy()
        self.check_cache()
        assert not trouble, f"{trouble}\n--- log of {self.path} ---\n{self.log[-4000:]}"
        self.check_log()

    def _leave(self, drain: float) -> str:
        """What went wrong in unmounting; empty if nothing."""
        pids = [self.daemon_pid, self.supervisor_pid]
        if not self.mounted:
            return "" if ended(pids, 10) else f"not mounted, but processes {pids} remain"
        try:
            self.ask("unmount", {"drain_timeout": drain}, drain + 15)
        except (OSError, ValueError, AssertionError) as error:
            return f"unmount failed: {type(error).__name__}: {error}"
        if not ended(pids, 10):
            return f"processes {[p for p in pids if alive(p)]} outlived the unmount"
        still = fusectl.entry_of(self.path)
        return "still mounted after the unmount" if still else ""

    def destroy(self) -> None:
        """End mount and processes by force; no complaints."""
        fusectl.abort(self.path)
        for pid in (self.supervisor_pid, self.daemon_pid):
            if pid and self.is_own(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        fusectl.detach(self.path)
        ended([p for p in (self.supervisor_pid, self.daemon_pid) if p], 5)
        for name in (each / "device" for each in self.cache_dirs):
            if name.exists():  # what is kept in memory for the next mount of this cache
                for place in memory_dirs():
                    (place / f"{name.read_text().strip()}.closed").unlink(missing_ok=True)
        for folder in self.cache_dirs:
            database = folder / "meta" / "cachefs.db"
            if database.exists() and not ring.pending(database):
                ring.discard(database)
        if self._log is not None:
            self.keep_log()
            self._log.unlink(missing_ok=True)

    @staticmethod
    def is_own(pid: int) -> bool:
        """Whether the pid is still a process of the product (numbers are reused)."""
        try:
            return b"cachefs" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


def _reply(link: socket.socket, deadline: float, op: str) -> Any:
    """Read reply lines until the result; progress is skipped."""
    pending = b""
    while True:
        line, newline, rest = pending.partition(b"\n")
        if newline:
            pending = rest
            message = json.loads(line)
            if "error" in message:
                raise Failed(message["error"]["message"], message["error"]["exit_code"])
            if "result" in message:
                return message["result"]
            continue
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([link], [], [], left)[0]:
            raise Failed(f"{op}: no answer", -1)
        block = link.recv(1 << 16)
        if not block:
            raise ConnectionResetError(errno.ECONNRESET, f"{op}: the daemon hung up")
        pending += block


def cachefs(
    *words: str, env: dict[str, str], timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; output goes through files, not pipes.

    A daemon that kept a pipe open would hang the caller; one test looks at that on purpose.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = commands.run(words, env, out, err, timeout)
        out.seek(0)
        err.seek(0)
        texts = [f.read().decode(errors="replace") for f in (out, err)]
    if code == -9:
        said = "".join(texts)
        raise AssertionError(f"cachefs {' '.join(words)}: not done in {timeout} s\n{said}")
    return subprocess.CompletedProcess(list(words), code, *texts)


class Watchdog:
    """Aborts the connections of the watched mounts once their test is overdue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadline: float | None = None
        self._mounts: list[Mount] = []
        self.fired: list[Path] = []
        threading.Thread(target=self._run, daemon=True, name="watchdog").start()

    def arm(self, seconds: float) -> None:
        """A test began; it may take this long."""
        with self._lock:
            self._deadline = time.monotonic() + seconds
            self.fired = []

    def disarm(self) -> None:
        with self._lock:
            self._deadline = None

    def watch(self, mount: Mount) -> None:
        with self._lock:
            self._mounts.append(mount)

    def forget(self, mount: Mount) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._mounts.remove(mount)

    def _run(self) -> None:
        while True:
            time.sleep(0.5)
            with self._lock:
                overdue = self._deadline is not None and time.monotonic() > self._deadline
                mounts: Sequence[Mount] = list(self._mounts) if overdue else ()
                if overdue:
                    self._deadline = None
            for mount in mounts:
                if mount.mounted:
                    print(postmortem.report(mount), file=sys.stderr)
                if fusectl.abort(mount.path):
                    self.fired.append(mount.path)
