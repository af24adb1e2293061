"""`cachefs upgrade`: another daemon for the same mount."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from cachefs.cli import claim, target
from cachefs.errors import MountError, UsageError
from cachefs.observe import runfiles

PATIENCE = 120.0
"""Seconds until the new daemon must serve."""


def upgrade(mountpoint: Annotated[str, typer.Argument(help="Where it is mounted.")]) -> None:
    """Let a new daemon, of the code that is installed now, take a mount over.

    Programs that use the mount notice nothing but a short pause. Code that could not take it over
    is refused before anything has changed.
    """
    found = target.find(mountpoint)
    if not found.is_mount:
        raise UsageError(f"{mountpoint} is inside of a mount, not a mountpoint")
    _require_supervisor(found)
    target.ask(found, "upgrade", {}, patience=PATIENCE)
    new = _successor(found)
    print(f"{found.mountpoint}: pid {new.run.pid} took over from pid {found.run.pid}")


def _require_supervisor(found: target.Target) -> None:
    if not claim.is_supervised(found.mountpoint):
        hint = f"`cachefs mount` with the same store and cache replaces it: {found.mountpoint}"
        raise MountError("its supervisor is gone, so nobody would start the new daemon", hint=hint)


def _successor(old: target.Target) -> target.Target:
    """The mount with its next daemon, as soon as that answers."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        run = runfiles.read(old.mountpoint)
        if run is None:
            break
        if run.pid != old.run.pid:
            new = target.Target(old.mountpoint, old.path, run)
            left = max(1.0, deadline - time.monotonic())
            target.ask(new, "status", {}, patience=left)
            return new
        _require_supervisor(old)
        time.sleep(0.02)
    see = f"see {old.run.log}" if old.run.log else ""
    raise MountError(f"{old.mountpoint}: no new daemon within {PATIENCE:g} s", hint=see)
