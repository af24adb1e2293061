"""The supervisor, `mount`, `unmount` and `upgrade` with the daemon that users get."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cachefs.fuse import kernelmount
from cachefs.observe import runfiles
from cachefs.supervised import TapState
from tests.support.client import Client
from tests.support.mounts import CHECKOUT, Mount, MountFactory, ended, poll, run_file

pytestmark = [pytest.mark.real_starts, pytest.mark.slow]
KILLED = ("ended unexpectedly", "taken over", "takeover")
"""What a log says about a daemon's violent end."""


def stream(path: str, seconds: float) -> tuple[int, float]:
    """Write 64 KiB blocks; returns the size and the longest write in seconds."""
    longest = 0.0
    end = time.monotonic() + seconds
    with open(path, "wb", buffering=0) as file:
        while time.monotonic() < end:
            began = time.monotonic()
            assert file.write(bytes(65536)) == 65536
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.005)
        return file.tell(), longest


def save_many(directory: str, seconds: float) -> int:
    """Create, write, rename and remove files; returns how many are left.

    From inside the directory: by its path it would find what lies below a mount that ended.
    """
    end = time.monotonic() + seconds
    number = 0
    os.chdir(directory)
    try:
        while time.monotonic() < end:
            path = Path(f"f{number}.tmp")
            path.write_bytes(b"x" * 5000)
            path.rename(path.with_suffix(".bin"))
            if number % 3 == 2:
                Path(f"f{number - 1}.bin").unlink()
            number += 1
            time.sleep(0.01)
    finally:
        os.chdir("/")
    return number - number // 3


def save_when_possible(directory: str, stop: str) -> tuple[list[str], int]:
    """Save until told to stop: (what was saved without an error, how many saves failed)."""
    saved: list[str] = []
    failed = 0
    while not os.path.exists(stop):
        path = Path(directory, f"s{len(saved) + failed}")
        try:
            path.write_bytes(path.name.encode() * 100)
        except OSError:
            failed += 1
            time.sleep(0.005)
        else:
            saved.append(path.name)
    return saved, failed


def takes_over(mount: Mount) -> bool:
    _, state_fd = TapState.descriptors_of(mount.daemon_pid)
    flags = kernelmount.take_fd(mount.daemon_pid, state_fd)
    try:
        return bool(os.pread(flags, 12, 0)[8] & 1)
    finally:
        os.close(flags)


def family(pid: int) -> list[int]:
    """All descendants of a process, whose threads come and go."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            for child in (task / "children").read_text().split():
                found += [int(child), *family(int(child))]
    return found


def words_of(pid: int) -> list[bytes]:
    """The command line of a process; nothing once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


@pytest.fixture
def mount(dir_store: Any, mounted: MountFactory) -> Mount:
    """In each lane. The store is asked for first, so that it outlives the last drain."""
    made: Mount = mounted(dir_store, allow=KILLED)
    return made


def mount_again(mount: Mount) -> None:
    """`cachefs mount` over whatever is left, which the test itself must not touch."""
    done = mount.cli(*mount.command())
    assert done.returncode == 0, done.stderr
    mount.reread()


@pytest.mark.either_lane
def test_only_supervisor_and_daemon_hold_the_connection(mount: Mount) -> None:
    """A mover that kept it would keep a dead mount from ending."""
    holders = [
        pid
        for pid in (mount.supervisor_pid, mount.daemon_pid, *family(mount.daemon_pid))
        if any(os.readlink(fd) == "/dev/fuse" for fd in Path(f"/proc/{pid}/fd").iterdir())
    ]
    assert holders == [mount.supervisor_pid, mount.daemon_pid]


@pytest.mark.either_lane
def test_processes_end_with_the_mount(mount: Mount) -> None:
    everybody = [mount.supervisor_pid, *family(mount.supervisor_pid)]
    assert len(everybody) >= 3
    assert mount.unmount() == 0
    assert ended(everybody, 5)
    path = runfiles.run_path(str(mount.path))
    assert list(path.parent.glob(f"{path.stem}*")) == []


@pytest.mark.either_lane
def test_daemon_can_be_taken_over(mount: Mount) -> None:
    (mount.path / "f").write_bytes(b"x")
    assert takes_over(mount)


