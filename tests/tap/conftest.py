"""A toy mount that ends with its test, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import scratch

HERE = Path(__file__).parent
REPO = HERE.parent.parent
libc = ctypes.CDLL(None, use_errno=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "toy" in getattr(item, "fixturenames", ()) and not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse (run as root)")


class Toy:
    """One toy mount: `source` is the directory behind `mnt`."""

    def __init__(
        self, base: Path, options: dict[str, Any], delay: float, *, overlay: bool = False
    ) -> None:
        self.base, self.source, self.mnt = base, base / "source", base / "mnt"
        self.pidfile, self.log, self.options_file = base / "pid", base / "log", base / "options"
        for directory in (self.source, self.mnt):
            directory.mkdir()
        if overlay:
            self._mount_overlay()
        self.set_options(**options)
        self.supervisor = self._start(delay)
        self.pid = self.wait_for_daemon(0)
        self.report()  # the kernel's INIT is answered: from here on a takeover is possible

    def _mount_overlay(self) -> None:
        layers = [self.base / name for name in ("lower", "upper", "work")]
        for layer in layers:
            layer.mkdir()
        names = ("lowerdir", "upperdir", "workdir")
        data = ",".join(f"{name}={layer}" for name, layer in zip(names, layers, strict=True))
        if libc.mount(b"overlay", str(self.source).encode(), b"overlay", 0, data.encode()):
            pytest.skip("needs overlayfs")

    def set_options(self, **options: Any) -> None:
        """Options of daemons that start from now on."""
        self.options_file.write_text(json.dumps(options))

    def _start(self, delay: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "toysup.py"), str(self.source), str(self.mnt)]
        command += [str(self.options_file), str(self.pidfile), str(delay)]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=log, stderr=log
            )

    def wait_for_daemon(self, old: int, timeout: float = 20.0) -> int:
        """The pid of the daemon that replaced `old`, once it serves."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            text = self.pidfile.read_text() if self.pidfile.exists() else ""
            if text and int(text) != old and f"up {text}\n" in self.log.read_text():
                return int(text)
            if self.supervisor.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"no daemon: {self.log.read_text()}")

    def kill(self, number: int = signal.SIGKILL, wait: bool = True) -> None:
        """Kill the daemon; wait for the next one unless told not to."""
        old = self.pid
        os.kill(old, number)
        if wait:
            self.pid = self.wait_for_daemon(old)

    def report(self) -> dict[str, Any]:
        """What the daemon's tap knows (see `Toy.report` of toyfs.py)."""
        report: dict[str, Any] = json.loads(os.getxattr(self.mnt, "user.toy"))
        return report

    def counts(self, name: str) -> dict[str, int]:
        """Requests for this file since the first call of this for it."""
        counts: dict[str, int] = json.loads(os.getxattr(self.mnt / name, "user.toy"))
        return counts

    def client(self, code: str, *args: object) -> subprocess.Popen[str]:
        """A process that runs `code` with sys.argv[1:] = args, in the mount's directory."""
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            cwd=self.mnt,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> None:
        """Unmount; the connection is aborted if that does not end it.

        It may not: a process in another mount namespace can have a copy of the mount.
        """
        connection = _device_minor(self.mnt)
        libc.umount2(str(self.mnt).encode(), 2)
        if not self._ended(3):
            with contextlib.suppress(OSError):
                Path(f"/sys/fs/fuse/connections/{connection}/abort").write_text("1")
        ended = self._ended(5)
        if not ended:
            self._force()
        libc.umount2(str(self.source).encode(), 2)  # an overlay, if it is one
        if not ended:
            raise AssertionError(f"the toy did not end: {self.log.read_text()}") from None

    def _ended(self, timeout: float) -> bool:
        try:
            self.supervisor.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _force(self) -> None:
        self.supervisor.kill()
        self.supervisor.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(self.pidfile.read_text()), signal.SIGKILL)


def _device_minor(mountpoint: Path) -> int:
    """From mountinfo, so that a dead daemon cannot hold us up."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == str(mountpoint):
            return int(fields[2].split(":")[1])
    return 0


@pytest.fixture
def toy() -> Iterator[Callable[..., Toy]]:
    """toy(place="/dev/shm", delay=0.0, overlay=False, **options) -> a mounted Toy."""
    made: list[Toy] = []

    def make(
        place: str = "/dev/shm", delay: float = 0.0, *, overlay: bool = False, **options: Any
    ) -> Toy:
        base = scratch.make(place, "toy")
        made.append(Toy.__new__(Toy))
        Toy.__init__(made[-1], base, options, delay, overlay=overlay)
        return made[-1]

    yield make
    for mount in made:
        try:
            mount.end()
        finally:
            scratch.remove(mount.base)


PYTHONS = ("_tap_lists.c", "_tap_grants.c")
"""Parts that need Python."""


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """harness(sanitizers) -> the program of harness.c, built with these (or "" for none)."""
    built: dict[str, Path] = {}

    def build(sanitizers: str) -> Path:
        if sanitizers not in built:
            built[sanitizers] = _build(tmp_path_factory.mktemp("harness"), sanitizers)
        return built[sanitizers]

    return build


def _build(directory: Path, sanitizers: str) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    sources = [p for p in (REPO / "cachefs/fuse").glob("_tap_*.c") if p.name not in PYTHONS]
    options = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    command = ["gcc", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *options]
    command += ["-Wl,--wrap=ioctl,--wrap=write,--wrap=pwrite"]
    command += map(str, [*HERE.glob("harness*.c"), *sources])
    subprocess.run([*command, "-o", str(directory / "harness")], check=True)
    return directory / "harness"
