"""The disk under the cache fails: callers learn it, nothing acknowledged is lost, all goes on."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.badcalls import BadCalls
from tests.support.mounts import Mount, MountFactory, poll

TOLD = {"cache.commit_patience": "10s"}
"""However late a busy machine writes: who makes a change is told that the disk failed it."""
EXPECTED = (
    "stalled|database|disk|recorded|begun anew|synced|checkpoint|failed|Input/output|No space"
    "|Read-only|Too many|cache file|readonly|unable to open"
)
"""Log lines of a daemon whose disk fails."""


@pytest.fixture
def badcalls(tmp_path: Path) -> BadCalls:
    return BadCalls(tmp_path)


def _write(path: Path, body: bytes, *, sync: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(fd, body)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_often(path: Path) -> None:
    """Until there are no cache files left that were made before they were needed."""
    for _ in range(300):
        _write(path, b"")


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # The kernel has it in memory.
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


Act = Callable[[Path], object]
ACTS: dict[str, tuple[str, str, Act]] = {
    "write": ("write", "/files/", lambda top: _write(top / "new", b"x" * 100_000)),
    "fsync": ("sync", "/files/", lambda top: _write(top / "new", b"x", sync=True)),
    "fsync of the database": ("sync", "-wal", lambda top: _write(top / "new", b"x", sync=True)),
    "create": ("create", "/files/", lambda top: _write_often(top / "new")),
    "create in the database": ("write", "-wal", lambda top: _write(top / "new", b"")),
    "mkdir": ("write", "-wal", lambda top: os.mkdir(top / "newdir")),
    "rename": ("write", "-wal", lambda top: os.rename(top / "kept", top / "other")),
    "unlink": ("write", "-wal", lambda top: os.unlink(top / "kept")),
    "chmod": ("write", "-wal", lambda top: os.chmod(top / "kept", 0o600)),
    "truncate": ("truncate", "/files/", lambda top: os.truncate(top / "kept", 10)),
    "open": ("open", "/files/", lambda top: os.open(top / "kept", os.O_RDONLY)),
    "read": ("read", "/files/", lambda top: _read(top / "kept")),
}
"""What a program does -> the call that fails, on which files, and how it is done."""
ANSWERS = {
    errno.EIO: {errno.EIO},
    errno.ENOSPC: {errno.ENOSPC},
    errno.EROFS: {errno.EROFS, errno.EIO},
    errno.EMFILE: {errno.EMFILE},
}
"""What the disk says -> what the program may be told."""


def _fail(name: str, top: Path, act: Act, error: int) -> None:
    try:
        act(top)
    except OSError as caught:
        assert caught.errno in ANSWERS[error], f"{name}: {caught}"
    else:
        pytest.fail(f"{name} went well")


def _sound(mount: Mount, body: bytes) -> None:
    """Whatever failed did not happen, and everything works again."""
    assert (mount.path / "kept").read_bytes() == body
    assert not (mount.path / "newdir").exists()
    assert not (mount.path / "other").exists()
    (mount.path / "new").unlink(missing_ok=True)
    (mount.path / "after").write_bytes(body)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
@pytest.mark.parametrize("error", ANSWERS, ids=errno.errorcode.get)
def test_every_call_that_fails(
    mounted: MountFactory, dir_store: Any, badcalls: BadCalls, error: int
) -> None:
    """Each is told to its caller, leaves what was there, and ends with the trouble."""
    hold = {
        "flush.settle": "1min",
        "flush.settle_max": "1min",
        **TOLD,
    }  # uploads are not what is tried here
    mount = mounted(dir_store, env=badcalls.env, cache="disk", options=hold, allow=(EXPECTED,))
    body = os.urandom(300_000)
    (mount.path / "kept").write_bytes(body)
    pid = mount.daemon_pid
    for name, (call, part, act) in ACTS.items():
        if error == errno.EMFILE and call not in ("create", "open"):
            continue
        with badcalls.failing(call, part, error):
            _fail(name, mount.path, act, error)
        assert mount.status()["pid"] == pid, name
        _sound(mount, body)
    mount.wait(timeout=60)
    assert dir_store.get("kept") == body
    assert dir_store.get("after") == body
    told = [line for line in mount.log.splitlines() if "Traceback" in line]
    assert not told, "one line each"


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
@pytest.mark.parametrize("call", ["read", "open"])
def test_a_file_that_cannot_be_read_for_its_upload(
    mounted: MountFactory, dir_store: Any, badcalls: BadCalls, call: str
) -> None:
    """It is stalled and told, nothing is published of it; it goes out when it can be read."""
    options = {"flush.settle": "1s"}
    mount = mounted(dir_store, env=badcalls.env, options=options, cache="disk", allow=(EXPECTED,))
    body = os.urandom(200_000)
    (mount.path / "f").write_bytes(body)
    with badcalls.failing(call, "/files/", errno.EIO):
        poll(lambda: mount.xattr("state", "f") == "stalled", 20)
        assert re.search("Input/output error", mount.xattr("error", "f"))
        assert dir_store.keys() == []
    poll(lambda: mount.xattr("state", "f") == "durable", 40)
    assert dir_store.get("f") == body


@pytest.mark.parametrize("lane", ["tracked"], indirect=True)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_database_that_fails_while_files_go_out(
    mounted: MountFactory, dir_store: Any, badcalls: BadCalls, error: int
) -> None:
    """What is in the store and could not be noted is noted later; nothing is lost or doubled."""
    mount = mounted(
        dir_store,
        env=badcalls.env,
        options={"flush.settle": "1s", **TOLD},
        cache="disk",
        allow=(EXPECTED,),
    )
    bodies = {f"f{n}": os.urandom(1000) for n in range(20)}
    for name, body in bodies.items():
        (mount.path / name).write_bytes(body)
    pid = mount.daemon_pid
    with badcalls.failing("write", "-wal", error):
        poll(lambda: badcalls.count > 5, 20)
    mount.wait(timeout=40)
    assert mount.status()["pid"] == pid
    assert {name: dir_store.get(name) for name in bodies} == bodies
    assert dir_store.keys() == sorted(bodies)
