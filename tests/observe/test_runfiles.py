"""Run files, and finding the mount of a path in the kernel's table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.observe import runfiles
from cachefs.observe.runfiles import Location, RunFile


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setattr(runfiles, "_ROOT_DIR", str(path))
    monkeypatch.setattr(runfiles, "_USERS_DIR", str(tmp_path / "users"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    return runfiles.run_dir()


def _run(mountpoint: str = "/mnt/ckpt", pid: int = 7) -> RunFile:
    return RunFile(mountpoint, pid, 6, "/run/x.sock", ("/cache/a", "/cache/b"), "/var/log/x")


# ---- files -------------------------------------------------------------------------------------


def test_round_trip() -> None:
    assert runfiles.read("/mnt/ckpt") is None
    path = runfiles.write(_run())
    assert path == runfiles.run_path("/mnt/ckpt")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert runfiles.read("/mnt/ckpt") == _run()


def test_a_mountpoint_that_is_not_utf8() -> None:
    run = _run(os.fsdecode(b"/mnt/\xff\n"))
    runfiles.write(run)
    assert runfiles.read(run.mountpoint) == run


def test_a_new_daemon_replaces_the_file(run_dir: Path) -> None:
    runfiles.write(_run(pid=7))
    runfiles.write(_run(pid=8))
    found = runfiles.read("/mnt/ckpt")
    assert found is not None
    assert found.pid == 8
    assert len(list(run_dir.iterdir())) == 1


def test_all_of_them_in_order_of_mountpoints() -> None:
    for mountpoint in ("/b", "/a", "/c"):
        runfiles.write(_run(mountpoint))
    assert [run.mountpoint for run in runfiles.read_all()] == ["/a", "/b", "/c"]


def test_removal_takes_the_socket_along_and_may_be_repeated() -> None:
    runfiles.write(_run())
    runfiles.socket_path("/mnt/ckpt").touch()
    runfiles.remove("/mnt/ckpt")
    runfiles.remove("/mnt/ckpt")
    assert runfiles.read_all() == []
    assert not runfiles.socket_path("/mnt/ckpt").exists()


def test_the_socket_lies_beside_and_its_path_is_short_enough() -> None:
    path = runfiles.socket_path("/very" * 500)
    assert path.parent == runfiles.run_path("/very" * 500).parent
    assert len(path.name) < 30


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "{}", '{"mountpoint": "/mnt/ckpt"}', '{"cache_dirs": 3}']
)
def test_files_that_are_none_are_passed_over(run_dir: Path, text: str) -> None:
    run_dir.mkdir(parents=True)
    runfiles.run_path("/mnt/ckpt").write_text(text)
    assert runfiles.read("/mnt/ckpt") is None
    assert runfiles.read_all() == []


def test_unknown_fields_of_a_newer_version_are_passed_over() -> None:
    path = runfiles.write(_run())
    path.write_text(path.read_text().replace("{", '{"colour": "red", ', 1))
    assert runfiles.read("/mnt/ckpt") == _run()


@pytest.mark.skipif(os.geteuid() != 0, reason="looks into other users' directories as root")
def test_root_sees_mounts_of_users_and_no_fifo_stops_it(tmp_path: Path) -> None:
    users = tmp_path / "users" / "1000" / "cachefs"
    users.mkdir(parents=True)
    runfiles.write(_run("/home/u/ckpt"))
    runfiles.run_path("/home/u/ckpt").rename(users / "0.json")
    os.mkfifo(users / "1.json")
    (users / "2.json").symlink_to("0.json")
    assert [run.mountpoint for run in runfiles.read_all()] == ["/home/u/ckpt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_run_directory_of_someone_else_is_not_used(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    os.chown(run_dir, 65534, 65534)
    with pytest.raises(PermissionError, match="not a directory of this user"):
        runfiles.write(_run())


def test_users_have_a_directory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert runfiles.run_dir() == tmp_path / "xdg" / "cachefs"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runfiles.run_dir().name == "cachefs-1234"


# ---- the mount table ---------------------------------------------------------------------------

TABLE = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:20 / /proc rw - proc proc rw
30 21 0:40 / /mnt/ckpt rw,nosuid shared:9 master:2 - fuse.cachefs s3://bucket/run rw,user_id=0
31 30 0:41 / /mnt/ckpt/inner rw - tmpfs tmpfs rw
32 21 0:42 / /mnt/with\040space\011\134 rw - fuse.cachefs s3://b rw
33 21 0:43 / /mnt/covered rw - fuse.cachefs s3://b rw
34 33 0:44 / /mnt/covered rw - tmpfs tmpfs rw
35 21 0:40 /step_1 /jobs/step rw - fuse.cachefs s3://bucket/run rw
36 21 0:45 / /mnt/other rw - fuse.sshfs host: rw
37 21 0:46 /sub /alone rw - fuse.cachefs s3://b rw
""".lstrip()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    monkeypatch.setattr(runfiles, "MOUNTINFO", str(path))
    return path


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("path", "mountpoint", "inside"),
    [
        ("/mnt/ckpt", "/mnt/ckpt", "/mnt/ckpt"),
        ("/mnt/ckpt/", "/mnt/ckpt", "/mnt/ckpt"),
        ("/mnt/ckpt/a/b", "/mnt/ckpt", "/mnt/ckpt/a/b"),
        ("/mnt/ckpt/a/../c", "/mnt/ckpt", "/mnt/ckpt/c"),
        ("/mnt/with space\t\\/f", "/mnt/with space\t\\", "/mnt/with space\t\\/f"),
        ("/jobs/step", "/mnt/ckpt", "/mnt/ckpt/step_1"),
        ("/jobs/step/shard", "/mnt/ckpt", "/mnt/ckpt/step_1/shard"),
        ("/alone/f", "/alone", "/alone/f"),
    ],
)
def test_paths_in_mounts(path: str, mountpoint: str, inside: str) -> None:
    assert runfiles.locate(path) == Location(mountpoint, inside)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "path",
    ["/", "/mnt", "/mnt/ckpt2", "/mnt/ckpt/inner/f", "/mnt/covered", "/mnt/other/x", "/none"],
)
def test_paths_elsewhere(path: str) -> None:
    assert runfiles.locate(path) is None


