"""`cachefs wait` and `cachefs flush`: exit codes, progress, and daemons that come and go."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
import trio

from cachefs.cli import target
from cachefs.observe.control import Progress
from cachefs.observe.protocol import ControlError
from tests.cli.conftest import Run
from tests.cli.fake import FakeMounts, command
from tests.observe.service import serving

RESULT = {"paths": ["/mnt/ckpt/step_1"], "files": 12, "bytes": 3 << 30, "seconds": 4.25}


class Script:
    """A daemon that waits as told."""

    def __init__(self, error: ControlError | None = None, steps: int = 0, pause: float = 0) -> None:
        self.error = error
        self.steps = steps
        self.pause = pause
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.started = threading.Event()
        self.cancelled = threading.Event()

    async def _work(self, op: str, args: dict[str, Any], progress: Progress) -> Any:
        self.asked.append((op, args))
        self.started.set()
        try:
            for left in range(self.steps, -1, -1):
                await progress(
                    {
                        "files_total": self.steps,
                        "files_left": left,
                        "bytes_total": self.steps << 20,
                        "bytes_left": left << 20,
                    }
                )
                await trio.sleep(self.pause)
        except trio.Cancelled:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        return RESULT

    async def wait(self, args: dict[str, Any], progress: Progress) -> Any:
        return await self._work("wait", args, progress)

    async def flush(self, args: dict[str, Any], progress: Progress) -> Any:
        return await self._work("flush", args, progress)

    @property
    def handlers(self) -> Any:
        return {"wait": self.wait, "flush": self.flush}


# ---- results -----------------------------------------------------------------------------------


def test_the_final_line_says_what_is_safe_now(run: Run, mounts: FakeMounts) -> None:
    script = Script(steps=3)
    with mounts.daemon("/mnt/ckpt", script.handlers):
        ran = run("wait", "/mnt/ckpt/step_1")
    assert ran == (0, "durable: 12 files, 3.00 GiB in 4.2 s\n", "")
    args = {"paths": ["/mnt/ckpt/step_1"], "survives": "site", "timeout": None}
    assert script.asked == [("wait", args)]


def test_survives_and_timeout_are_passed_on(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    with mounts.daemon("/mnt/ckpt", script.handlers):
        ran = run("wait", "--survives", "reboot", "--timeout", "2.5", "/mnt/ckpt/a", "/mnt/ckpt/b")
    assert ran.out.startswith("survives reboot: ")
    ((_, args),) = script.asked
    assert args["survives"] == "reboot"
    assert args["paths"] == ["/mnt/ckpt/a", "/mnt/ckpt/b"]
    assert args["timeout"] == pytest.approx(2.5, abs=0.5)


def test_flush(run: Run, mounts: FakeMounts) -> None:
    script = Script(steps=1)
    with mounts.daemon("/mnt/ckpt", script.handlers):
        ran = run("flush", "/mnt/ckpt/step_1")
    assert ran == (0, "flushed: 12 files, 3.00 GiB in 4.2 s\n", "")
    assert script.asked == [("flush", {"paths": ["/mnt/ckpt/step_1"], "timeout": None})]


def test_a_flush_with_a_limit(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    with mounts.daemon("/mnt/ckpt", script.handlers):
        assert run("flush", "--timeout", "2.5", "/mnt/ckpt/a").code == 0
    ((_, args),) = script.asked
    assert args["timeout"] == pytest.approx(2.5, abs=0.5)


def test_json(run: Run, mounts: FakeMounts) -> None:
    with mounts.daemon("/mnt/ckpt", Script(steps=2).handlers):
        ran = run("wait", "/mnt/ckpt/step_1", "--json")
    assert json.loads(ran.out) == {**RESULT, "error": None}
    assert ran.err == ""


def test_paths_in_several_mounts_are_added_up(run: Run, mounts: FakeMounts) -> None:
    first, second = Script(), Script()
    with (
        mounts.daemon("/mnt/a", first.handlers),
        mounts.daemon("/mnt/longer", second.handlers),
    ):
        ran = run("wait", "/mnt/a/x", "/mnt/longer/y", "/mnt/a/z", "--json")
    assert first.asked[0][1]["paths"] == ["/mnt/a/x", "/mnt/a/z"]
    assert second.asked[0][1]["paths"] == ["/mnt/longer/y"]
    total = json.loads(ran.out)
    assert (total["files"], total["bytes"], total["seconds"]) == (24, 6 << 30, 8.5)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1, "/mnt/ckpt/x: no such file"),
        (4, "2 files, 1.00 GiB are not durable after 5 s"),
        (5, "/mnt/ckpt/x is stalled: 403 AccessDenied"),
        (6, "/mnt/ckpt/x was superseded"),
    ],
)
def test_exit_codes_are_the_daemons(run: Run, mounts: FakeMounts, code: int, message: str) -> None:
    error = ControlError(message, exit_code=code, hint="do this")
    with mounts.daemon("/mnt/ckpt", Script(error, steps=1).handlers):
        ran = run("wait", "/mnt/ckpt/x")
    assert ran == (code, "", f"cachefs: {message}; do this\n")


@pytest.mark.parametrize("verb", ["wait", "flush"])
def test_json_of_a_failure_has_the_same_keys(run: Run, mounts: FakeMounts, verb: str) -> None:
    error = ControlError("time is up: 5 bytes are left", exit_code=4, hint="do this")
    with mounts.daemon("/mnt/ckpt", Script(error).handlers):
        ran = run(verb, "/mnt/ckpt/x", "--json")
    told = json.loads(ran.out)
    assert told.pop("seconds") > 0
    wrong = {"message": "time is up: 5 bytes are left", "hint": "do this", "exit_code": 4}
    assert told == {"paths": ["/mnt/ckpt/x"], "files": 0, "bytes": 0, "error": wrong}
    assert (ran.code, ran.err) == (4, "cachefs: time is up: 5 bytes are left; do this\n")


def test_json_of_a_path_in_no_mount(run: Run, mounts: FakeMounts) -> None:
    ran = run("wait", "/nowhere/x", "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["error"]["message"] == "/nowhere/x: not in a cachefs mount"


@pytest.mark.parametrize("args", [(), ("--survives", "fire", "/x"), ("--bogus", "/x")])
def test_bad_usage(run: Run, mounts: FakeMounts, args: tuple[str, ...]) -> None:
    ran = run("wait", *args)
    assert ran.code == 2
    assert ran.err.startswith("cachefs: ")
    assert ran.err.endswith("see `cachefs wait --help`\n")
    assert ran.err.count("\n") == 1


def test_times_have_units(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    with mounts.daemon("/mnt/ckpt", script.handlers):
        assert run("wait", "--timeout", "2min", "/mnt/ckpt").code == 0
    assert script.asked[0][1]["timeout"] == pytest.approx(120, abs=5)
    ran = run("wait", "--timeout", "soon", "/mnt/ckpt")
    assert ran.code == 2
    assert ran.err.startswith("cachefs: --timeout: 'soon' is not a time")


# ---- progress ----------------------------------------------------------------------------------


def _on_terminal(args: list[str]) -> tuple[int, str]:
    """Exit code and what a terminal saw."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(args, stdout=slave, stderr=slave, stdin=slave, env=env)
    os.close(slave)
    seen = b""
    try:
        while data := os.read(master, 65536):
            seen += data
    except OSError:  # EIO: the other end is closed
        pass
    os.close(master)
    return process.wait(30), seen.decode()


