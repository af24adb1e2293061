"""A cache directory that another machine goes on with, and what strangers may see of it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import Mount, MountFactory, poll, run_file

DIED = "died|killed|exit|signal|abort|ended|recover|orphan|machine went down"
LATER = {"mount.takeover": "off", "flush.part_size": "5MiB"}


def _on_another_machine(cache: Path) -> None:
    """The run of the machine that the cache was last in use in is another one's."""
    database = sqlite3.connect(cache / "meta" / "cachefs.db")
    database.execute("UPDATE setting SET value='of another machine' WHERE key='boot'")
    database.commit()
    database.close()


@pytest.mark.either_lane
@pytest.mark.timeout(90)
def test_another_machine_finishes_the_uploads(
    mounted: MountFactory, bucket: Any, link: Any, disk_dir: Path
) -> None:
    """A node dies with its uploads under way; its disk is put into another one."""
    first = mounted(
        bucket,
        endpoint=link.endpoint,
        cache_dirs=[disk_dir / "here"],
        options={**LATER, "node.id": "one"},
        allow=(DIED,),
    )
    assert os.listdir(first.path) == []
    link.delay = 0.5
    bodies = {"d/large.bin": os.urandom(18 << 20), "small": b"x", "d/e/f.pt": os.urandom(9000)}
    (first.path / "d" / "e").mkdir(parents=True)
    for name, body in bodies.items():
        (first.path / name).write_bytes(body)
    first.wait(survives="reboot")
    poll(lambda: bucket.uploads(), 20, what="an upload under way")
    link.cut()
    first.crash()
    shutil.move(disk_dir / "here", disk_dir / "there")
    _on_another_machine(disk_dir / "there")
    link.mend()
    link.delay = 0
    second = mounted(bucket, cache_dirs=[disk_dir / "there"], options={**LATER, "node.id": "two"})
    assert second.status()["node"] == "two"
    for name, body in bodies.items():
        assert (second.path / name).read_bytes() == body, name
    second.wait(timeout=60)
    assert bucket.keys() == sorted(bodies)
    for name, body in bodies.items():
        assert bucket.get(name) == body, name
    poll(lambda: bucket.uploads() == [], 20, what="no upload left behind")


def _ours(mount: Mount) -> list[Path]:
    """Every file that a mount makes outside of its own tree."""
    run = run_file(mount.path)
    beside = [run.with_suffix(end) for end in (".json", ".sock", ".lock", ".settings")]
    assert mount._log is not None
    found = [path for path in beside if path.exists()] + [mount._log]
    assert len(found) == 5
    for folder in mount.cache_dirs:
        found += [folder, *folder.rglob("*")]
    return found


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
def test_nothing_is_shown_to_strangers(
    mounted: MountFactory, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask, files are the daemon's alone; secrets are in no file, log or argument."""
    old = os.umask(0)
    try:
        mount = mounted(bucket, cache_dirs=[tmp_path / "cache"])
    finally:
        os.umask(old)
    (mount.path / "f").write_bytes(b"x" * 5000)
    (mount.path / "d").mkdir()
    mount.wait()
    for path in _ours(mount):
        mode = stat.S_IMODE(path.stat().st_mode)  # also of what a link leads to
        others = 0o027 if path.suffix == ".log" else 0o077
        assert mode & others == 0, f"{path} has mode {mode:o}"
    secrets = [
        value.encode() for name, value in bucket.env.items() if "SECRET" in name or "KEY" in name
    ]
    assert len(secrets) >= 2
    for path in _ours(mount):
        if path.is_file() and not path.is_socket():
            assert not any(secret in path.read_bytes() for secret in secrets), path
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_of(pid, mount)]
    assert len(pids) >= 3  # supervisor, daemon, mover
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert not any(secret in words for secret in secrets), words
    told = f"{mount.status()}{mount.log}".encode()
    assert not any(secret in told for secret in secrets)


def _is_of(pid: str, mount: Mount) -> bool:
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return int(pid) in (mount.daemon_pid, mount.supervisor_pid) or parent == mount.daemon_pid


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
def test_foreign_files_in_the_cache_directory(
    mounted: MountFactory, dir_store: Any, tmp_path: Path
) -> None:
    """They are left alone, by mount, unmount and the next mount."""
    mount = mounted(dir_store, cache_dirs=[tmp_path / "cache"])
    (mount.path / "f").write_bytes(b"mine")
    strange = ["notes.txt", "files/readme", "files/00/x.bak", "meta/old.db", "files/00/007"]
    (tmp_path / "cache" / "files" / "00").mkdir(exist_ok=True)
    for name in strange:
        (tmp_path / "cache" / name).write_bytes(name.encode())
    mount.remount()
    assert (mount.path / "f").read_bytes() == b"mine"
    mount.wait()
    mount.remount()
    for name in strange:
        assert (tmp_path / "cache" / name).read_bytes() == name.encode(), name
