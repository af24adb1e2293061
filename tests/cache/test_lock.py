"""One owner per cache device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.errors import CacheBusy

OWNER = """
import sys, time
from cachefs.cache.device import CacheDevice
device = CacheDevice(0, sys.argv[1])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(place: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(place / "cache")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_owner_learns_the_pid_of_the_first(
    owner: subprocess.Popen[str], place: Path
) -> None:
    started = time.monotonic()
    with pytest.raises(CacheBusy, match=f"pid {owner.pid}$") as caught:
        CacheDevice(0, place / "cache")
    assert time.monotonic() - started < 0.5
    assert caught.value.hint
    end(owner)


def test_the_lock_ends_with_the_process(owner: subprocess.Popen[str], place: Path) -> None:
    end(owner)
    device = CacheDevice(0, place / "cache")
    assert (place / "cache" / "LOCK").read_text().split()[0] == str(os.getpid())
    device.close()


def test_the_same_process_is_refused_too_until_it_closes(place: Path) -> None:
    device = CacheDevice(0, place / "cache")
    with pytest.raises(CacheBusy):
        CacheDevice(1, place / "cache")
    device.close()
    device.close()
    CacheDevice(1, place / "cache").close()


def test_a_child_of_a_dead_owner_is_waited_for(place: Path) -> None:
    """The lock may live for a moment in a child that the dead owner had just forked."""
    (place / "cache").mkdir()
    script = """
import fcntl, os, socket, sys, time
fd = os.open(sys.argv[1] + "/LOCK", os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
os.write(fd, f"{os.getpid()}\\n{socket.gethostname()}\\n".encode())
if os.fork() == 0:
    os.close(1)
    time.sleep(0.4)
    os._exit(0)
os._exit(0)
"""
    subprocess.run(
        [sys.executable, "-c", script, str(place / "cache")], check=True, stdout=subprocess.PIPE
    )
    CacheDevice(0, place / "cache").close()


def test_an_owner_on_another_host_is_named(place: Path) -> None:
    device = CacheDevice(0, place / "cache")
    (place / "cache" / "LOCK").write_text("99999999\nnode-b\n")
    with pytest.raises(CacheBusy, match="pid 99999999 on node-b"):
        CacheDevice(0, place / "cache")
    device.close()