def test_kills_fail_no_call(mount: Mount, client: Client, dir_store: Any) -> None:
    writer = client.start(stream, str(mount.path / "stream.bin"), 6.0)
    (mount.path / "many").mkdir()
    saver = client.start(save_many, str(mount.path / "many"), 6.0)
    for _ in range(3):
        time.sleep(1.0)
        mount.took_over(mount.kill_daemon())
    size, longest = writer.result(40)
    count = saver.result(40)
    print(f"longest write {longest:.3f} s")
    assert mount.status()["takeovers"] == 3
    mount.wait()
    assert (mount.path / "stream.bin").stat().st_size == size
    assert len(dir_store.keys()) == count + 1


def in_reserve(mount: Mount) -> int:
    """The pid of the daemon that waits for its turn; 0 while there is none."""
    for pid in family(mount.supervisor_pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            asleep = "unix_stream" in Path(f"/proc/{pid}/wchan").read_text()
            if b"--standby-fd" in words and pid != mount.daemon_pid and asleep:
                return pid
    return 0


@pytest.mark.either_lane
def test_a_daemon_in_reserve_takes_over(mount: Mount, dir_store: Any) -> None:
    first = poll(lambda: in_reserve(mount), 60, what="a daemon in reserve")
    metrics = mount.status()["metrics"]
    mount.took_over(mount.kill_daemon())
    assert mount.daemon_pid == first
    (mount.path / "f").write_bytes(b"by the second")
    # The second goes on without a supervisor, and the mount that replaces that finds it.
    os.kill(mount.supervisor_pid, signal.SIGKILL)
    assert ended([mount.supervisor_pid], 5)
    mount_again(mount)
    mount.wait()
    assert dir_store.get("f") == b"by the second"
    second = poll(lambda: in_reserve(mount), 60, what="another daemon in reserve")
    os.kill(second, signal.SIGUSR1)  # asked too early: no reason to end
    assert in_reserve(mount) == second
    os.kill(second, signal.SIGKILL)
    mount.took_over(mount.kill_daemon())
    assert mount.daemon_pid != second
    assert mount.status()["metrics"] == metrics, "the same free port, whoever serves"
    assert (mount.path / "f").read_bytes() == b"by the second"


@pytest.mark.either_lane
def test_nothing_in_reserve_is_left(mount: Mount) -> None:
    """Neither by an upgrade, which wants new code, nor when everything is killed."""
    first = poll(lambda: in_reserve(mount), 60, what="a daemon in reserve")
    old = mount.daemon_pid
    assert mount.cli("upgrade", mount.path).returncode == 0
    mount.took_over(old)
    assert mount.daemon_pid != first
    second = poll(lambda: in_reserve(mount), 60, what="another daemon in reserve")
    mount.crash()
    assert ended([first, second], 10)


def test_upgrade_during_a_save(mount: Mount, client: Client, dir_store: Any) -> None:
    (mount.path / "many").mkdir()
    writer = client.start(stream, str(mount.path / "stream.bin"), 6.0)
    saver = client.start(save_many, str(mount.path / "many"), 6.0)
    for _ in range(2):
        time.sleep(0.5)
        old = mount.daemon_pid
        done = mount.cli("upgrade", mount.path)
        assert done.returncode == 0, done.stderr
        mount.reread()
        assert mount.daemon_pid != old
    size, longest = writer.result(30)
    count = saver.result(30)
    print(f"longest write {longest:.3f} s")
    assert mount.status()["takeovers"] == 0
    mount.wait()
    assert dir_store.get("stream.bin") == bytes(size)
    assert len(dir_store.keys()) == count + 1


OTHER_FLAGS = """
import sys
if "cachefs.daemon" in sys.orig_argv:
    from cachefs.fuse import tap
    load = tap.load
    def load_and_ask_for_more(*args, **options):
        loaded = load(*args, **options)
        from cachefs.fuse.ops import CacheOperations
        CacheOperations.enable_acl = True
        return loaded
    tap.load = load_and_ask_for_more
"""
OLDER = """
import sys
if "cachefs.daemon" in sys.orig_argv:
    from cachefs.meta import database
    database.SCHEMA_VERSION = 1
"""
BROKEN = """
import os, sys
if "cachefs.daemon" in sys.orig_argv:
    os._exit(1)
"""


@pytest.fixture
def next_code(tmp_path: Path) -> Path:
    """What differs in the code that processes start with from now on."""
    return tmp_path / "sitecustomize.py"


@pytest.mark.either_lane
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (OTHER_FLAGS, "takeover refused: this version would negotiate flags"),
        (OLDER, "this cachefs knows 1"),
        (BROKEN, "the daemon ended at its start (exit code 1)"),
    ],
    ids=["negotiates differently", "knows an older database", "does not start"],
)
def test_upgrade_to_code_that_could_not_go_on(
    mounted: MountFactory, dir_store: Any, client: Client, next_code: Path, code: str, why: str
) -> None:
    """It is refused, and the mount is what it was: no call fails, and it can be tried again."""
    path = f"{next_code.parent}:{CHECKOUT}"
    mount = mounted(dir_store, env={"PYTHONPATH": path}, allow=("cannot go on", "cannot take"))
    old = mount.daemon_pid
    saver = client.start(save_many, str(mount.path), 4.0)
    next_code.write_text(code)
    done = mount.cli("upgrade", mount.path)
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    mount.reread()
    assert mount.daemon_pid == old
    next_code.write_text("")
    assert mount.cli("upgrade", mount.path).returncode == 0
    mount.took_over(old)
    count = saver.result(30)
    mount.wait()
    assert len(dir_store.keys()) == count


