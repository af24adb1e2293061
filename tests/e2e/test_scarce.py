"""Inodes, descriptors and memory run out: programs are told, nothing is lost, life goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import MountFactory, poll

pytestmark = pytest.mark.parametrize("lane", ["tracked"], indirect=True)
INODES = 400


@pytest.fixture
def few_inodes(tmp_path: Path, after_mounts: ExitStack) -> Path:
    """A filesystem that holds a few hundred files."""
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size=200m,nr_inodes={INODES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", place], check=True))
    return place


def test_no_inode_is_left(mounted: MountFactory, dir_store: Any, few_inodes: Path) -> None:
    """A new file is ENOSPC; those that are there go out, and what goes makes room."""
    mount = mounted(
        dir_store,
        cache_dirs=[few_inodes / "cache"],
        options={"cache.meta_reserve": "0", "flush.settle": "10s"},
        allow=("No space|disk|room|full",),
    )
    written: dict[str, bytes] = {}
    with pytest.raises(OSError) as caught:
        for number in range(INODES + 1):
            body = b"body %d" % number
            (mount.path / f"f{number}").write_bytes(body)
            written[f"f{number}"] = body
    assert caught.value.errno == errno.ENOSPC
    assert len(written) > 50
    assert (mount.path / "f7").read_bytes() == b"body 7"
    for name in ("f7", "f8"):  # One for the new file, one for the directory that it may need.
        os.unlink(mount.path / name)
        del written[name]
    (mount.path / "new").write_bytes(b"in their place")
    written["new"] = b"in their place"
    mount.wait(timeout=40)
    assert dir_store.keys() == sorted(written)
    assert all(dir_store.get(name) == body for name, body in written.items())


def _limit(pid: int, kind: int, soft: int) -> None:
    hard = resource.prlimit(pid, kind)[1]
    resource.prlimit(pid, kind, (soft, hard))


def test_no_descriptor_is_left(mounted: MountFactory, dir_store: Any) -> None:
    """EMFILE for what needs one; what is open goes on; with descriptors back all is as before."""
    # Small files are made from descriptors that are open already.
    allowed = ("Too many open files|begun anew|stalled|unable to open",)
    mount = mounted(dir_store, options={"mount.small_files": "off"}, allow=allowed)
    (mount.path / "kept").write_bytes(b"kept")
    mount.wait()
    fd = os.open(mount.path / "open", os.O_WRONLY | os.O_CREAT)
    limit = resource.prlimit(mount.daemon_pid, resource.RLIMIT_NOFILE)[0]
    _limit(mount.daemon_pid, resource.RLIMIT_NOFILE, 3)
    try:
        for path in ("new", "kept"):
            with pytest.raises(OSError) as caught:
                os.close(os.open(mount.path / path, os.O_RDWR | os.O_CREAT))
            assert caught.value.errno == errno.EMFILE
        assert os.write(fd, b"goes on") == 7
        assert sorted(os.listdir(mount.path)) == ["kept", "open"]
    finally:
        _limit(mount.daemon_pid, resource.RLIMIT_NOFILE, limit)
    os.close(fd)
    assert (mount.path / "kept").read_bytes() == b"kept"
    (mount.path / "new").write_bytes(b"new")
    mount.wait(timeout=40)
    assert {name: dir_store.get(name) for name in dir_store.keys()} == {  # noqa: SIM118
        "kept": b"kept",
        "open": b"goes on",
        "new": b"new",
    }


def _movers(daemon: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == daemon:
                words = path.with_name("cmdline").read_bytes()
                found += [int(path.parts[2])] if b"mover" in words else []
    return found


def test_no_memory_is_left(mounted: MountFactory, dir_store: Any) -> None:
    """Neither for the daemon nor for new movers. Where requests cannot even be read another daemon
    takes over; every file that was closed without an error arrives whole."""
    allowed = (
        "mover|emory|stalled|internal error|request failed|cannot be read any more|ended unexp"
    )
    mount = mounted(dir_store, allow=(allowed,))
    (mount.path / "first").write_bytes(b"first")
    mount.wait()
    daemon = mount.daemon_pid
    used = int(Path(f"/proc/{daemon}/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(daemon, resource.RLIMIT_AS, used // 2)
    for mover in _movers(daemon):
        os.kill(mover, signal.SIGKILL)
    poll(lambda: "mover died" in mount.log, 30)
    written = {}
    for number in range(20):
        with contextlib.suppress(OSError):
            body = os.urandom(300_000)
            (mount.path / f"f{number}").write_bytes(body)
            written[f"f{number}"] = body
    assert (mount.path / "first").read_bytes() == b"first"
    with contextlib.suppress(ProcessLookupError):
        _limit(daemon, resource.RLIMIT_AS, resource.RLIM_INFINITY)
    mount.wait(timeout=60)
    assert written
    assert {name: dir_store.get(name) for name in written} == written
