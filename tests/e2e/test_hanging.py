"""A call that does not return: what can be found out about it from outside."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import fusectl, postmortem
from tests.support.client import Client
from tests.support.mounts import MountFactory, poll

pytestmark = pytest.mark.either_lane

READERS = 400


def _look_at(path: str) -> int:
    return os.stat(path).st_size


def test_who_waits_for_what_is_told(
    mounted: MountFactory, bucket: Any, link: Any, client: Client
) -> None:
    """Somebody waits for a silent store: the request, where it is in the kernel and which task of
    the daemon has it are told, and the daemon serves on."""
    bucket.put("far", b"x" * 100_000)
    mount = mounted(bucket, endpoint=link.endpoint, options={"store.read_timeout": "5s"})
    assert [entry.name for entry in mount.path.iterdir()] == ["far"]
    link.silent = True
    waiting = client.start(_look_at, mount.path / "far")
    told = poll(lambda: _if_hanging(postmortem.report(mount, waiting.pid)), 20)
    assert f"process {waiting.pid}" in told
    assert "request_wait_answer" in told, "the stack of who waits"
    assert "opcode 1 " in told, "the table of requests"
    assert "Current thread" in told, "the daemon's threads"
    assert mount.status()["dirty_files"] == 0
    waiting.kill()
    link.silent = False


def _read_all(paths: list[str]) -> None:
    """Reads each by a thread of its own; none returns as long as the store says nothing."""
    import pathlib
    import threading

    for path in paths:
        threading.Thread(target=pathlib.Path(path).read_bytes).start()


def test_many_who_wait_for_the_store_hold_up_nobody(
    mounted: MountFactory, bucket: Any, link: Any, client: Client
) -> None:
    """Hundreds of reads wait for a store that is silent: all else goes on."""
    names = [f"d/{number}" for number in range(READERS)]
    for name in names:
        bucket.put(name, b"x")
    mount = mounted(bucket, endpoint=link.endpoint, allow=(".",))
    looked = client.run(_sizes, str(mount.path / "d"))
    assert looked == [1] * READERS, "nobody has to wait for what is to be known of them"
    link.silent = True
    waiting = client.start(_read_all, [str(mount.path / name) for name in names])
    poll(lambda: fusectl.waiting(mount.path) >= READERS, 60)
    assert client.run(_save, str(mount.path / "shard.bin")) == 1000
    waiting.kill()
    link.silent = False


def _sizes(folder: str) -> list[int]:
    return [entry.stat().st_size for entry in os.scandir(folder)]


def _save(path: str) -> int:
    with open(path, "wb") as file:
        file.write(b"x" * 1000)
    return os.stat(path).st_size


def _if_hanging(told: str) -> str:
    """The report, once a task of the daemon's waits for the store."""
    return told if "Opcode.LOOKUP" in told and "know (remote.py" in told else ""