@pytest.mark.either_lane
def test_fresh_mount_with_code_that_could_not_go_on(
    mounted: MountFactory, dir_store: Any, next_code: Path
) -> None:
    """A daemon whose supervisor was killed serves on rather than hand over to that."""
    path = f"{next_code.parent}:{CHECKOUT}"
    mount = mounted(dir_store, env={"PYTHONPATH": path}, allow=("cannot go on",))
    os.kill(mount.supervisor_pid, signal.SIGKILL)
    assert ended([mount.supervisor_pid], 5)
    next_code.write_text(OTHER_FLAGS)
    done = mount.cli(*mount.command())
    assert done.returncode == 1
    assert "cannot go on with the mount" in done.stderr
    assert "takeover refused" in done.stderr
    (mount.path / "f").write_bytes(b"served on")
    mount.reread()
    old = mount.daemon_pid
    next_code.write_text("")
    mount_again(mount)
    assert mount.daemon_pid != old
    assert (mount.path / "f").read_bytes() == b"served on"


def test_killed_supervisor_is_replaced_by_a_fresh_mount(mount: Mount, client: Client) -> None:
    writer = client.start(stream, str(mount.path / "stream.bin"), 6.0)
    time.sleep(0.5)
    os.kill(mount.supervisor_pid, signal.SIGKILL)
    assert ended([mount.supervisor_pid], 5)
    old = mount.daemon_pid
    mount_again(mount)
    assert mount.daemon_pid != old
    size, _ = writer.result(30)
    assert (mount.path / "stream.bin").stat().st_size == size


@pytest.mark.either_lane
def test_supervisor_killed_before_it_told_of_the_next_daemon(mount: Mount) -> None:
    """The run file still names the one that died: the fresh mount finds its successor all the same,
    and neither covers it nor ends what it serves."""
    told = run_file(mount.path)
    before = told.read_text()
    with (mount.path / "f").open("wb", buffering=0) as file:
        file.write(b"one ")
        mount.took_over(mount.kill_daemon())
        os.kill(mount.supervisor_pid, signal.SIGKILL)
        assert ended([mount.supervisor_pid], 5)
        told.write_text(before)
        mount_again(mount)
        file.write(b"two")
    assert (mount.path / "f").read_bytes() == b"one two"


