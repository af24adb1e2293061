"""The supervisor with toy daemons on a real mount."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachefs.fuse import kernelmount
from tests.lifecycle.lab import Lab
from tests.support import fusectl
from tests.support.client import Client
from tests.support.mounts import alive, ended

pytestmark = pytest.mark.slow


def write_steadily(path: str, blocks: int) -> float:
    """Write blocks with short pauses; returns the longest write in seconds."""
    longest = 0.0
    with open(path, "wb", buffering=0) as file:
        for number in range(blocks):
            began = time.monotonic()
            assert file.write(bytes([number % 251]) * 4096) == 4096
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.002)
    return longest


def save(path: str) -> None:
    Path(path).write_bytes(b"saved")


def test_mount_is_what_was_asked_for(lab: Lab) -> None:
    assert lab.start() == {"ok": True}
    entry = kernelmount.mount_at(str(lab.mountpoint))
    assert entry is not None
    assert (entry.fstype, entry.source) == ("fuse.cachefs", f"file://{lab.root}/store")
    mine = [
        line
        for line in Path("/proc/mounts").read_text().splitlines()
        if str(lab.mountpoint) in line
    ]
    options = mine[0].split()[3].split(",")
    assert {"nosuid", "nodev", "default_permissions", "allow_other"} <= set(options)
    with kernelmount._fusectl() as fusectl:
        name = f"{entry.connection}/max_background"
        with open(name, opener=lambda p, f: os.open(p, f, dir_fd=fusectl)) as file:
            assert int(file.read()) == 512
    assert lab.leave() == 0


def test_run_file_names_the_processes(lab: Lab) -> None:
    lab.start()
    assert lab.supervisor is not None
    run = lab.run
    assert run.supervisor_pid == lab.supervisor.pid
    assert alive(run.pid)
    assert run.cache_dirs == (str(lab.cache),)
    assert run.log == str(lab.log_file)
    old = lab.kill_daemon()
    assert lab.next_daemon(old) != old
    assert lab.leave() == 0


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_of_the_drain_is_passed_on(lab: Lab, code: int) -> None:
    lab.start(drain_code=code, drain_seconds=0.2)
    assert lab.leave() == code


def test_failure_at_start_leaves_nothing(lab: Lab) -> None:
    report = lab.start(fail={"0": ["no such bucket", 7]})
    assert report == {"ok": False, "message": "no such bucket", "exit_code": 7}
    assert not lab.mounted
    assert lab.exit_code() == 7


def test_death_at_start_is_a_failure(lab: Lab) -> None:
    report = lab.start(die=[0])
    assert report["message"] == "the daemon ended at its start (exit code 1)"
    assert lab.exit_code() == 1


def test_mountpoint_that_vanished(lab: Lab) -> None:
    lab.mountpoint.rmdir()
    report = lab.start()
    assert "cannot mount" in report["message"]
    assert lab.exit_code() == 1


def test_kill_during_a_write_fails_no_call(lab: Lab, client: Client) -> None:
    lab.start()
    path = lab.mountpoint / "stream"
    assert lab.supervisor is not None
    descriptors = Path(f"/proc/{lab.supervisor.pid}/fd")
    before = len(list(descriptors.iterdir()))
    writer = client.start(write_steadily, str(path), 1000)
    for _ in range(3):
        time.sleep(0.5)
        lab.next_daemon(lab.kill_daemon())
        assert kernelmount.answers(str(lab.mountpoint), 10)
    longest = writer.result(30)
    print(f"longest write {longest:.3f} s")
    expected = b"".join(bytes([n % 251]) * 4096 for n in range(1000))
    assert (lab.cache / "stream").read_bytes() == expected
    assert lab.header() == (1, 3, 3)
    assert len(list(descriptors.iterdir())) == before
    assert lab.leave() == 0


def test_request_of_a_dead_daemon_is_answered_by_the_next(lab: Lab, client: Client) -> None:
    lab.start()
    saver = client.start(save, str(lab.mountpoint / "slow"))
    time.sleep(0.3)
    lab.kill_daemon()
    saver.result(20)
    assert (lab.cache / "slow").read_bytes() == b"saved"


def test_restarts_until_one_gets_ready(lab: Lab) -> None:
    lab.start(die=[1, 2], fail={"3": ["not yet", 1]})
    lab.kill_daemon()
    lab.eventually(lambda: "epoch 4" in lab.log, 20)
    assert kernelmount.answers(str(lab.mountpoint), 10)
    assert lab.header() == (1, 4, 1)


def test_mount_is_given_up_after_the_timeout(lab: Lab, client: Client) -> None:
    lab.start(takeover_timeout=1.5, die=list(range(1, 100)))
    lab.kill_daemon()
    waiting = client.start(save, str(lab.mountpoint / "late"))
    began = time.monotonic()
    assert lab.exit_code() == 1
    assert 0.5 < time.monotonic() - began < 15
    with pytest.raises(OSError, match="client process"):
        waiting.result(10)
    assert "giving up the mount" in lab.log


def test_refused_takeover_is_not_tried_again(lab: Lab) -> None:
    lab.start(refuse=[1])
    lab.kill_daemon()
    assert lab.exit_code() == 1
    assert "epoch 2" not in lab.log


def test_daemon_that_never_gets_ready_is_given_up(lab: Lab) -> None:
    lab.start(takeover_timeout=1.0, hang=[1])
    lab.kill_daemon()
    assert lab.exit_code() == 1
    assert "did not get ready in time" in lab.log


@pytest.mark.parametrize("why", ["setting", "kernel"])
def test_without_takeover_the_mount_ends(lab: Lab, client: Client, why: str) -> None:
    lab.start(takeover="off" if why == "setting" else "auto", no_resend=why == "kernel")
    waiting = client.start(save, str(lab.mountpoint / "slow"))
    lab.eventually(lambda: fusectl.waiting(lab.mountpoint) > 0)
    lab.kill_daemon()
    assert lab.exit_code() == 1
    with pytest.raises(OSError, match="client process"):
        waiting.result(10)


def test_unmounted_by_somebody_else(lab: Lab) -> None:
    lab.start(drain_code=3, drain_seconds=0.3)
    lab.note_processes()
    assert subprocess.run(["umount", str(lab.mountpoint)], timeout=10, check=False).returncode == 0
    assert lab.exit_code() == 3


def test_killed_after_an_unmount_is_not_restarted(lab: Lab) -> None:
    lab.start(drain_seconds=30)
    assert subprocess.run(["umount", str(lab.mountpoint)], timeout=10, check=False).returncode == 0
    lab.kill_daemon()
    assert lab.exit_code() == 1


def test_another_mount_on_top_is_left_alone(lab: Lab) -> None:
    lab.start()
    lab.note_processes()
    assert lab.supervisor is not None
    mount = ["mount", "-t", "tmpfs", "on-top", str(lab.mountpoint)]
    assert subprocess.run(mount, timeout=10, check=False).returncode == 0
    lab.supervisor.terminate()
    assert lab.supervisor.wait(10) == 0
    entry = kernelmount.mount_at(str(lab.mountpoint))
    assert entry is not None
    assert entry.source == "on-top"


def test_signals_that_must_not_matter(lab: Lab) -> None:
    lab.start()
    assert lab.supervisor is not None
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        lab.supervisor.send_signal(number)
    time.sleep(0.2)
    assert kernelmount.answers(str(lab.mountpoint), 10)
    assert lab.leave(signal.SIGINT) == 0


def test_stop_between_two_daemons(lab: Lab) -> None:
    lab.start(die=list(range(1, 100)))
    lab.kill_daemon()
    lab.eventually(lambda: lab.log.count("ended unexpectedly") > 3)
    assert lab.leave() == 1


def test_daemon_serves_on_without_its_supervisor(lab: Lab, client: Client) -> None:
    lab.start()
    lab.note_processes()
    assert lab.supervisor is not None
    lab.supervisor.kill()
    assert ended([lab.supervisor.pid], 5) or lab.supervisor.wait(5)
    client.start(save, str(lab.mountpoint / "alone")).result(10)
    assert (lab.cache / "alone").read_bytes() == b"saved"


def test_planned_upgrade_is_no_takeover(lab: Lab, client: Client) -> None:
    lab.start()
    writer = client.start(write_steadily, str(lab.mountpoint / "stream"), 800)
    time.sleep(0.4)
    old = lab.run.pid
    from cachefs.observe.client import ControlClient

    with ControlClient(lab.run.socket) as control:
        control.call("upgrade", timeout=10)
    lab.next_daemon(old)
    writer.result(30)
    assert lab.header() == (1, 1, 0)
    assert lab.leave() == 0


def test_supervisor_imports_only_the_standard_library() -> None:
    program = "import sys, cachefs.supervisor; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True
    )
    foreign = set(done.stdout.split()) - sys.stdlib_module_names - {"cachefs", "__main__"}
    # Path hooks of an editable installation and of the environment load before anything of ours.
    assert not {name for name in foreign if not name.startswith(("_", "sitecustomize"))}
