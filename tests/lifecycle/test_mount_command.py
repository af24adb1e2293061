"""`cachefs mount` and `cachefs unmount` with toy daemons on a real mount."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachefs.fuse import kernelmount
from cachefs.observe import runfiles
from tests.lifecycle.lab import Lab
from tests.support.client import Client
from tests.support.mounts import alive, ended

pytestmark = pytest.mark.slow


def save(path: str) -> None:
    Path(path).write_bytes(b"saved")


def hold_open(path: str) -> None:
    with open(path, "wb"):
        time.sleep(3600)


def stream(path: str, seconds: float) -> int:
    end = time.monotonic() + seconds
    with open(path, "wb", buffering=0) as file:
        while time.monotonic() < end:
            file.write(b"x" * 1000)
            time.sleep(0.002)
        return file.tell()


def kill_supervisor(lab: Lab) -> runfiles.RunFile:
    lab.note_processes()
    run = lab.run
    os.kill(run.supervisor_pid, signal.SIGKILL)
    assert ended([run.supervisor_pid], 5)
    return run


def assert_nothing_left(lab: Lab) -> None:
    assert not lab.mounted
    assert runfiles.read(str(lab.mountpoint)) is None
    assert ended(lab.seen, 5)
    path = runfiles.run_path(str(lab.mountpoint))
    assert list(path.parent.glob(f"{path.stem}*")) == []


def test_mounts_and_unmounts(lab: Lab, client: Client) -> None:
    code, errors = lab.mount()
    assert (code, errors) == (0, "")
    client.run(save, lab.mountpoint / "file")
    run = lab.run
    assert alive(run.pid)
    assert alive(run.supervisor_pid)
    assert os.getsid(run.supervisor_pid) == run.supervisor_pid
    assert "mounted on" in Path(run.log).read_text()
    done = lab.command("unmount", lab.mountpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_nothing_left(lab)
    assert (lab.cache / "file").read_bytes() == b"saved"


def test_settings_file_is_private_and_goes_with_the_mount(lab: Lab) -> None:
    lab.mount()
    path = runfiles.run_path(str(lab.mountpoint)).with_suffix(".settings")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lab.command("unmount", lab.mountpoint)
    assert not path.exists()


def test_output_can_be_a_pipe(lab: Lab) -> None:
    """A daemon that kept the pipe open would hang `x=$(cachefs mount ...)`."""
    began = time.monotonic()
    assert lab.mount()[0] == 0
    assert time.monotonic() - began < 15


def test_remains_are_told(lab: Lab) -> None:
    lab.mount(drain_code=3)
    done = lab.command("unmount", lab.mountpoint, "--drain-timeout", "1s", drain_code=3)
    assert done.returncode == 3
    assert "2 files / 10 bytes remain" in done.stderr
    assert str(lab.cache) in done.stderr
    assert_nothing_left(lab)


def test_failure_of_the_daemon_is_the_commands(lab: Lab) -> None:
    code, errors = lab.mount(fail={"0": ["bucket b does not exist", 1]})
    assert code == 1
    assert re.fullmatch(r"cachefs: bucket b does not exist; see .*\n", errors)
    assert_nothing_left(lab)


def test_daemon_that_dies_at_start(lab: Lab) -> None:
    code, errors = lab.mount(die=[0])
    assert code == 1
    assert errors.startswith("cachefs: the daemon ended at its start (exit code 1); see /")
    assert_nothing_left(lab)


def test_interrupted_mount_leaves_nothing(lab: Lab) -> None:
    words = ["mount", f"file://{lab.root}/store", str(lab.mountpoint), "--cache-dir"]
    words += [str(lab.cache), "--daemon-module", "tests.lifecycle.toydaemon"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cachefs", *words], env=lab.environment(hang=[0]), cwd="/"
    )
    lab.eventually(lambda: runfiles.read(str(lab.mountpoint)) is not None)
    lab.note_processes()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert_nothing_left(lab)


def test_foreground_stays_and_ends_by_sigterm(lab: Lab) -> None:
    words = ["mount", f"file://{lab.root}/store", str(lab.mountpoint), "--foreground"]
    words += ["--cache-dir", str(lab.cache), "--daemon-module", "tests.lifecycle.toydaemon"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cachefs", *words],
        env=lab.environment(drain_code=3),
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )
    lab.eventually(lambda: runfiles.read(str(lab.mountpoint)) is not None)
    assert kernelmount.answers(str(lab.mountpoint), 10)
    assert lab.run.supervisor_pid == process.pid
    lab.note_processes()
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "mounted on" in errors
    assert_nothing_left(lab)


def test_service_manager_is_told(lab: Lab) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        notifications.bind(str(lab.root / "notify"))
        notifications.settimeout(20)
        words = ["mount", f"file://{lab.root}/store", str(lab.mountpoint), "--foreground"]
        words += ["--cache-dir", str(lab.cache), "--daemon-module", "tests.lifecycle.toydaemon"]
        env = {**lab.environment(), "NOTIFY_SOCKET": str(lab.root / "notify")}
        process = subprocess.Popen([sys.executable, "-m", "cachefs", *words], env=env, cwd="/")
        assert notifications.recv(100) == b"READY=1"
        lab.note_processes()
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{lab.run.pid}/environ").read_bytes()
        process.terminate()
        assert notifications.recv(100) == b"STOPPING=1"
        assert process.wait(20) == 0


# ---- refusals ----------------------------------------------------------------------------------


def refused(lab: Lab, words: list[str], code: int = 1) -> str:
    done = lab.command("mount", *words)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("cachefs: ")
    assert_nothing_left(lab)
    return done.stderr


def test_mountpoint_missing(lab: Lab) -> None:
    text = refused(lab, ["file:///tmp/s", str(lab.root / "no"), "--cache-dir", str(lab.cache)])
    assert "does not exist; create it with `mkdir -p" in text


def test_mountpoint_is_a_file(lab: Lab) -> None:
    (lab.root / "f").touch()
    text = refused(lab, ["file:///tmp/s", str(lab.root / "f"), "--cache-dir", str(lab.cache)])
    assert "is not a directory" in text


def test_mountpoint_is_another_mount(lab: Lab) -> None:
    text = refused(lab, ["file:///tmp/s", "/dev/shm", "--cache-dir", str(lab.cache)])
    assert "is a mount point already (tmpfs, tmpfs)" in text


def test_mountpoint_is_mounted_already(lab: Lab) -> None:
    lab.mount()
    code, errors = lab.mount()
    assert code == 1
    assert f"is mounted already (file://{lab.root}/store, pid {lab.run.pid})" in errors
    assert kernelmount.answers(str(lab.mountpoint), 10)


def test_mountpoint_by_symlink(lab: Lab) -> None:
    link = lab.root / "link"
    link.symlink_to(lab.mountpoint)
    words = ["mount", f"file://{lab.root}/store", str(link), "--cache-dir", str(lab.cache)]
    done = lab.command(*words, "--daemon-module", "tests.lifecycle.toydaemon")
    assert done.returncode == 0, done.stderr
    assert lab.run.mountpoint == str(lab.mountpoint)
    assert lab.command("unmount", link).returncode == 0


def test_mountpoint_with_files_is_warned_of(lab: Lab) -> None:
    (lab.mountpoint / "hidden").touch()
    code, errors = lab.mount()
    assert code == 0
    assert "is not empty" in errors


def test_cache_directory_not_writable(lab: Lab) -> None:
    text = refused(lab, ["file:///tmp/s", str(lab.mountpoint), "--cache-dir", "/proc/cache"])
    assert "cache directory /proc/cache is not writable" in text


def test_cache_directory_given_twice(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    twice = ["--cache-dir", str(tmp_path / "cache"), "--cache-dir", str(tmp_path / "link")]
    text = refused(lab, ["file:///tmp/s", str(lab.mountpoint), *twice])
    assert f"cache directory {tmp_path}/link is given twice" in text


def test_cache_directory_is_a_file(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    words = ["file:///tmp/s", str(lab.mountpoint), "--cache-dir", str(tmp_path / "cache")]
    assert f"cache directory {tmp_path}/cache is not a directory" in refused(lab, words)


def test_cache_directory_inside_the_mountpoint(lab: Lab) -> None:
    inside = str(lab.mountpoint / "cache")
    text = refused(lab, ["file:///tmp/s", str(lab.mountpoint), "--cache-dir", inside])
    assert "lies inside the mountpoint" in text


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("{mountpoint}", "lies inside the mountpoint"),
        ("{mountpoint}/warm", "lies inside the mountpoint"),
        ("{cache}/warm", "lies inside the cache directory"),
        ("{root}/store/warm", "lies inside the store"),
        ("{root}/file", "is not a directory"),
    ],
)
def test_a_warm_tier_that_cannot_work(lab: Lab, place: str, why: str) -> None:
    (lab.root / "file").touch()
    warm = place.format(mountpoint=lab.mountpoint, cache=lab.cache, root=lab.root)
    words = [f"file://{lab.root}/store", str(lab.mountpoint), "--cache-dir", str(lab.cache)]
    assert why in refused(lab, [*words, "-o", f"tiers.warm={warm}"])


def test_bad_configuration(lab: Lab) -> None:
    words = ["file:///tmp/s", str(lab.mountpoint), "--cache-dir", str(lab.cache)]
    assert "flush.settle" in refused(lab, [*words, "-o", "flush.setle=1s"], 2)
    refused(lab, ["ftp://host/x", str(lab.mountpoint)], 2)
    refused(lab, [*words, "--config", str(lab.root / "none.toml")], 2)


LOAD_ALL = """
import importlib, os, pkgutil, sys, typer
import cachefs.cli, cachefs.config
from cachefs.cli import main
for package in (typer, cachefs.cli, cachefs.config):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "__main__" not in module.name:
            try: importlib.import_module(module.name)
            except Exception: pass
