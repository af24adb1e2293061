"""The disk under the cache takes nothing for a while, as when a snapshot of it is made."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_readonly_disk import Ext4
from tests.support import postmortem
from tests.support.actor import pattern
from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

OPTIONS = {"cache.size": "64MiB", "cache.meta_reserve": "1MiB"}
AT_REST = 2.0
SPARE_TIME = 2.5
"""Seconds after which a quiet mount has put away what it had kept ready."""


@pytest.fixture
def disk(tmp_path: Path, after_mounts: ExitStack) -> Ext4:
    made = Ext4(tmp_path)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", made.top], check=True))
    return made


@contextmanager
def frozen(disk: Ext4) -> Iterator[None]:
    subprocess.run(["fsfreeze", "--freeze", disk.top], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk.top], check=True)


def at_rest(mount: Mount) -> bool:
    """Whether nothing has been recorded for a while: what was going on is over."""
    changed = max(each.stat().st_mtime for each in (mount.cache_dirs[0] / "meta").iterdir())
    return time.time() - changed > AT_REST


def _look(top: str) -> list[Any]:
    with open(f"{top}/f0", "rb") as file:
        return [os.stat(f"{top}/f1").st_size, sorted(os.listdir(top)), file.read()]


def test_looking_goes_on(mounted: MountFactory, dir_store: Any, disk: Ext4, client: Client) -> None:
    """Names, sizes, bytes that are in memory, and status; a writer holds nobody up."""
    mount = mounted(dir_store, cache_dirs=[disk.top / "cache"], options=OPTIONS)
    names = sorted(f"f{number}" for number in range(20))
    for name in names:
        (mount.path / name).write_bytes(b"x" * 5000)
    mount.wait()
    names.append("written")
    actor = client.actor(mount.path)
    actor("open", 0, "written", "WRONLY|CREAT")
    actor("write", 0, 1, 100_000)
    poll(lambda: at_rest(mount))
    with frozen(disk):
        actor.send("write", 0, 2, 100_000)
        time.sleep(SPARE_TIME)
        for _ in range(2):
            assert client.run(_look, mount.path, timeout=10) == [5000, names, b"x" * 5000]
            assert mount.status()["dirty_files"] == 1
            time.sleep(0.5)
    assert actor.receive() == {"ok": 100_000}
    actor("close", 0)
    (mount.path / "late").write_bytes(b"after all")
    mount.wait()
    assert dir_store.get("written") == pattern(1, 100_000) + pattern(2, 100_000)
    assert dir_store.get("late") == b"after all"


def _change(top: str) -> list[Any]:
    os.mkdir(f"{top}/made")
    os.rename(f"{top}/f0", f"{top}/made/moved")
    os.chmod(f"{top}/f1", 0o600)
    os.unlink(f"{top}/f2")
    os.symlink("made", f"{top}/link")
    os.setxattr(f"{top}/f3", "user.note", b"x")
    os.utime(f"{top}/f3", ns=(5, 7))
    mode = os.stat(f"{top}/f1").st_mode & 0o777
    return [mode, os.stat(f"{top}/f3").st_mtime_ns, sorted(os.listdir(top))]


def _names(top: str) -> list[str]:
    return os.listdir(top)


def test_changing_goes_on(
    mounted: MountFactory, dir_store: Any, disk: Ext4, client: Client
) -> None:
    """Names and attributes: what is changed waits in memory, and is told."""
    mount = mounted(dir_store, cache_dirs=[disk.top / "cache"], options=OPTIONS)
    names = sorted(f"f{number}" for number in range(20))
    for name in names:
        (mount.path / name).write_bytes(b"x" * 5000)
    mount.wait()
    poll(lambda: at_rest(mount))
    with frozen(disk):
        found = client.run(_change, mount.path, timeout=10)
        assert found == [0o600, 7, sorted({*names, "link", "made"} - {"f0", "f2"})]
        told = mount.status()["cache"]["metadata"]
        assert told["deferred"] and told["pending_bytes"] > 0 and told["lag_seconds"] > 0
        assert client.run(_names, mount.path / "made", timeout=10) == ["moved"]
    mount.wait()
    assert mount.status()["cache"]["metadata"]["pending_bytes"] == 0
    assert dir_store.get("made/moved") == b"x" * 5000


# ---- a stall that begins at any instant ---------------------------------------------------------

LOAD = Path(__file__).parents[1] / "lanes/load.py"
ROOMY = {"cache.size": "100MiB", "cache.meta_reserve": "1MiB"}
ANSWER = 10.0
"""Seconds that the disk stays frozen without an answer: one that needs it never comes."""
_WATCH = """
import os, sys
for line in sys.stdin:
    number = int(line)
    os.stat(f"{sys.argv[1]}/still/f{number % 5}")
    os.listdir(f"{sys.argv[1]}/still")
    print(number, flush=True)
"""


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[str]]]:
    """What a test has started; ended with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()


def _start(programs: list[subprocess.Popen[str]], *words: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-S", *map(str, words)]
    programs.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1))
    return programs[-1]


def _answers(mount: Mount, watcher: subprocess.Popen[str], number: int) -> None:
    """Names that are known, and status: all of it from other processes."""
    assert watcher.stdin is not None
    assert watcher.stdout is not None
    watcher.stdin.write(f"{number}\n")
    heard = select.select([watcher.stdout], [], [], ANSWER)[0]
    assert heard, f"no answer while the disk is stalled\n{postmortem.report(mount)}"
    assert watcher.stdout.readline() == f"{number}\n"
    mount.ask("status", timeout=ANSWER)


def _stall_at_random(
    mount: Mount, disk: Ext4, local: Path, programs: list[Any], stalls: int, longest: float
) -> None:
    seed = int(os.environ.get("CACHEFS_TEST_SEED", random.randrange(10**9)))
    print(f"CACHEFS_TEST_SEED={seed}")
    rng = random.Random(seed)
    (mount.path / "still").mkdir()
    for number in range(5):
        (mount.path / f"still/f{number}").write_bytes(b"x" * 5000)
    watcher = _start(programs, "-c", _WATCH, mount.path)
    loads = []
    for number in range(2):
        sides = [top / f"w{number}" for top in (mount.path, local)]
        for side in sides:
            side.mkdir(parents=True)
        loads.append(_start(programs, LOAD, *sides, seed + number))
    for number in range(stalls):
        time.sleep(rng.uniform(0.1, 0.8))
        with frozen(disk):
            for _ in range(3):
                _answers(mount, watcher, number)
                time.sleep(rng.uniform(0.0, longest))
    for load in loads:
        told = json.loads(load.communicate(timeout=60)[0])
        print({kind: round(seconds, 2) for kind, seconds in told["longest"].items()})
        assert told["differences"] == []
    mount.wait()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_at_any_instant(
    mounted: MountFactory, dir_store: Any, disk: Ext4, programs: list[Any], tmp_path: Path
) -> None:
    """Whatever the daemon is doing when the disk stalls, those who do not need it go on."""
    mount = mounted(dir_store, cache_dirs=[disk.top / "cache"], options=ROOMY)
    _stall_at_random(mount, disk, tmp_path / "local", programs, 8, 0.2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_at_many_instants(
    mounted: MountFactory, dir_store: Any, disk: Ext4, programs: list[Any], tmp_path: Path
) -> None:
    mount = mounted(dir_store, cache_dirs=[disk.top / "cache"], options=ROOMY)
    _stall_at_random(mount, disk, tmp_path / "local", programs, 200, 1.5)