@pytest.mark.usefixtures("table")
def test_mountpoints_are_those_that_can_be_reached() -> None:
    assert runfiles.mountpoints() == ["/mnt/ckpt", "/mnt/with space\t\\"]


def test_relative_paths(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write_text(f"30 21 0:40 / {tmp_path}/m rw - fuse.cachefs s3://b rw\n")
    monkeypatch.chdir(tmp_path)
    assert runfiles.locate("m/f") == Location(f"{tmp_path}/m", f"{tmp_path}/m/f")


def test_links_outside_are_followed_and_links_inside_are_not(tmp_path: Path, table: Path) -> None:
    mount = tmp_path / "m"
    mount.mkdir()
    (mount / "real").touch()
    (mount / "last").symlink_to("real")
    (tmp_path / "link").symlink_to(mount)
    table.write_text(f"30 21 0:40 / {mount} rw - fuse.cachefs s3://b rw\n")
    assert runfiles.locate(tmp_path / "link") == Location(str(mount), str(mount))
    assert runfiles.locate(tmp_path / "link" / "last") == Location(str(mount), f"{mount}/last")


def test_a_carriage_return_in_a_mountpoint_splits_no_line(table: Path) -> None:
    table.write_bytes(b"30 21 0:40 / /mnt/a\rb rw - fuse.cachefs s3://b rw\n")
    assert runfiles.mountpoints() == ["/mnt/a\rb"]


def test_the_real_table_is_understood() -> None:
    assert isinstance(runfiles.mountpoints(), list)
    assert runfiles.locate("/proc/self") is None


def test_only_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import cachefs.observe.runfiles;"
        "import cachefs.observe.client;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'cachefs'}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
