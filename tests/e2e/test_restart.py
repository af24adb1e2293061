"""Death and resurrection: whatever a write returned for arrives in the bucket, byte for byte."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Failed, Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

NO_TAKEOVER = {"mount.takeover": "off"}
LATER = {"flush.settle": "10s", **NO_TAKEOVER}
"""Nothing is uploaded before the kill."""
DIED = "no takeover|died|killed|exit|signal|gone|abort|ended|restart|crash|recover|orphan"


def _die(mount: Mount) -> None:
    """SIGKILL the daemon; without takeover its supervisor takes the mount away."""
    mount.kill_daemon()
    mount.wait_gone()


def test_killed_with_dirty_files(mounted: MountFactory, bucket: Any) -> None:
    """SIGKILL, mount again: all of it arrives, with names, attributes and links."""
    mount = mounted(bucket, options=LATER, allow=(DIED,))
    top = mount.path
    (top / "d" / "empty").mkdir(parents=True)
    bodies = {f"d/shard{n}.bin": os.urandom(n * 300_000) for n in range(8)}
    bodies["big.bin"] = os.urandom(24 << 20)
    for name, body in bodies.items():
        (top / name).write_bytes(body)
    os.chmod(top / "big.bin", 0o604)
    os.utime(top / "big.bin", ns=(10**18, 10**18))
    os.symlink("big.bin", top / "link")
    os.link(top / "big.bin", top / "hard")
    os.rename(top / "d" / "shard1.bin", top / "d" / "renamed")
    bodies["d/renamed"] = bodies.pop("d/shard1.bin")
    os.unlink(top / "d" / "shard2.bin")
    del bodies["d/shard2.bin"]
    assert bucket.keys() == []
    _die(mount)
    mount.start()
    for name, body in bodies.items():
        assert (top / name).read_bytes() == body, name
    assert (top / "hard").stat().st_nlink == 2
    mount.wait()
    expected = {**bodies, "hard": bodies["big.bin"], "link": b"big.bin", "d/empty/": b""}
    assert bucket.keys() == sorted(expected)
    for name, body in expected.items():
        assert bucket.get(name) == body, name
    assert bucket.attributes("big.bin").permissions == 0o604
    assert bucket.attributes("big.bin").mtime == 1e9


@pytest.mark.parametrize("held", ["keep", "publish"])
def test_killed_while_a_file_is_open(
    mounted: MountFactory, bucket: Any, client: Client, held: str
) -> None:
    """What write() returned for is there although the writer never closed; it is published only
    once it is closed anew, or if that is what is wanted."""
    mount = mounted(bucket, options={"flush.held": held, **NO_TAKEOVER}, allow=(DIED,))
    actor = client.actor(mount.path)
    actor("open", 0, "growing.bin", "RDWR|CREAT")
    expected = b""
    from tests.support.actor import pattern

    for number in range(1, 40):
        actor("write", 0, number, 100_001)
        expected += pattern(number, 100_001)
    actor("pwrite", 0, 99, 1000, 50_000)
    expected = expected[:50_000] + pattern(99, 1000) + expected[51_000:]
    _die(mount)
    actor.close()
    mount.start()
    assert (mount.path / "growing.bin").read_bytes() == expected
    if held == "keep":
        assert os.getxattr(mount.path / "growing.bin", "user.cachefs.state") == b"held"
        with pytest.raises(Failed) as caught:
            mount.wait()
        assert caught.value.exit_code == 5
        assert bucket.keys() == []
        os.close(os.open(mount.path / "growing.bin", os.O_WRONLY))
    mount.wait()
    assert bucket.get("growing.bin") == expected


@pytest.mark.parametrize("after", ["nothing", "write"])
@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_killed_between_close_and_release(
    mounted: MountFactory, bucket: Any, client: Client, cache: str, after: str
) -> None:
    """A descriptor was closed and the file never released, as when a kill comes in between: it is
    whole, unless something was written after that. The close waits for no disk."""
    mount = mounted(bucket, cache=cache, options=NO_TAKEOVER, allow=(DIED,))
    actor = client.actor(mount.path)
    actor("open", 0, "shard.bin", "RDWR|CREAT")
    actor("write", 0, 1, 100_001)
    actor("dup", 0, 1)
    actor("close", 0)
    if after == "write":
        actor("write", 1, 2, 100_001)
    files = [each for each in (mount.cache_dirs[0] / "files").rglob("*") if each.is_file()]
    written = [each for each in files if each.exists() and each.stat().st_size]  # Not in advance.
    assert [os.listxattr(each) for each in written] == [[]]
    _die(mount)
    actor.close()
    mount.start()
    if after == "write":
        assert mount.xattr("state", "shard.bin") == "held"
        os.close(os.open(mount.path / "shard.bin", os.O_WRONLY))
    mount.wait()
    assert len(bucket.get("shard.bin")) == (200_002 if after == "write" else 100_001)


def test_killed_in_the_middle_of_uploads(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Multipart uploads in flight: nothing is lost, no stale upload stays behind."""
    mount = mounted(
        bucket,
        endpoint=link.endpoint,
        options={"flush.part_size": "5MiB", **NO_TAKEOVER},
        allow=(DIED,),
    )
    link.delay = 0.4
    bodies = {f"m{n}.bin": os.urandom(22 << 20) for n in range(3)}
    for name, body in bodies.items():
        (mount.path / name).write_bytes(body)
    time.sleep(1.2)
    _die(mount)
    link.delay = 0
    mount.start()
    mount.wait()
    assert bucket.keys() == sorted(bodies)
    for name, body in bodies.items():
        assert bucket.get(name) == body
    poll(lambda: bucket.uploads() == [], 20, what="no upload left behind")