"""


def test_not_root(lab: Lab) -> None:
    # Nobody may read where the code is, perhaps: it is loaded before.
    program = LOAD_ALL + "os.setuid(65534); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "mount", "file:///tmp/s", lab.mountpoint],
        env={**lab.environment(), "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=20,
        cwd="/",
    )
    assert done.returncode == 1
    assert done.stderr == "cachefs: only root can mount; run it with sudo or as a service\n"


# ---- unmount -----------------------------------------------------------------------------------


def test_unmount_of_nothing(lab: Lab) -> None:
    done = lab.command("unmount", lab.mountpoint)
    assert done.returncode == 1
    assert "is no cachefs mountpoint" in done.stderr


def test_busy_mount_is_refused_with_its_users(lab: Lab, client: Client) -> None:
    lab.mount()
    holder = client.start(hold_open, str(lab.mountpoint / "held"))
    lab.eventually((lab.cache / "held").exists)
    done = lab.command("unmount", lab.mountpoint)
    assert done.returncode == 1
    assert "is in use by" in done.stderr
    assert f"({holder.pid})" in done.stderr
    assert kernelmount.answers(str(lab.mountpoint), 10)
    assert lab.command("unmount", lab.mountpoint, "--force").returncode == 0
    assert_nothing_left(lab)


def test_busy_check_changes_nothing(lab: Lab) -> None:
    lab.mount()
    for _ in range(3):
        assert not kernelmount.is_busy(str(lab.mountpoint))
    assert lab.mounted


def test_unmount_of_a_dead_mount(lab: Lab) -> None:
    lab.mount()
    run = kill_supervisor(lab)
    os.kill(run.pid, signal.SIGKILL)
    assert ended([run.pid], 5)
    assert lab.mounted
    done = lab.command("unmount", lab.mountpoint)
    assert done.returncode == 3
    assert "could not be asked" in done.stderr
    assert_nothing_left(lab)


def test_unmount_without_supervisor(lab: Lab) -> None:
    lab.mount()
    kill_supervisor(lab)
    assert lab.command("unmount", lab.mountpoint).returncode == 0
    assert_nothing_left(lab)


@pytest.mark.timeout(90)
def test_hung_daemon_is_ended_by_force(lab: Lab) -> None:
    lab.mount()
    os.kill(lab.run.pid, signal.SIGSTOP)
    done = lab.command("unmount", lab.mountpoint, "--force", timeout=60)
    assert done.returncode == 3
    assert_nothing_left(lab)


# ---- what a dead supervisor left ---------------------------------------------------------------


def test_dead_mount_is_covered_by_the_next_and_goes_with_it(lab: Lab, client: Client) -> None:
    lab.mount()
    run = kill_supervisor(lab)
    os.kill(run.pid, signal.SIGKILL)
    assert ended([run.pid], 5)
    code, errors = lab.mount()
    assert (code, errors) == (0, "")
    client.run(save, lab.mountpoint / "again")
    assert len(kernelmount.connections_at(str(lab.mountpoint))) == 2
    assert lab.command("unmount", lab.mountpoint).returncode == 0
    assert_nothing_left(lab)


def test_orphaned_daemon_hands_its_mount_over(lab: Lab, client: Client) -> None:
    lab.mount()
    run = kill_supervisor(lab)
    writer = client.start(stream, str(lab.mountpoint / "stream"), 3.0)
    time.sleep(0.5)
    code, errors = lab.mount()
    assert (code, errors) == (0, "")
    assert ended([run.pid], 5)
    assert lab.run.pid != run.pid
    written = writer.result(20)
    assert (lab.cache / "stream").stat().st_size == written > 0
    assert lab.command("unmount", lab.mountpoint).returncode == 0
    assert_nothing_left(lab)


def test_orphaned_daemon_that_cannot_hand_over_is_replaced(lab: Lab, client: Client) -> None:
    lab.mount(no_resend=True)
    run = kill_supervisor(lab)
    code, errors = lab.mount()
    assert (code, errors) == (0, "")
    assert ended([run.pid], 5)
    client.run(save, lab.mountpoint / "again")


def test_orphaned_daemon_of_another_store_is_left_alone(lab: Lab) -> None:
    lab.mount()
    run = kill_supervisor(lab)
    other = ["mount", "file:///tmp/other", str(lab.mountpoint), "--cache-dir", str(lab.cache)]
    done = lab.command(*other)
    assert done.returncode == 1
    assert "with another store or cache" in done.stderr
    assert alive(run.pid)


def test_mount_while_the_last_one_drains(lab: Lab) -> None:
    lab.mount(drain_seconds=4.0)
    lab.note_processes()
    assert subprocess.run(["umount", str(lab.mountpoint)], timeout=10, check=False).returncode == 0
    code, errors = lab.mount()
    assert code == 1
    assert "is still uploading what it holds" in errors
    assert ended(lab.seen, 15)
    assert lab.mount()[0] == 0
