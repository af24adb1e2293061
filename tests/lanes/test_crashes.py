"""A request that a daemon cannot stand: its caller gets EIO, nobody else notices."""

from __future__ import annotations

import errno
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cachefs.fuse import failpoints as failpoints_of_the_product
from tests.support.client import Client
from tests.support.failpoints import Failpoints
from tests.support.mounts import MountFactory

CRASHED = ("ended unexpectedly", "a request was given up on", "Fatal Python error: Aborted")
BUG = ("request failed", "a failpoint was reached")


def _save_until(directory: str, stop: str) -> int:
    """Save files until told to stop; returns how many. Any error ends the program."""
    number = 0
    while not os.path.exists(stop):
        path = Path(directory, f"f{number}")
        path.with_suffix(".part").write_bytes(b"%d" % number * 2000)
        path.with_suffix(".part").rename(path)
        number += 1
        time.sleep(0.01)
    return number


def _calls(path: str) -> dict[str, Any]:
    """Each changes a file of its own, as handlers are named."""
    return {
        "create": lambda: os.close(os.open(f"{path}/create", os.O_CREAT | os.O_WRONLY)),
        "unlink": lambda: os.unlink(f"{path}/unlink"),
        "rename": lambda: os.rename(f"{path}/rename", f"{path}/renamed"),
        "mkdir": lambda: os.mkdir(f"{path}/mkdir"),
    }


def _call(path: str, op: str) -> None:
    _calls(path)[op]()


@pytest.fixture
def failpoints(ram_dir: Path) -> Failpoints:
    return Failpoints(ram_dir / "failpoints")


def test_a_bug_in_a_handler(
    mounted: MountFactory, dir_store: Any, client: Client, failpoints: Failpoints
) -> None:
    """EIO, one entry in the log, and the same daemon goes on."""
    mount = mounted(dir_store, env=failpoints.env, allow=BUG)
    actor = client.actor(mount.path)
    actor("open", 0, "open", "WRONLY|CREAT")
    calls = {
        "create": ("open", 1, "new", "WRONLY|CREAT"),
        "mkdir": ("mkdir", "d"),
        "setattr": ("ftruncate", 0, 5),
    }
    for op, call in calls.items():
        failpoints.arm("raise", "begun", op)
        assert actor.ask(*call)["errno"] == "EIO"
        entries = [line for line in mount.log.splitlines() if "request failed" in line]
        assert sum(f"op={op}" in line for line in entries) == 1, entries
    failpoints.disarm()
    actor("write", 0, 1, 5000)
    actor("close", 0)
    actor("mkdir", "d")
    assert mount.status()["takeovers"] == 0
    with urllib.request.urlopen(f"http://{mount.status()['metrics']}/metrics", timeout=5) as page:
        assert b"\ncachefs_fuse_bugs_total 3.0\n" in page.read()
    mount.wait()
    assert dir_store.keys() == ["open"]


@pytest.mark.parametrize(
    ("op", "point"),
    [("create", "begun"), ("create", "applied"), ("rename", "applied"), ("unlink", "begun")],
)
def test_a_request_that_kills(
    mounted: MountFactory, dir_store: Any, client: Client, failpoints: Failpoints, op: str,
    point: str,
) -> None:  # fmt: skip
    """After two daemons have died of it. A saving program beside it sees no failed call."""
    mount = mounted(dir_store, env=failpoints.env, allow=CRASHED)
    for name in ("unlink", "rename"):
        (mount.path / name).write_bytes(b"x" * 3000)
    (mount.path / "saves").mkdir()
    stop = mount.path.parent / f"{mount.path.name}.stop"
    saver = client.start(_save_until, mount.path / "saves", stop)
    failpoints.arm("abort", point, op, target=op)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            client.run(_call, mount.path, op, helpers=[_calls], timeout=40)
        failpoints.disarm()
        mount.took_over(0)
        assert mount.status()["takeovers"] == 2
        _gone_on(mount.path, op, point)
        client.run(_call, mount.path, "mkdir", helpers=[_calls])
    finally:
        stop.touch()
        count = saver.result(40)
        stop.unlink()
    assert count > 0
    mount.wait()
    keys = dir_store.keys()
    assert len([key for key in keys if key.startswith("saves/")]) == count


def _gone_on(mounted: Path, op: str, point: str) -> None:
    """What was given up on is there whole or not at all, and can be done again."""
    names = set(os.listdir(mounted)) - {"saves"}
    done = {"create": {"unlink", "rename"}, "rename": {"unlink", "renamed"}, "unlink": {"rename"}}
    assert names == (done[op] if point == "applied" else {"unlink", "rename"})
    if point == "begun" or op == "create":
        _call(str(mounted), op)


def test_nothing_is_armed_unless_asked_for() -> None:
    """Not even a wrapper stands between a request and its handler."""

    async def handler() -> None:
        """Does nothing."""

    assert failpoints_of_the_product.instrumented(handler) is handler
