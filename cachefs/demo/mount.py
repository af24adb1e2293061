"""The mount of the demonstration: the real `cachefs` command in processes of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError
from cachefs.observe import runfiles
from cachefs.observe.client import ControlClient
from cachefs.observe.protocol import ControlError

MOUNT_TIMEOUT = 60.0
"""Seconds for `cachefs mount` to return."""
UNMOUNT_TIMEOUT = 30.0
"""Seconds for the drain when everything is durable already or the demonstration failed."""


def environment(store: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the store's credentials, free of other AWS and cachefs
    settings that would lead the mount elsewhere."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CACHEFS_"))}
    return {**kept, **store}


class DemoMount:
    """One mount of `url` at `mountpoint`; with `with`, unmounted however the block ends."""

    def __init__(
        self, url: str, endpoint: str, mountpoint: Path, cache: Path, env: Mapping[str, str]
    ) -> None:
        self.mountpoint = mountpoint
        self._arguments = ["mount", url, str(mountpoint), "--cache-dir", str(cache)]
        self._arguments += ["--endpoint-url", endpoint, "-o", "metrics.listen=127.0.0.1:0"]
        self._env = dict(env)
        self._log_path: Path | None = None

    def __enter__(self) -> DemoMount:
        mounting = self._start(*self._arguments)
        try:
            finish(mounting, MOUNT_TIMEOUT)
        except BaseException:
            # Half a mount cannot be undone: let it come up (or fail) before it is taken down.
            with contextlib.suppress(subprocess.TimeoutExpired):
                mounting.wait(MOUNT_TIMEOUT)
            self.unmount()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()

    def status(self) -> dict[str, Any]:
        """What `cachefs status --json` prints. Raises ControlError when no daemon answers."""
        run = runfiles.read(str(self.mountpoint))
        if run is None:
            raise ControlError(f"{self.mountpoint} is not mounted")
        with ControlClient(run.socket) as client:
            answer: dict[str, Any] = client.call("status", timeout=10)
        return answer

    def log(self) -> str:
        """The daemon's log, also after the unmount."""
        self._note_log()
        try:
            return self._log_path.read_text(errors="replace") if self._log_path else ""
        except OSError:
            return ""

    def remove_log(self) -> None:
        """Once nothing in it is worth a look: a log stays behind for people otherwise."""
        if self._log_path:
            self._log_path.unlink(missing_ok=True)

    def _note_log(self) -> None:
        run = runfiles.read(str(self.mountpoint))
        if run is not None and run.log:
            self._log_path = Path(run.log)

    def waiting(self) -> subprocess.Popen[str]:
        """`cachefs wait` for the whole mount, started; it returns when all of it is durable."""
        return self._start("wait", str(self.mountpoint))

    def metrics_url(self) -> str:
        """Where Prometheus would scrape."""
        address = self.status()["metrics"]
        return f"http://{address}/metrics"

    def metrics(self) -> str:
        """The metrics page. Raises OSError."""
        with urllib.request.urlopen(self.metrics_url(), timeout=10) as page:
            text: str = page.read().decode()
        return text

    def unmount(self) -> None:
        """End the mount, by force if it must be. Safe to call at any time, and again."""
        self._note_log()
        if self._mounted():
            with contextlib.suppress(CachefsError):
                self._run(
                    "unmount",
                    str(self.mountpoint),
                    "--drain-timeout",
                    str(UNMOUNT_TIMEOUT / 2),
                    timeout=UNMOUNT_TIMEOUT,
                )
        if self._mounted():
            subprocess.run(["umount", "--lazy", str(self.mountpoint)], check=False)

    def _mounted(self) -> bool:
        return str(self.mountpoint) in runfiles.mountpoints()

    def _run(self, *arguments: str, timeout: float) -> None:
        finish(self._start(*arguments), timeout)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        """Its own session: Ctrl-C is for the demonstration, which then ends this in order."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "cachefs", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[str], timeout: float | None) -> None:
    """Wait for a command. Raises CachefsError with what it printed when it fails; one that takes
    longer than `timeout` seconds is ended."""
    try:
        printed, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stop(process)
        raise CachefsError(f"`{_named(process)}` did not end in {timeout:.0f} s") from None
    if process.returncode != 0:
        raise CachefsError(
            f"`{_named(process)}` failed with exit code {process.returncode}: {printed.strip()}"
        )


def stop(process: subprocess.Popen[str]) -> None:
    """End a command that is no longer wanted, if it still runs."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _named(process: subprocess.Popen[str]) -> str:
    assert isinstance(process.args, list)
    return f"cachefs {process.args[3]}"