@pytest.mark.either_lane
def test_supervisor_killed_while_an_upgrade_is_rehearsed(mount: Mount) -> None:
    """Nobody would start the new daemon: the old one stays."""
    old = mount.daemon_pid
    with subprocess.Popen(
        [sys.executable, "-m", "cachefs", "upgrade", str(mount.path)],
        env=mount.env, stderr=subprocess.PIPE, text=True,
    ) as upgrade:  # fmt: skip
        poll(lambda: any(b"--rehearsal" in words_of(pid) for pid in family(old)), 30)
        os.kill(mount.supervisor_pid, signal.SIGKILL)
        said = upgrade.communicate(timeout=40)[1]
    assert upgrade.returncode == 1
    assert "its supervisor has just ended" in said
    (mount.path / "f").write_bytes(b"served on")
    assert mount.status()["pid"] == old
    mount_again(mount)
    assert (mount.path / "f").read_bytes() == b"served on"


def test_everything_killed_then_a_fresh_mount(mount: Mount, dir_store: Any) -> None:
    """The mount is dead; nothing written is lost."""
    for number in range(20):
        (mount.path / f"f{number}").write_bytes(os.urandom(1000))
    time.sleep(0.5)  # the kernel tells the daemon of a close() after close() has returned
    for pid in (mount.supervisor_pid, mount.daemon_pid):
        os.kill(pid, signal.SIGKILL)
    assert ended([mount.supervisor_pid, mount.daemon_pid], 10)
    mount_again(mount)
    mount.wait()
    assert len(dir_store.keys()) == 20


def test_saves_go_on_while_a_dead_mount_is_replaced(
    mount: Mount, client: Client, dir_store: Any
) -> None:
    """They fail, or reach the store; none lands in the bare directory below."""
    stop = mount.path.parent / f"{mount.path.name}.stop"
    saver = client.start(save_when_possible, str(mount.path), str(stop))
    try:
        poll(lambda: (mount.path / "s20").exists())
        for pid in (mount.supervisor_pid, mount.daemon_pid):
            os.kill(pid, signal.SIGKILL)
        assert ended([mount.supervisor_pid, mount.daemon_pid], 10)
        mount_again(mount)
        poll(lambda: len(os.listdir(mount.path)) > 40)
    finally:
        stop.touch()
        saved, failed = saver.result(20)
        stop.unlink()
    print(f"{len(saved)} saved, {failed} failed")
    assert failed > 0
    poll(lambda: set(saved) <= set(dir_store.keys()))  # one that failed may be held
    assert [name for name in saved if dir_store.get(name) != name.encode() * 100] == []
    assert mount.unmount() in (0, 3)
    assert not mount.mounted, "the dead mount is left"


def test_takeover_switched_off(mounted: MountFactory, dir_store: Any, client: Client) -> None:
    """The mount ends with its daemon, and its callers get an error; the cache loses nothing."""
    mount = mounted(dir_store, options={"mount.takeover": "off"}, allow=(*KILLED, "unmounting"))
    (mount.path / "f").write_bytes(b"x")
    refused = mount.cli("upgrade", mount.path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "takeover is off" in refused.stderr
    saver = client.start(save_many, str(mount.path), 60.0)
    poll(lambda: (mount.path / "f3.bin").exists())
    mount.kill_daemon()
    with pytest.raises(OSError, match="in a client process"):
        saver.result(20)
    mount.wait_gone(20)
    mount.start()
    assert (mount.path / "f").read_bytes() == b"x"
    assert (mount.path / "f0.bin").read_bytes() == b"x" * 5000


@pytest.mark.either_lane
def test_stopped_supervisor_does_not_matter(mount: Mount, client: Client) -> None:
    os.kill(mount.supervisor_pid, signal.SIGSTOP)
    try:
        size, _ = client.run(stream, str(mount.path / "stream.bin"), 0.5)
        assert size > 0
    finally:
        os.kill(mount.supervisor_pid, signal.SIGCONT)
    poll(lambda: mount.status()["dirty_files"] == 0, 20)


@pytest.mark.either_lane
@pytest.mark.parametrize("verb", ["status", "wait", "unmount"])
def test_stopped_daemon_is_told(mount: Mount, verb: str) -> None:
    """Within some seconds, in one line, with what to do; and it goes on as if nothing had been."""
    pid = mount.daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        done = mount.cli(verb, mount.path, timeout=30)
        assert time.monotonic() - began < 10
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"its daemon (pid {pid}) does not answer: it is stopped" in done.stderr
    assert f"`kill -CONT {pid}` lets it go on" in done.stderr
    (mount.path / "f").write_bytes(b"x")
    mount.wait()
