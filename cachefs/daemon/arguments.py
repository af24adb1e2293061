"""What the supervisor hands to a daemon, and what a daemon's exit code says."""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from cachefs.config import Settings

CLEAN, FAILED, REMAINS, UPGRADE = 0, 1, 3, 75


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line, read."""

    settings: Settings
    fuse_fd: int
    state_fd: int | None
    ready_fd: int | None
    mountpoint: str
    standby_fd: int | None = None
    rehearsal: bool = False
    """Only find out whether a takeover would do; the state is a copy, there is no connection."""
    settings_file: Path = Path()


def parse(argv: list[str]) -> Arguments:
    """Read the command line. Raises ConfigError for settings that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m cachefs.daemon")
    parser.add_argument("settings", type=Path)
    parser.add_argument("--fuse-fd", type=int, default=-1)
    parser.add_argument("--state-fd", type=int)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--standby-fd", type=int, help="wait there for the three others")
    parser.add_argument("--mountpoint", required=True)
    parser.add_argument("--rehearsal", action="store_true", help="say whether a takeover would do")
    known = parser.parse_args(argv)
    settings = Settings.from_json(known.settings.read_bytes())
    return Arguments(
        settings, known.fuse_fd, known.state_fd, known.ready_fd, known.mountpoint,
        known.standby_fd, known.rehearsal, known.settings,
    )  # fmt: skip


def await_turn(arguments: Arguments) -> Arguments | None:
    """In reserve: wait for the descriptors, which come when the daemon before us has died.

    None when the supervisor has ended or needs no daemon any more.
    """
    assert arguments.standby_fd is not None
    with socket.socket(fileno=arguments.standby_fd) as line:
        _, fds, _, _ = socket.recv_fds(line, 16, 3)
    if len(fds) != 3:
        return None
    fuse_fd, state_fd, ready_fd = fds
    return replace(arguments, fuse_fd=fuse_fd, state_fd=state_fd, ready_fd=ready_fd)