def test_a_bar_on_a_terminal(mounts: FakeMounts) -> None:
    with mounts.daemon("/mnt/ckpt", Script(steps=8, pause=0.15).handlers):
        code, seen = _on_terminal(command(mounts, "wait", "/mnt/ckpt/step_1"))
    assert code == 0
    assert "MiB in" in seen
    assert "files left" in seen
    assert " %" in seen
    assert "durable: 12 files, 3.00 GiB in 4.2 s" in seen


def test_no_bar_for_json(mounts: FakeMounts) -> None:
    with mounts.daemon("/mnt/ckpt", Script(steps=3, pause=0.1).handlers):
        code, seen = _on_terminal(command(mounts, "wait", "/mnt/ckpt/step_1", "--json"))
    assert code == 0
    assert json.loads(seen) == {**RESULT, "error": None}


def test_a_wait_for_nothing_but_renames_has_a_bar_too(mounts: FakeMounts) -> None:
    async def wait(args: dict[str, Any], progress: Progress) -> Any:
        for left in (2, 1, 0):
            await progress(
                {"files_total": 2, "files_left": left, "bytes_total": 0, "bytes_left": 0}
            )
            await trio.sleep(0.15)
        return RESULT

    with mounts.daemon("/mnt/ckpt", {"wait": wait}):
        code, seen = _on_terminal(command(mounts, "wait", "/mnt/ckpt"))
    assert code == 0
    assert "50 %" in seen


def test_an_interrupted_wait_is_withdrawn(mounts: FakeMounts) -> None:
    script = Script(steps=1000, pause=0.1)
    with mounts.daemon("/mnt/ckpt", script.handlers):
        process = subprocess.Popen(command(mounts, "wait", "/mnt/ckpt"), stderr=subprocess.PIPE)
        assert script.started.wait(20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert script.cancelled.wait(5)
    assert process.returncode == 130
    assert b"Traceback" not in err


# ---- daemons that come and go ------------------------------------------------------------------


def test_a_wait_goes_on_with_the_daemon_that_takes_over(run: Run, mounts: FakeMounts) -> None:
    """The first daemon dies while the wait runs; its supervisor lives and starts another."""
    mounts.add("/mnt/ckpt")
    socket = mounts.write_run_file("/mnt/ckpt", supervisor=os.getpid())
    first, second = Script(steps=1000, pause=0.05), Script()

    def take_over() -> None:
        with serving(socket, first.handlers):
            first.started.wait(20)
        time.sleep(0.5)
        with serving(socket, second.handlers):
            second.started.wait(20)
            time.sleep(0.2)

    daemons = threading.Thread(target=take_over)
    daemons.start()
    while not socket.exists():
        time.sleep(0.01)
    ran = run("wait", "--timeout", "60", "/mnt/ckpt")
    daemons.join()
    assert ran.code == 0
    ((_, before),) = first.asked
    ((_, after),) = second.asked
    assert after["timeout"] < before["timeout"] - 0.3


def test_a_supervisor_that_starts_no_daemon_is_not_waited_for_forever(
    run: Run, mounts: FakeMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "RECONNECT", 0.5)
    mounts.add("/mnt/ckpt")
    mounts.write_run_file("/mnt/ckpt", supervisor=os.getpid())
    started = time.monotonic()
    ran = run("wait", "/mnt/ckpt")
    assert 0.4 < time.monotonic() - started < 10
    assert ran.code == 1
    assert "does not answer" in ran.err


def test_a_daemon_that_hangs_is_reported(
    run: Run, mounts: FakeMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.cli.wait.GRACE", 0.3)
    with mounts.daemon("/mnt/ckpt", Script(pause=60).handlers):
        ran = run("wait", "--timeout", "0.2", "/mnt/ckpt")
    assert ran.code == 1
    assert "no answer in time" in ran.err
