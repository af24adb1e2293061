"""Ending a mount: busy or not, drained by its daemon, or dead and only to be cleared away."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cachefs.cli import claim, target
from cachefs.cli.target import OnProgress, Target
from cachefs.errors import MountError
from cachefs.fuse import kernelmount
from cachefs.observe import runfiles
from cachefs.observe.protocol import ControlError

GONE_TIMEOUT = 60.0
"""Seconds from the end of the drain until mount and processes have gone."""
PATIENCE = 10.0
"""Seconds without an answer after which `force` takes a daemon for hung."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Remains:
    """What a mount left in its cache; None: nobody could tell."""

    files: int | None
    bytes: int | None
    cache_dirs: tuple[str, ...]


def unmount(
    mountpoint: str, drain_timeout: float | None, on_progress: OnProgress | None, *, force: bool
) -> Remains:
    """Drain and end the mount at `mountpoint` (as `kernelmount.resolve` has it).

    Returns when neither mount nor processes are left. `force` does not mind open files, nor a
    daemon that does not answer. Raises MountError when there is no mount, or it is in use.
    """
    entry = kernelmount.mount_at(mountpoint)
    mounted = entry is not None and entry.fstype == kernelmount.FSTYPE
    run = runfiles.read(mountpoint)
    if not mounted and not _served(mountpoint):
        claim.forget(mountpoint)
        raise MountError(f"{mountpoint} is no cachefs mountpoint", hint="`cachefs status` has them")
    if mounted and not force:
        _refuse_if_busy(mountpoint)
    remains = Remains(None, None, run.cache_dirs if run else ())
    if run is not None and _served(mountpoint):
        daemon = Target(mountpoint, mountpoint, run)
        if not _answers(daemon, force=force):
            _kill(mountpoint)
        else:
            remains = _drain(daemon, drain_timeout, on_progress)
    _wait_until_gone(mountpoint)
    return remains


def _served(mountpoint: str) -> bool:
    return claim.is_supervised(mountpoint) or claim.daemon_of(mountpoint) != 0


def _answers(daemon: Target, *, force: bool) -> bool:
    """Asked before it is told to end: a daemon that hangs must not find that when it wakes up.

    Raises MountError for one that does not answer, unless by `force` it may be killed.
    """
    try:
        target.ask(daemon, "status", {}, patience=PATIENCE if force else target.QUERY_TIMEOUT)
    except MountError:
        if not force:
            raise
        return False
    except ControlError:
        return True
    return True


def _drain(daemon: Target, timeout: float | None, on_progress: OnProgress | None) -> Remains:
    args = {} if timeout is None else {"drain_timeout": timeout}
    left = target.ask(daemon, "unmount", args, on_progress=on_progress, patience=None)
    return Remains(left["files_left"], left["bytes_left"], daemon.run.cache_dirs)


def _refuse_if_busy(mountpoint: str) -> None:
    if kernelmount.is_busy(mountpoint):
        users = list(_users(mountpoint))
        who = f" by {', '.join(users[:_SHOWN])}" if users else ""
        more = f" and {len(users) - _SHOWN} more" if len(users) > _SHOWN else ""
        raise MountError(
            f"{mountpoint} is in use{who}{more}",
            hint="close what is open there, or unmount it under its users with --force",
        )


def _users(mountpoint: str) -> Iterator[str]:
    """Processes with files, a working directory or a mapping in the mount, as `name (pid)`."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _uses(process, mountpoint):
            with contextlib.suppress(OSError):
                yield f"{(process / 'comm').read_text().strip()} ({process.name})"


def _uses(process: Path, mountpoint: str) -> bool:
    with contextlib.suppress(OSError):
        for link in (process / "cwd", process / "root", *(process / "fd").iterdir()):
            with contextlib.suppress(OSError):
                if _is_below(os.readlink(link), mountpoint):
                    return True
        maps = (process / "maps").read_text(errors="surrogateescape")
        return any(_is_below(line[line.find("/") :], mountpoint) for line in maps.splitlines())
    return False


def _is_below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(f"{mountpoint}/")


def _kill(mountpoint: str) -> None:
    """End a daemon that does not answer. Its supervisor, if any, must not start another."""
    run = runfiles.read(mountpoint)
    if run is not None and claim.is_supervised(mountpoint):
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.supervisor_pid, signal.SIGTERM)
    daemon = claim.daemon_of(mountpoint)
    if daemon:
        os.kill(daemon, signal.SIGKILL)


def _wait_until_gone(mountpoint: str) -> None:
    """Until no process of the mount is left; then nothing may be left of the mount either."""
    deadline = time.monotonic() + GONE_TIMEOUT
    while _served(mountpoint):
        if time.monotonic() >= deadline:
            pid = claim.daemon_of(mountpoint)
            what = f"{mountpoint}: its processes do not end (daemon: {pid or 'none'})"
            raise MountError(what, hint="end it with --force")
        time.sleep(0.02)
    claim.forget(mountpoint)
