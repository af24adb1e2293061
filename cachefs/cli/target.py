"""From a path to its daemon, and through a takeover to the next one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cachefs.errors import MountError
from cachefs.observe import runfiles
from cachefs.observe.client import ControlClient, NoAnswer

RECONNECT = 15.0
"""Seconds to wait for the next daemon while a supervisor lives to start one."""
QUERY_TIMEOUT = 30.0
"""Seconds a daemon may take over a question that it can answer at once."""
STOPPED = 3
"""Looks in a row, about a second apart, that find a silent daemon stopped: then it is told."""
GRACE = 10.0
"""Seconds beyond its own limit after which a daemon counts as silent."""

OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A path and the daemon that serves it."""

    mountpoint: str
    path: str
    """Absolute, as the daemon knows it."""
    run: runfiles.RunFile

    @property
    def is_mount(self) -> bool:
        """Whether the path is the mountpoint itself."""
        return self.path == self.mountpoint


def find(path: str) -> Target:
    """The daemon for a path. Raises MountError when the path is in no mount."""
    location = runfiles.locate(path)
    if location is None:
        raise MountError(f"{path}: not in a cachefs mount", hint="`cachefs status` lists mounts")
    return Target(location.mountpoint, location.path, _run_file(location.mountpoint))


def find_all() -> list[Target]:
    """Every mount on this machine that this user can ask."""
    known = {run.mountpoint: run for run in runfiles.read_all()}
    return [
        Target(mountpoint, mountpoint, known[mountpoint])
        for mountpoint in runfiles.mountpoints()
        if mountpoint in known
    ]


def ask(
    target: Target,
    op: str,
    args: dict[str, Any],
    *,
    on_progress: OnProgress | None = None,
    patience: float | None = QUERY_TIMEOUT,
) -> Any:
    """The result of an operation. When the daemon dies meanwhile, its successor is asked again.

    `patience`: seconds until the answer must be there, None without end. A number in
    `args["timeout"]` counts from the first time of asking. Raises what the daemon answers, and
    MountError when no daemon does; of one that was stopped that is known within a few seconds.
    """
    started = time.monotonic()
    give_up: float | None = None
    while True:
        spent = time.monotonic() - started
        left = None if patience is None else max(0.0, patience - spent)
        try:
            with ControlClient(target.run.socket) as client:
                give_up = None
                return client.call(
                    op,
                    _args_after(args, spent),
                    on_progress=on_progress,
                    timeout=left,
                    on_silence=_Watch(target),
                )
        except NoAnswer as exc:
            now = time.monotonic()
            give_up = give_up or now + RECONNECT
            late = now >= give_up or (patience is not None and now >= started + patience)
            target = _again(target)
            if late or not _alive(target.run.supervisor_pid):
                raise _silent(target, exc) from None
        time.sleep(0.1)


class _Watch:
    """Looks at a daemon that says nothing."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._looks = 0

    def __call__(self) -> None:
        """Raises MountError once it is clear that the daemon is stopped."""
        pid = self._target.run.pid
        self._looks = self._looks + 1 if _is_stopped(pid) else 0
        if self._looks >= STOPPED:
            raise MountError(
                f"{self._target.mountpoint}: its daemon (pid {pid}) does not answer: it is stopped",
                hint=f"`kill -CONT {pid}` lets it go on, `cachefs unmount --force "
                f"{self._target.mountpoint}` ends it: nothing written is lost",
            )


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] in (b"T", b"t")


def _args_after(args: dict[str, Any], spent: float) -> dict[str, Any]:
    limit = args.get("timeout")
    return args if limit is None else {**args, "timeout": max(0.0, limit - spent)}


def _run_file(mountpoint: str) -> runfiles.RunFile:
    run = runfiles.read(mountpoint)
    if run is None:
        hint = "ask as root or as the user who mounted it"
        raise MountError(f"{mountpoint}: no run file of its daemon is readable here", hint=hint)
    return run


def _again(target: Target) -> Target:
    run = runfiles.read(target.mountpoint)
    return target if run is None else replace(target, run=run)


def _silent(target: Target, exc: NoAnswer) -> MountError:
    run = target.run
    see = f"see {run.log}; " if run.log else ""
    return MountError(
        f"{target.mountpoint}: its daemon (pid {run.pid}) does not answer: {exc}",
        hint=f"{see}to recover, `cachefs unmount --force {target.mountpoint}` and mount again with "
        "the same cache directory: nothing written is lost",
    )


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
