"""Bytes that are being uploaded are never spoiled, whatever happens to their file meanwhile.

Each file's first version is held up in the middle of its upload, and only then becomes the second
one, in every way there is. The bucket may show the one or the other, whole, and ends with the
second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.observer import Observer, name_of
from tests.lanes.place import in_lane
from tests.support.actor import pattern
from tests.support.client import Actor, Client
from tests.support.faults import Fault, Rule
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZE = 6 * MIB
"""Two parts."""
MULTIPART = {"flush.part_size": "5MiB", "flush.single_put_max": "5MiB"}
FIRST, SECOND = pattern(1, SIZE), pattern(2, SIZE)
SLOTS = {"reader": 1, "editor": 2, "writer": 3}


@contextlib.contextmanager
def held_at_a_part(mount: Mount, faults: Any, files: int) -> Iterator[None]:
    """Once parts of so many files are on their way their senders stand still."""
    poll(lambda: faults.used()[0] >= files, what="parts on their way")
    movers = list(_movers(mount.daemon_pid))
    assert movers
    for pid in movers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        faults.clear()
        for pid in movers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _movers(daemon: int) -> Iterator[int]:
    for task in Path(f"/proc/{daemon}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"cachefs.flush.mover" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid)


def slow_parts(faults: Any) -> None:
    """Parts take until they are caught, also on a machine that is busy."""
    faults.set(Rule(Fault.LATENCY, ops=("upload_part",), seconds=20.0))


def rewrite(actor: Actor, name: str) -> bytes:
    """Opened with O_TRUNC, all bytes new."""
    actor("open", SLOTS["writer"], name, "WRONLY|TRUNC")
    actor("write", SLOTS["writer"], 2, SIZE)
    actor("close", SLOTS["writer"])
    return SECOND


def cut(actor: Actor, name: str) -> bytes:
    """Truncated by path."""
    actor("truncate", name, SIZE - MIB)
    return FIRST[: SIZE - MIB]


def empty(actor: Actor, name: str) -> bytes:
    """Truncated by path, then written."""
    actor("truncate", name, 0)
    actor("open", SLOTS["writer"], name, "WRONLY|APPEND")
    actor("write", SLOTS["writer"], 2, SIZE)
    actor("close", SLOTS["writer"])
    return SECOND


def edit(actor: Actor, name: str) -> bytes:
    """Written to in both parts."""
    actor("open", SLOTS["writer"], name, "RDWR")
    actor("pwrite", SLOTS["writer"], 3, 10_000, 1000)
    actor("pwrite", SLOTS["writer"], 4, 10_000, SIZE - 20_000)
    actor("close", SLOTS["writer"])
    second = bytearray(FIRST)
    second[1000:11_000] = pattern(3, 10_000)
    second[SIZE - 20_000 : SIZE - 10_000] = pattern(4, 10_000)
    return bytes(second)


def append(actor: Actor, name: str) -> bytes:
    actor("open", SLOTS["writer"], name, "WRONLY|APPEND")
    actor("write", SLOTS["writer"], 5, 100_000)
    actor("close", SLOTS["writer"])
    return FIRST + pattern(5, 100_000)


def store_mapped(actor: Actor, name: str) -> bytes:
    """Through a shared mapping."""
    actor("open", SLOTS["writer"], name, "RDWR")
    actor("mmap_write", SLOTS["writer"], 6, 10_000, 5 * MIB - 5000)
    actor("close", SLOTS["writer"])
    at = 5 * MIB - 5000
    return FIRST[:at] + pattern(6, 10_000) + FIRST[at + 10_000 :]


def replace(actor: Actor, name: str) -> bytes:
    """Another file renamed over it."""
    actor("open", SLOTS["writer"], f"{name}-new", "WRONLY|CREAT")
    actor("write", SLOTS["writer"], 2, SIZE)
    actor("close", SLOTS["writer"])
    actor("rename", f"{name}-new", name)
    return SECOND


def recreate(actor: Actor, name: str) -> bytes:
    """Removed, made anew."""
    actor("unlink", name)
    actor("open", SLOTS["writer"], name, "WRONLY|CREAT")
    actor("write", SLOTS["writer"], 2, SIZE)
    actor("close", SLOTS["writer"])
    return SECOND


WAYS = (rewrite, cut, empty, edit, append, store_mapped, replace, recreate)


def _save(actor: Actor, name: str) -> None:
    actor("open", 0, name, "WRONLY|CREAT")
    actor("write", 0, 1, SIZE)
    actor("close", 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("lane", "cache", "held"),
    [
        in_lane("tracked", "ram", "none"),
        in_lane("tracked", "disk", "editor"),
        in_lane("passthrough", "ram", "reader"),
        in_lane("passthrough", "disk", "none"),
        in_lane("passthrough", "disk", "reader"),
    ],
    indirect=["lane"],
)
def test_versions_follow_each_other(
    mounted: MountFactory, bucket: Any, faults: Any, client: Client, cache: str, held: str
) -> None:
    """`held`: what keeps the inode pinned: nothing, a reader (passthrough), an editor (tracked)."""
    mount = mounted(bucket, endpoint=faults.endpoint, cache=cache, options=MULTIPART)
    slow_parts(faults)
    actors = {way.__name__: client.actor(mount.path) for way in WAYS}
    for name, actor in actors.items():
        _save(actor, name)
        if held != "none":
            actor("open", SLOTS[held], name, "RDONLY" if held == "reader" else "RDWR")
            expected = "tracked" if held == "editor" else mount.lane
            assert mount.xattr("lane", name) == expected
    with Observer(bucket, list(actors)) as observer:
        with held_at_a_part(mount, faults, len(WAYS)):
            second = {way.__name__: way(actors[way.__name__], way.__name__) for way in WAYS}
            for name, body in second.items():
                assert (mount.path / name).read_bytes() == body, name
        for actor in actors.values():
            actor.close()
        mount.wait(timeout=60)
    for name, body in second.items():
        allowed = {"", name_of(FIRST), name_of(body)}
        if name == empty.__name__:  # what it was between its two steps, if they were slow
            allowed.add(name_of(b""))
        assert set(observer.seen[name]) <= allowed, (name, observer.seen[name])
        assert bucket.get(name) == body, name


@pytest.mark.parametrize(
    ("lane", "held", "killed"),
    [
        in_lane("tracked", "editor", True),
        in_lane("passthrough", "reader", False),
        in_lane("passthrough", "reader", True),
    ],
    indirect=["lane"],
)
def test_beyond_the_preserve_limit(
    mounted: MountFactory, bucket: Any, faults: Any, client: Client, held: str, killed: bool
) -> None:
    """No copy is made: only the second version arrives, and who waited for the first waits for
    that; also if the daemon is killed while it is written."""
    mount = mounted(
        bucket,
        endpoint=faults.endpoint,
        options={**MULTIPART, "cache.preserve_limit": "1KiB"},
        allow=("ended unexpectedly",),
    )
    slow_parts(faults)
    actor = client.actor(mount.path)
    _save(actor, "f")
    actor("open", SLOTS[held], "f", "RDONLY" if held == "reader" else "RDWR")
    with Observer(bucket, ["f"]) as observer, ThreadPoolExecutor() as pool:
        with held_at_a_part(mount, faults, 1):
            waiter = pool.submit(mount.wait, mount.path / "f")
            time.sleep(0.3)
            actor("open", SLOTS["writer"], "f", "RDWR")
            actor("pwrite", SLOTS["writer"], 2, SIZE, 0)
        if killed:
            mount.took_over(mount.kill_daemon())
        time.sleep(1.0)  # by now the first version would have arrived
        assert mount.xattr("state", "f") == "open"
        assert not bucket.exists("f")
        assert waiter.done() == killed
        actor("pwrite", SLOTS["writer"], 3, 5000, 100)
        actor.close()
        if killed:
            assert waiter.exception(5) is not None  # its daemon is gone
            mount.wait()
        else:
            waiter.result(30)
    second = SECOND[:100] + pattern(3, 5000) + SECOND[5100:]
    assert bucket.get("f") == second
    assert set(observer.seen["f"]) <= {"", name_of(second)}
