"""`cachefs status` and `cachefs ls`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cachefs.observe.control import Progress
from cachefs.observe.protocol import ControlError
from tests.cli.conftest import Run
from tests.cli.fake import MOUNT, FakeMounts

FILE: dict[str, Any] = {
    "path": "/mnt/ckpt/step_1/model.safetensors",
    "state": "uploading",
    "survives": "reboot",
    "lane": "passthrough",
    "url": "s3://bucket/run/step_1/model.safetensors",
    "etag": "",
    "error": None,
    "size": 5 << 30,
    "dirty_bytes": 1 << 30,
    "waits_for": [],
}
ENTRIES: list[dict[str, Any]] = [
    {
        "name": "model.safetensors",
        "type": "file",
        "size": 5 << 30,
        "mtime": 1.7e9,
        "state": "durable",
        "survives": "site",
    },
    {"name": "a\x1b[31m", "type": "file", "size": 0, "mtime": 0, "state": "open", "survives": ""},
    {
        "name": "latest",
        "type": "symlink",
        "size": 6,
        "mtime": 1.7e9,
        "state": "dirty",
        "survives": "reboot",
    },
    {"name": "step_1", "type": "dir", "size": 0, "mtime": 1.7e9, "state": None, "survives": None},
]


class Script:
    """Answers `status` and `ls`; remembers what it was asked."""

    def __init__(self, **mount: Any) -> None:
        self.mount = {**MOUNT, **mount}
        self.path: dict[str, Any] = FILE
        self.entries = ENTRIES
        self.asked: list[dict[str, Any]] = []

    async def status(self, args: dict[str, Any], progress: Progress) -> Any:
        self.asked.append(args)
        if args.get("path", "").endswith("missing"):
            raise ControlError(f"{args['path']}: no such file")
        return self.path if "path" in args else self.mount

    async def ls(self, args: dict[str, Any], progress: Progress) -> Any:
        self.asked.append(args)
        return {"entries": self.entries}

    @property
    def handlers(self) -> Any:
        return {"status": self.status, "ls": self.ls}


def _human(run: Run, mounts: FakeMounts, **mount: Any) -> str:
    with mounts.daemon("/mnt/ckpt", Script(**mount).handlers):
        ran = run("status", "/mnt/ckpt")
    assert (ran.code, ran.err) == (0, "")
    return ran.out


# ---- a mount -----------------------------------------------------------------------------------


def test_json_is_the_answer_as_it_is(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    with mounts.daemon("/mnt/ckpt", script.handlers):
        ran = run("status", "/mnt/ckpt", "--json")
    assert ran.code == 0
    assert json.loads(ran.out) == MOUNT
    assert script.asked == [{}]


def test_a_trailing_slash_is_the_mount_too(run: Run, mounts: FakeMounts) -> None:
    with mounts.daemon("/mnt/ckpt", Script().handlers):
        assert json.loads(run("status", "/mnt/ckpt/", "--json").out) == MOUNT


def test_people_see_sizes_in_binary_units(run: Run, mounts: FakeMounts) -> None:
    text = _human(run, mounts)
    assert "1.50 GiB in 14 files, oldest 3.2 s; uploading 512 MiB" in text
    assert "12.0 GiB of 80.0 GiB (15 %)" in text
    assert "/nvme/cache: disk" in text
    assert "survives reboot" in text
    assert "pid 4711 on node-1, up 1 h 2 min" in text
    assert "http://127.0.0.1:9469/metrics" in text
    assert "lane     passthrough\n" in text
    assert " \n" not in text
    assert "stalled" not in text
    assert "degraded" not in text


def test_values_are_aligned(run: Run, mounts: FakeMounts) -> None:
    lines = [line for line in _human(run, mounts).splitlines() if line]
    assert len({len(line) - len(line[8:].lstrip()) for line in lines}) == 1


def test_nothing_dirty(run: Run, mounts: FakeMounts) -> None:
    text = _human(run, mounts, dirty_files=0, dirty_bytes=0, metrics=None, takeovers=2)
    assert "nothing: everything closed is in the store" in text
    assert "metrics  off" in text
    assert "2 takeovers" in text


def test_why_a_writer_is_as_slow_as_the_store(run: Run, mounts: FakeMounts) -> None:
    cache = {**MOUNT["cache"], "larger_files": 1, "offloaded_bytes": 3 << 30}
    text = _human(run, mounts, cache=cache)
    assert "1 open file larger than the room: written as fast as the store takes it" in text
    assert "3.00 GiB so far" in text


def test_trouble_is_shown(run: Run, mounts: FakeMounts) -> None:
    text = _human(
        run,
        mounts,
        degraded=True,
        stalled_files=1,
        lanes={"passthrough": False, "reason": "kernel 6.1 is older than 6.9"},
        errors=[{"path": "/mnt/ckpt/x", "error": "403 AccessDenied"}],
    )
    assert "degraded: the store is out of reach" in text
    assert "1 file refused by the store, kept here" in text
    assert "tracked (kernel 6.1 is older than 6.9)" in text
    assert "403 AccessDenied" in text


def test_checkpoints_and_what_waits_for_what(run: Run, mounts: FakeMounts) -> None:
    checkpoints = [
        {"path": "step_1", "complete": True, "durable": True, "files": 9, "bytes": 1 << 30,
         "survives": "site"},
        {"path": "step_2", "complete": True, "durable": False, "files": 9, "bytes": 1 << 30,
         "survives": "reboot"},
        {"path": "step_3", "complete": False, "durable": False, "files": 1, "bytes": 5,
         "survives": "reboot"},
    ]  # fmt: skip
    effects = [
        {"path": f"/mnt/ckpt/f{n}", "kind": "publish", "class": "barrier", "state": "sealed",
         "waits_for": [f"/mnt/ckpt/w{m}" for m in range(n)]}
        for n in range(12)
    ]  # fmt: skip
    text = _human(run, mounts, checkpoints=checkpoints, effects=effects)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["step_1"][1] == "durable"
    assert rows["step_2"][1] == "complete"
    assert rows["step_3"][1:5] == ["incomplete", "1", "5", "B"]
    assert "/mnt/ckpt/w0, /mnt/ckpt/w1, /mnt/ckpt/w2 and 6 more" in text
    assert "and 2 more pending changes" in text
    assert "publish (barrier)" in text


def test_names_cannot_steer_the_terminal(run: Run, mounts: FakeMounts) -> None:
    text = _human(run, mounts, errors=[{"path": "/m/\x1b[2J\udcff", "error": "a\nb [red]c"}])
    assert "\x1b" not in text
    assert "/m/\\x1b[2J\\udcff" in text
    assert "a\\nb [red]c" in text


# ---- without a path ----------------------------------------------------------------------------


def test_no_mounts(run: Run, mounts: FakeMounts) -> None:
    assert run("status")[:2] == (0, "No cachefs mounts.\n")
    ran = run("status", "--json")
    assert ran.code == 2
    assert "none is mounted here" in ran.err


def test_the_only_mount_needs_no_name(run: Run, mounts: FakeMounts) -> None:
    with mounts.daemon("/mnt/ckpt", Script().handlers):
        assert json.loads(run("status", "--json").out) == MOUNT


def test_several_mounts(run: Run, mounts: FakeMounts) -> None:
    with (
        mounts.daemon("/mnt/a", Script(mountpoint="/mnt/a").handlers),
        mounts.daemon("/mnt/longer", Script(mountpoint="/mnt/longer").handlers),
    ):
        ran = run("status")
        assert ran.code == 0
        assert ran.out.index("/mnt/a") < ran.out.index("/mnt/longer")
        ran = run("status", "--json")
    assert ran.code == 2
    assert "/mnt/a, /mnt/longer" in ran.err


def test_a_dead_mount_does_not_hide_the_others(run: Run, mounts: FakeMounts) -> None:
    mounts.add("/mnt/dead")
    mounts.write_run_file("/mnt/dead")
    with mounts.daemon("/mnt/zz", Script(mountpoint="/mnt/zz").handlers):
        ran = run("status")
    assert ran.code == 1
    assert "/mnt/dead: its daemon (pid 9999999) does not answer" in ran.out
    assert "/mnt/zz" in ran.out


# ---- a path ------------------------------------------------------------------------------------


def test_a_path(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    script.path = {**FILE, "waits_for": ["/mnt/ckpt/a", "/mnt/ckpt/b"], "error": "503"}
    with mounts.daemon("/mnt/ckpt", script.handlers):
        text = run("status", FILE["path"]).out
        assert json.loads(run("status", FILE["path"], "--json").out) == script.path
    assert script.asked == [{"path": FILE["path"]}] * 2
    assert "uploading" in text
    assert "5.00 GiB" in text
    assert "1.00 GiB" in text
    assert "/mnt/ckpt/a, /mnt/ckpt/b" in text
    assert "503" in text
    assert "etag" not in text


def test_a_path_that_is_missing(run: Run, mounts: FakeMounts) -> None:
    with mounts.daemon("/mnt/ckpt", Script().handlers):
        ran = run("status", "/mnt/ckpt/missing")
    assert ran == (1, "", "cachefs: /mnt/ckpt/missing: no such file\n")


# ---- ls ----------------------------------------------------------------------------------------


def test_ls(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    with mounts.daemon("/mnt/ckpt", script.handlers):
        ran = run("ls", "/mnt/ckpt/step_1")
        assert json.loads(run("ls", "/mnt/ckpt/step_1", "--json").out) == {"entries": ENTRIES}
    assert script.asked[0] == {"path": "/mnt/ckpt/step_1"}
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == ["SIZE", "MODIFIED", "STATE", "SURVIVES", "NAME"]
    assert [line[-1] for line in lines[1:]] == [
        "a\\x1b[31m",
        "latest",
        "model.safetensors",
        "step_1/",
    ]
    assert lines[3][:2] == ["5.00", "GiB"]
    assert lines[3][-3:-1] == ["durable", "site"]


def test_ls_columns_start_at_the_same_place(run: Run, mounts: FakeMounts) -> None:
    with mounts.daemon("/mnt/ckpt", Script().handlers):
        lines = run("ls", "/mnt/ckpt").out.splitlines()
    column = lines[0].index("NAME")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_ls_of_an_empty_directory_prints_nothing(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    script.entries = []
    with mounts.daemon("/mnt/ckpt", script.handlers):
        assert run("ls", "/mnt/ckpt") == (0, "", "")


def test_long_lines_are_not_folded_for_a_pipe(run: Run, mounts: FakeMounts) -> None:
    script = Script()
    script.entries = [{**ENTRIES[0], "name": "n" * 250}]
    with mounts.daemon("/mnt/ckpt", script.handlers):
        assert "n" * 250 in run("ls", "/mnt/ckpt").out


@pytest.mark.parametrize("verb", ["status", "ls", "wait", "flush"])
def test_a_path_in_no_mount(run: Run, mounts: FakeMounts, verb: str) -> None:
    ran = run(verb, "/tmp")
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err == "cachefs: /tmp: not in a cachefs mount; `cachefs status` lists mounts\n"


@pytest.mark.parametrize("verb", ["status", "ls", "wait", "flush"])
def test_a_daemon_that_is_dead(run: Run, mounts: FakeMounts, verb: str) -> None:
    mounts.add("/mnt/ckpt")
    mounts.write_run_file("/mnt/ckpt")
    ran = run(verb, "/mnt/ckpt/x")
    assert ran.code == 1
    assert ran.err.startswith("cachefs: /mnt/ckpt: its daemon (pid 9999999) does not answer: ")
    assert "/var/log/c" in ran.err
    assert "cachefs unmount --force /mnt/ckpt" in ran.err
    assert ran.err.count("\n") == 1


def test_a_mount_without_a_run_file(run: Run, mounts: FakeMounts) -> None:
    mounts.add("/mnt/ckpt")
    ran = run("status", "/mnt/ckpt")
    assert ran.code == 1
    assert "ask as root or as the user who mounted it" in ran.err
