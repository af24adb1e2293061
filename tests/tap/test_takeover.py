"""Daemons killed on a live mount."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.tap.conftest import Toy
from tests.tap.test_lanes import wait_until

pytestmark = pytest.mark.slow

MakeToy = Callable[..., Toy]

STREAM = """
import os, sys, time
name, blocks, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fd = os.open(name, os.O_CREAT | os.O_RDWR); longest = 0.0
for i in range(blocks):
    begun = time.perf_counter()
    assert os.write(fd, bytes([i % 251]) * size) == size
    longest = max(longest, time.perf_counter() - begun); time.sleep(0.001)
os.fsync(fd); os.close(fd)
print(f"longest {longest * 1e3:.2f} ms")
"""
MAPPED = """
import mmap, os, sys, time
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR); os.ftruncate(fd, 1 << 22)
m = mmap.mmap(fd, 1 << 22); os.close(fd)
for i in range(int(sys.argv[2])):
    at = i * 4096 % (1 << 22); m[at:at + 4] = i.to_bytes(4, "big"); time.sleep(0.001)
    assert m[at:at + 4] == i.to_bytes(4, "big")
m.flush(); print("mapped")
"""
CHURN = """
import os, random, sys, time
mark, end = sys.argv[1], time.monotonic() + float(sys.argv[2]); n = 0; longest = 0
while time.monotonic() < end:
    begun = time.monotonic(); name = f"{mark}{n % 40}"; data = os.urandom(5000)
    with open(name, "wb") as f: f.write(data[:4000]); f.flush(); f.write(data[4000:])
    os.rename(name, name + ".r"); assert os.stat(name + ".r").st_size == 5000
    with open(name + ".r", "rb") as f: assert f.read() == data
    os.truncate(name + ".r", 100); os.mkdir(name + ".d"); os.rmdir(name + ".d")
    assert name + ".r" in os.listdir("."); os.unlink(name + ".r")
    n += 1; longest = max(longest, time.monotonic() - begun)