def test_killed_right_after_a_rename(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """An upload of old/c hangs, old becomes new, SIGKILL: only new/c in the end."""
    mount = mounted(bucket, endpoint=link.endpoint, options=NO_TAKEOVER, allow=(DIED,))
    (mount.path / "old").mkdir()
    link.delay = 1.0
    (mount.path / "old" / "c").write_bytes(b"content")
    time.sleep(0.3)
    os.rename(mount.path / "old", mount.path / "new")
    _die(mount)
    link.delay = 0
    mount.start()
    mount.wait()
    poll(lambda: bucket.keys() == ["new/c"], 10)


def test_killed_after_removals(mounted: MountFactory, bucket: Any) -> None:
    """Deletes that the bucket has not seen yet are not forgotten."""
    mount = mounted(bucket, options={"flush.settle": "500ms", **NO_TAKEOVER}, allow=(DIED,))
    for number in range(10):
        (mount.path / f"f{number}").write_bytes(b"x")
    mount.wait()
    for number in range(9):
        os.unlink(mount.path / f"f{number}")
    _die(mount)
    mount.start()
    assert os.listdir(mount.path) == ["f9"]
    mount.wait()
    assert bucket.keys() == ["f9"]


def test_machine_crash_with_synced_files(mounted: MountFactory, bucket: Any) -> None:
    """Daemon and supervisor die together; the next mount clears up and finds all."""
    mount = mounted(bucket, options={"flush.settle": "10s"}, cache="disk", allow=(DIED,))
    bodies = {f"f{n}": os.urandom(50_000) for n in range(20)}
    for name, body in bodies.items():
        fd = os.open(mount.path / name, os.O_WRONLY | os.O_CREAT)
        os.write(fd, body)
        os.fsync(fd)
        os.close(fd)
    mount.crash()
    mount.start()
    assert {n: (mount.path / n).read_bytes() for n in os.listdir(mount.path)} == bodies
    mount.wait()
    assert bucket.keys() == sorted(bodies)


def test_killed_again_and_again(mounted: MountFactory, bucket: Any, client: Client) -> None:
    """Five kills under load: every file that was closed arrives whole."""
    mount = mounted(bucket, options={"flush.settle": "30ms", **NO_TAKEOVER}, allow=(DIED,))

    def save(folder: str, first: int) -> list[str]:
        done = []
        top = os.open(folder, os.O_RDONLY)  # a path would lead below the mount once that is gone
        for number in range(first, first + 1000):
            body = (f"{number} " * 3000).encode()
            part, name = f"t{number}.part", f"f{number}"
            try:
                fd = os.open(part, os.O_WRONLY | os.O_CREAT, dir_fd=top)
                os.write(fd, body)
                os.close(fd)
                os.rename(part, name, src_dir_fd=top, dst_dir_fd=top)
            except OSError:
                break
            done.append(name)
        return done

    saved: list[str] = []
    for turn in range(5):
        running = client.start(save, mount.path, turn * 1000)
        poll((mount.path / f"f{turn * 1000 + 10 + 5 * turn}").exists)
        _die(mount)
        saved += running.result()
        mount.start()
    names = set(os.listdir(mount.path))
    mount.wait(*(mount.path / name for name in names if name.startswith("f")))
    assert len(saved) > 50
    assert set(saved) <= names
    for name in sorted(names):
        if name.startswith("f"):
            expected = (f"{name[1:]} " * 3000).encode()
            assert bucket.get(name) == expected, name


def test_remount_keeps_everything(mounted: MountFactory, bucket: Any) -> None:
    """Unmount with a full drain, mount again: content from the cache, nothing dirty."""
    mount = mounted(bucket)
    (mount.path / "f").write_bytes(b"x" * 100_000)
    number = (mount.path / "f").stat().st_ino
    mount.remount()
    assert (mount.path / "f").read_bytes() == b"x" * 100_000
    assert (mount.path / "f").stat().st_ino == number
    assert mount.status()["dirty_files"] == 0
    assert bucket.keys() == ["f"]


def test_sigterm_drains(mounted: MountFactory, bucket: Any) -> None:
    """SIGTERM to the daemon: everything is uploaded, then it is gone."""
    mount = mounted(bucket, options={"flush.settle": "10s"})
    for number in range(10):
        (mount.path / f"f{number}").write_bytes(os.urandom(100_000))
    mount.kill_daemon(signal.SIGTERM, wait=False)
    mount.wait_gone(30)
    assert len(bucket.keys()) == 10


def test_umount_by_hand(mounted: MountFactory, bucket: Any) -> None:
    """umount(8) instead of `cachefs unmount`: the processes end, what was left arrives later."""
    from tests.support.client import program

    mount = mounted(bucket, options={"flush.settle": "10s"})
    (mount.path / "f").write_bytes(b"content")
    program("umount", mount.path)
    mount.wait_gone(30)
    if bucket.keys() != ["f"]:
        mount.start()
        mount.wait()
        assert bucket.get("f") == b"content"


@pytest.mark.parametrize("how", ["removed", "truncated"])
def test_cache_file_spoiled_behind_its_back(mounted: MountFactory, bucket: Any, how: str) -> None:
    """A durable file whose cache file vanished is fetched again; never zeros."""
    mount = mounted(bucket, allow=("cache|missing|refetch|lost|short",))
    body = os.urandom(200_000)
    (mount.path / "f").write_bytes(body)
    mount.wait()
    assert mount.unmount() == 0
    mount.wait_gone()
    for folder in mount.cache_dirs:
        for file in (folder / "files").rglob("*"):
            if file.is_file():
                file.unlink() if how == "removed" else os.truncate(file, 10)
    mount.start()
    assert (mount.path / "f").read_bytes() == body


def test_dirty_cache_file_lost(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """A dirty file whose cache file vanished: EIO and an alarm, never zeros, never an upload."""
    mount = mounted(bucket, endpoint=link.endpoint, options=LATER, allow=(".",))
    mount.spoiled = True
    assert os.listdir(mount.path) == []
    link.cut()
    (mount.path / "f").write_bytes(os.urandom(200_000))
    (mount.path / "g").write_bytes(b"fine")
    assert mount.unmount(drain_timeout=0) == 3
    mount.wait_gone()
    lost = 0
    for folder in mount.cache_dirs:
        for file in (folder / "files").rglob("*"):
            if file.is_file() and file.stat().st_size == 200_000:
                file.unlink()
                lost += 1
    assert lost == 1
    link.mend()
    mount.start()
    with pytest.raises(OSError):
        (mount.path / "f").read_bytes()
    assert (mount.path / "g").read_bytes() == b"fine"
    mount.ask("flush", {"paths": [str(mount.path / "g")]})
    poll(lambda: bucket.keys() == ["g"], 20)
