"""Who is killed while the store keeps it waiting goes away, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.support import fusectl
from tests.support.client import Client
from tests.support.mounts import MountFactory, poll

pytestmark = pytest.mark.either_lane

STORE_TIMEOUT = "300s"
GENEROUS = 50.0
"""Seconds; far less than the store's time-out."""


def _look_at(path: str) -> int:
    return os.stat(path).st_size


def _list(path: str) -> list[str]:
    return os.listdir(path)


def _append(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND))


def test_callers_that_are_killed_go_away(
    mounted: MountFactory, bucket: Any, link: Any, client: Client
) -> None:
    """By what they were at: a name in a directory that was never listed, one that is listed and not
    yet known, a whole directory, a file that is to be written to. After that others can look."""
    for name in ("edited", "new/far", "listed/far"):
        bucket.put(name, b"x" * 100)
    mount = mounted(
        bucket,
        endpoint=link.endpoint,
        options={"store.read_timeout": STORE_TIMEOUT},
        allow=("store|reach",),
    )
    assert sorted(client.run(_list, mount.path)) == ["edited", "listed", "new"]
    assert client.run(_list, mount.path / "listed") == ["far"]
    assert client.run(_look_at, mount.path / "edited") == 100
    link.silent = True
    waiting = [
        client.start(_look_at, mount.path / "new" / "far"),
        client.start(_look_at, mount.path / "listed" / "far"),
        client.start(_list, mount.path / "new"),
        client.start(_append, mount.path / "edited"),
    ]
    poll(lambda: fusectl.waiting(mount.path) >= len(waiting), GENEROUS)
    for each in waiting:
        each.process.send_signal(signal.SIGKILL)
    for each in waiting:
        assert each.process.wait(GENEROUS) == -signal.SIGKILL
    poll(lambda: fusectl.waiting(mount.path) == 0, GENEROUS, what="their requests are answered")
    link.silent = False
    assert client.run(_list, mount.path / "new") == ["far"]
    for name in ("new/far", "listed/far", "edited"):
        assert client.run(_look_at, mount.path / name) == 100


def test_who_is_not_killed_waits_on(
    mounted: MountFactory, bucket: Any, link: Any, client: Client
) -> None:
    """Others who wait for the same get it, and a signal that is handled ends no waiting."""
    for name in ("new/far", "new/near"):
        bucket.put(name, b"x" * 100)
    mount = mounted(bucket, endpoint=link.endpoint, allow=("store|reach",))
    assert client.run(_list, mount.path) == ["new"]
    link.delay = 3.0
    killed = client.start(_look_at, mount.path / "new" / "far")
    other = client.start(_look_at_despite_signals, mount.path / "new" / "near")
    poll(lambda: fusectl.waiting(mount.path) >= 2, GENEROUS)
    other.process.send_signal(signal.SIGUSR1)
    killed.kill()
    link.delay = 0.0
    assert other.result(GENEROUS) == 100


def _look_at_despite_signals(path: str) -> int:
    import signal

    signal.signal(signal.SIGUSR1, lambda *_: None)
    return os.stat(path).st_size