print(f"{n} cycles, longest {longest * 1e3:.0f} ms")
"""


def finish(process: Any, timeout: float = 60.0) -> str:
    out, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, out
    text: str = out
    return text


@pytest.mark.parametrize("place", ["/dev/shm", "/var/tmp"])
def test_streams_and_maps_do_not_notice_kills(toy: MakeToy, place: str) -> None:
    mount = toy(place)
    clients = [
        mount.client(STREAM, "stream", 1000, 65536),
        mount.client(STREAM, "t-stream", 1000, 65536),
        mount.client(MAPPED, "mapped", 1000),
        mount.client(MAPPED, "t-mapped", 1000),
    ]
    for _ in range(3):
        time.sleep(0.3)
        mount.kill()
    outs = [finish(client) for client in clients]
    for name in ("stream", "t-stream"):
        data = (mount.source / name).read_bytes()
        assert data == b"".join(bytes([i % 251]) * 65536 for i in range(1000))
    print(outs)
    longest = re.search(r"longest ([\d.]+) ms", outs[0])
    assert longest and float(longest[1]) < 100, outs[0]
    wait_until(lambda: mount.report()["backings"] == {})


@pytest.mark.parametrize("by_hook", [False, True])
def test_kills_under_churn_leave_nothing_behind(toy: MakeToy, by_hook: bool) -> None:
    mount = toy(by_hook=by_hook)
    seed = random.Random(1)
    clients = [mount.client(CHURN, mark, 6) for mark in ("a", "t-b", "c")]
    kills, end = 0, time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(seed.uniform(0.0, 0.3))
        mount.kill()
        kills += 1
    outs = [finish(client) for client in clients]
    print(f"{kills} kills: {outs}")
    report = mount.report()
    assert report["takeover"] == [True, True]
    assert report["info"]["takeovers"] == kills
    wait_until(lambda: mount.report()["backings"] == {} and mount.report()["handles"] == [])
    assert mount.report()["poisoned"] == []
    assert os.listdir(mount.source) == []


def test_a_request_in_flight_is_answered_by_the_next_daemon(toy: MakeToy) -> None:
    mount = toy(sleep_on="slow", sleep=600)
    client = mount.client("open('slow', 'w').write('done')")
    wait_until(lambda: any(r[0] == "CREATE" for r in mount.report()["inflight"]))
    mount.set_options()
    mount.kill()
    finish(client, 10)
    assert (mount.source / "slow").read_text() == "done"


def test_requests_come_again_in_their_first_order(toy: MakeToy) -> None:
    """The kernel sends them in the order of a hash; 40 stuck creates would show it."""
    mount = toy(sleep_on="*", sleep=600)
    clients = []
    for number in range(40):
        clients.append(stuck_create(mount, f"n{number:02}"))
        wait_until(lambda n=number: created(mount) == n + 1, 20)  # type: ignore[misc]
    mount.set_options(log_creates=True)
    mount.kill()
    for client in clients:
        finish(client, 10)
    seen = re.findall(r"create (n\d+)", mount.log.read_text())
    assert seen == [f"n{number:02}" for number in range(40)]


def stuck_create(mount: Toy, name: str) -> Any:
    """Each in a directory of its own: within one, the kernel lets one create through at a time."""
    (mount.mnt / f"{name}.d").mkdir()
    return mount.client("import sys; open(sys.argv[1], 'w')", f"{name}.d/{name}")


def created(mount: Toy) -> int:
    return sum(request[0] == "CREATE" for request in mount.report()["inflight"])


def test_handles_and_ids_survive(toy: MakeToy) -> None:
    mount = toy()
    kept = os.open(mount.mnt / "kept", os.O_CREAT | os.O_RDWR)
    tracked = os.open(mount.mnt / "t-kept", os.O_CREAT | os.O_RDWR)
    closing = mount.client("import os; f = os.open('c', 66); input(); os.close(f)")
    wait_until(lambda: len(mount.report()["backings"]) == 2)
    directory = os.open(mount.mnt, os.O_RDONLY)
    before = mount.report()
    os.kill(mount.pid, signal.SIGSTOP)
    assert closing.stdin
    closing.stdin.write("\n")
    closing.stdin.flush()
    time.sleep(0.2)  # it closes now, and the daemon dies before it sees that
    mount.kill()
    finish(closing, 10)
    wait_until(lambda: len(mount.report()["backings"]) == 1)
    after = mount.report()
    inode = str(os.fstat(kept).st_ino)
    assert after["backings"][inode] == before["backings"][inode]
    assert {h[0] for h in after["handles"]} < {h[0] for h in before["handles"]}
    os.write(kept, b"after")
    os.write(tracked, b"after")
    again = os.open(mount.mnt / "kept", os.O_RDONLY)  # another id would be EIO
    assert os.read(again, 10) == b"after"
    for fd in (kept, tracked, again, directory):
        os.close(fd)
    wait_until(lambda: mount.report()["backings"] == {} and mount.report()["handles"] == [])


def test_a_request_that_kills_is_given_up_on(toy: MakeToy) -> None:
    """Its caller gets EIO, callers beside it notice nothing, the next daemon is told its name."""
    mount = toy(crash_on="poison", sleep_on="slow", sleep=0.5)
    clients = [mount.client(CHURN, "a", 4), mount.client("open('slow', 'w').write('done')")]
    time.sleep(0.3)
    with pytest.raises(OSError, match="Input/output error"):
        (mount.mnt / "poison").stat()
    mount.pid = mount.wait_for_daemon(mount.pid)
    for client in clients:
        finish(client, 20)
    assert mount.report()["poisoned"] == [["LOOKUP", "poison"]]
    assert mount.log.read_text().count("toy ended: -6") == 2
    assert mount.report()["handles"] == []


def test_five_kills_give_up_on_a_request_two_do_not(toy: MakeToy) -> None:
    mount = toy(sleep_on="slow", sleep=600)
    client = mount.client("open('slow', 'w')")
    wait_until(lambda: created(mount) == 1)
    for _ in range(4):
        mount.kill()
        wait_until(lambda: created(mount) == 1)
        assert mount.report()["poisoned"] == []
    mount.kill()
    out, _ = client.communicate(timeout=10)
    assert "Input/output error" in out
    assert mount.report()["poisoned"] == [["CREATE", "slow"]]


def test_suspects_do_not_hold_each_other_up(toy: MakeToy) -> None:
    """Ten stuck requests go to the next daemon within the isolation time, not one by one."""
    mount = toy(sleep_on="*", sleep=600)
    clients = [stuck_create(mount, f"n{i}") for i in range(10)]
    wait_until(lambda: created(mount) == 10)
    mount.set_options(sleep_on="*", sleep=1)
    mount.kill()
    begun = time.monotonic()
    for client in clients:
        finish(client, 10)
    assert time.monotonic() - begun < 4


def test_another_negotiation_is_refused(toy: MakeToy) -> None:
    mount = toy()
    mount.set_options(acl=True)
    os.kill(mount.pid, signal.SIGKILL)
    assert mount.supervisor.wait(20) == 1
    assert "takeover refused: this version would negotiate flags" in mount.log.read_text()


def test_no_takeover_when_it_is_off(toy: MakeToy) -> None:
    mount = toy(takeover=False)
    os.kill(mount.pid, signal.SIGKILL)
    assert mount.supervisor.wait(20) == 1
    assert not mount.mnt.is_mount()


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_pause_hands_over_without_sending_anything_twice(toy: MakeToy, by_hook: bool) -> None:
    mount = toy(by_hook=by_hook)
    client = mount.client(CHURN, "a", 3)
    for _ in range(3):
        time.sleep(0.3)
        old = mount.pid
        os.kill(old, signal.SIGUSR1)  # the toy pauses, waits until nothing is in flight, and dies
        mount.pid = mount.wait_for_daemon(old)
    finish(client, 20)
    assert mount.log.read_text().count("paused with 0 in flight") == 3
    assert mount.report()["info"]["takeovers"] == 3


def test_a_passthrough_stream_without_any_daemon(toy: MakeToy) -> None:
    mount = toy(delay=3.0)
    client = mount.client(STREAM, "stream", 1000, 65536)
    stream = mount.source / "stream"
    wait_until(lambda: stream.exists() and stream.stat().st_size > 0)
    os.kill(mount.pid, signal.SIGKILL)
    time.sleep(0.5)
    size = stream.stat().st_size
    time.sleep(0.5)
    assert stream.stat().st_size > size
    finish(client, 20)


def test_space_comes_back_after_kills(toy: MakeToy) -> None:
    """A backing id that nobody knows of would keep a deleted file's blocks."""
    mount = toy("/var/tmp")
    seed = random.Random(2)
    code = """
import os, sys
for i in range(100000):
    name = f"{sys.argv[1]}{i % 8}"
    fd = os.open(name, os.O_CREAT | os.O_RDWR); os.pwrite(fd, b"x" * 65536, 0); os.close(fd)
    os.unlink(name)
    if os.path.exists("../stop"): break
"""
    clients = [mount.client(code, mark) for mark in "abcd"]
    for _ in range(25):
        time.sleep(seed.uniform(0.0, 0.05))
        mount.kill()
    (mount.base / "stop").touch()
    for client in clients:
        finish(client, 20)
    wait_until(lambda: mount.report()["backings"] == {})
    assert os.getxattr(mount.mnt, "user.leaked") == b"0"
