"""Attributes: modes, owners, times, permissions, extended attributes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time

import pytest

from tests.support.client import program
from tests.support.mounts import Mount
from tests.support.work import Work


def _now_slack(value: int) -> bool:
    """Whether a time in ns is about now."""
    return abs(value - time.time_ns()) < 2_000_000_000


def test_mtime_is_the_write_time(work: Work) -> None:
    """At once, after the upload and in the object's metadata."""
    (work / "f").write_bytes(b"x")
    told = (work / "f").stat().st_mtime_ns
    assert _now_slack(told)
    time.sleep(0.02)
    with open(work / "f", "ab") as file:
        file.write(b"y")
    later = (work / "f").stat().st_mtime_ns
    assert later > told
    work.durable()
    assert (work / "f").stat().st_mtime_ns == later
    assert work.bucket.attributes("f").mtime == pytest.approx(later / 1e9, abs=1e-5)


def test_mtime_moves_while_open(work: Work) -> None:
    """stat of a file that is being written shows growth and time."""
    fd = os.open(work / "f", os.O_WRONLY | os.O_CREAT)
    seen = []
    for _ in range(3):
        os.write(fd, b"x" * 1000)
        told = os.stat(work / "f")
        seen.append((told.st_size, told.st_mtime_ns))
        time.sleep(0.02)
    os.close(fd)
    assert [size for size, _ in seen] == [1000, 2000, 3000]
    assert seen[0][1] < seen[1][1] < seen[2][1]
    assert os.stat(work / "f").st_mtime_ns == seen[2][1]


def test_reading_does_not_move_mtime(work: Work) -> None:
    (work / "f").write_bytes(b"x")
    before = (work / "f").stat()
    time.sleep(0.02)
    (work / "f").read_bytes()
    os.close(os.open(work / "f", os.O_RDWR))
    after = (work / "f").stat()
    assert (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns)


def test_utimens(work: Work) -> None:
    """Nanoseconds are kept, survive an upload, and are what the object says."""
    (work / "f").write_bytes(b"x")
    set_to = 1_234_567_890_123_456_789
    os.utime(work / "f", ns=(set_to, set_to))
    assert (work / "f").stat().st_mtime_ns == set_to
    work.durable()
    assert (work / "f").stat().st_mtime_ns == set_to
    assert work.bucket.metadata("f")["mtime"].startswith("1234567890.123456")


def test_utimens_while_open(work: Work) -> None:
    """futimens on an open, written file holds after close."""
    set_to = 1_000_000_000_000_000_001
    fd = os.open(work / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"data")
    os.utime(fd, ns=(set_to, set_to))
    assert os.fstat(fd).st_mtime_ns == set_to
    os.close(fd)
    assert (work / "f").stat().st_mtime_ns == set_to
    work.durable()
    assert work.bucket.attributes("f").mtime == pytest.approx(1e9, abs=1e-5)


@pytest.mark.parametrize("seconds", [2**40, -(2**40), 2**33, -1])
def test_times_beyond_what_can_be_stored(work: Work, seconds: int) -> None:
    """Cut to the last that can, as on a disk; open or not."""
    most = 2**63 // 10**9
    cut = max(-most - 1, min(seconds, most))
    with open(work / "f", "wb", buffering=0) as file:
        file.write(b"x")
        for each in (file.fileno(), work / "f"):
            os.utime(each, times=(seconds, seconds))
            assert os.stat(work / "f").st_mtime_ns // 10**9 == cut
    assert (work / "f").stat().st_mtime_ns // 10**9 == cut
    os.utime(work / "f", times=(0, seconds))
    work.durable()
    assert (work / "f").stat().st_mtime_ns // 10**9 == cut


def test_copy_preserving(work: Work) -> None:
    """cp -p: content, mode and time of the source."""
    source = work.local / "s"
    source.write_bytes(b"content")
    source.chmod(0o741)
    os.utime(source, ns=(10**18, 10**18))
    program("cp", "-p", source, work / "t")
    told = (work / "t").stat()
    assert (told.st_mtime_ns, stat.S_IMODE(told.st_mode)) == (10**18, 0o741)
    work.durable()
    assert work.bucket.attributes("t").permissions == 0o741


def test_chmod_and_chown_after_upload(work: Work) -> None:
    """A change of attributes alone reaches the object; content and time stay."""
    (work / "f").write_bytes(b"content")
    work.durable()
    before = (work / "f").stat()
    os.chmod(work / "f", 0o400)
    os.chown(work / "f", 1234, 5678)
    told = (work / "f").stat()
    assert (stat.S_IMODE(told.st_mode), told.st_uid, told.st_gid) == (0o400, 1234, 5678)
    assert told.st_mtime_ns == before.st_mtime_ns
    work.durable()
    seen = work.bucket.attributes("f")
    assert (seen.permissions, seen.uid, seen.gid) == (0o400, 1234, 5678)
    assert work.bucket.get("f") == b"content"


def test_writing_takes_suid_away(work: Work) -> None:
    """A write, a truncation or a chown by a user other than root clears set-user-id."""
    for number, change in enumerate(("write", "truncate")):
        name = f"f{number}"
        (work / name).write_bytes(b"old")
        os.chmod(work / name, 0o6777)
        actor = work.actor()
        actor("become", 12345, 12345, [])
        if change == "write":
            actor("open", 0, name, "WRONLY")
            actor("write", 0, 1, 10)
            actor("close", 0)
        else:
            actor("truncate", name, 1)
        assert stat.S_IMODE((work / name).stat().st_mode) == 0o777, change


def test_chown_takes_suid_away(work: Work) -> None:
    (work / "f").write_bytes(b"x")
    os.chmod(work / "f", 0o6755)
    os.chown(work / "f", 1000, 1000)
    assert stat.S_IMODE((work / "f").stat().st_mode) == 0o755


def test_permissions_are_enforced(work: Work) -> None:
    """Other users get EACCES or EPERM as on a local disk; groups count, also supplementary ones."""
    work.path.chmod(0o755)
    (work / "private").write_bytes(b"secret")
    os.chmod(work / "private", 0o600)
    (work / "group").write_bytes(b"shared")
    os.chown(work / "group", 0, 777)
    os.chmod(work / "group", 0o640)
    actor = work.actor()
    actor("become", 12345, 12345, [777])
    for command, expected in (
        (("open", 0, "private", "RDONLY"), errno.EACCES),
        (("open", 0, "group", "WRONLY"), errno.EACCES),
        (("open", 0, "new", "WRONLY|CREAT"), errno.EACCES),
        (("unlink", "private"), errno.EACCES),
        (("chmod", "group", 0o666), errno.EPERM),
        (("chown", "group", 12345, -1), errno.EPERM),
        (("truncate", "private", 0), errno.EACCES),
        (("mkdir", "d"), errno.EACCES),
        (("rename", "private", "mine"), errno.EACCES),
    ):
        with pytest.raises(OSError) as caught:
            actor(*command)
        assert caught.value.errno == expected, command
    actor("open", 0, "group", "RDONLY")
    assert bytes.fromhex(actor("read", 0, 100)["hex"]) == b"shared"


def test_sticky_directory(work: Work) -> None:
    """In a sticky directory only the owner removes a file."""
    (work / "tmp").mkdir()
    os.chmod(work / "tmp", 0o1777)
    (work / "tmp" / "roots").touch()
    actor = work.actor()
    actor("become", 12345, 12345, [])
    actor("open", 0, "tmp/mine", "WRONLY|CREAT")
    with pytest.raises(PermissionError):
        actor("unlink", "tmp/roots")
    actor("unlink", "tmp/mine")


def test_setgid_directory(work: Work) -> None:
    """Entries of a set-group-id directory get its group; directories also the bit."""
    (work / "d").mkdir()
    os.chown(work / "d", 0, 4321)
    os.chmod(work / "d", 0o2775)
    (work / "d" / "f").touch()
    (work / "d" / "sub").mkdir()
    assert (work / "d" / "f").stat().st_gid == 4321
    told = (work / "d" / "sub").stat()
    assert told.st_gid == 4321
    assert told.st_mode & stat.S_ISGID


def test_umask(work: Work) -> None:
    """The creator's umask applies once."""
    actor = work.actor()
    actor("umask", 0o027)
    actor("open", 0, "f", "WRONLY|CREAT", 0o666)
    actor("mkdir", "d", 0o777)
    assert stat.S_IMODE((work / "f").stat().st_mode) == 0o640
    assert stat.S_IMODE((work / "d").stat().st_mode) == 0o750


def test_open_of_a_read_only_file_for_its_creator(work: Work) -> None:
    """open(O_CREAT|O_RDWR, 0400) may write although the mode forbids it later."""
    actor = work.actor()
    work.path.chmod(0o777)
    actor("become", 12345, 12345, [])
    actor("open", 0, "f", "RDWR|CREAT", 0o400)
    assert actor("write", 0, 1, 10) == 10
    actor("close", 0)
    with pytest.raises(PermissionError):
        actor("open", 0, "f", "RDWR")


def test_user_xattrs(work: Work) -> None:
    """Set, read, list, replace, remove; the errors of a local disk; kept after an upload."""
    path = work / "f"
    path.write_bytes(b"x")
    os.setxattr(path, "user.run", b"42")
    os.setxattr(path, "user.bin", bytes(range(256)))
    assert os.getxattr(path, "user.bin") == bytes(range(256))
    assert sorted(os.listxattr(path)) == ["user.bin", "user.run"]
    with pytest.raises(FileExistsError):
        os.setxattr(path, "user.run", b"43", os.XATTR_CREATE)
    with pytest.raises(OSError) as caught:
        os.setxattr(path, "user.none", b"", os.XATTR_REPLACE)
    assert caught.value.errno == errno.ENODATA
    os.removexattr(path, "user.bin")
    with pytest.raises(OSError) as caught:
        os.getxattr(path, "user.bin")
    assert caught.value.errno == errno.ENODATA
    work.durable()
    assert os.listxattr(path) == ["user.run"]


def test_xattrs_too_large(work: Work) -> None:
    """What no object can carry is refused at once."""
    path = work / "f"
    path.write_bytes(b"x")
    if work.lane == "local":
        pytest.skip("a local disk has other limits")
    with pytest.raises(OSError) as caught:
        os.setxattr(path, "user.huge", b"x" * 60_000)
    assert caught.value.errno in (errno.E2BIG, errno.ENOSPC)


def test_link_counts_of_directories(work: Work) -> None:
    """find(1) trusts them: 2 plus subdirectories, or 1 for "unknown"."""
    (work / "d" / "sub1").mkdir(parents=True)
    (work / "d" / "sub2").mkdir()
    assert (work / "d").stat().st_nlink in (1, 4)


def test_directory_times(work: Work) -> None:
    """Making and removing entries moves a directory's mtime."""
    (work / "d").mkdir()
    times = [(work / "d").stat().st_mtime_ns]
    actor = work.actor()
    for change in (("mkdir", "d/f"), ("rename", "d/f", "d/g"), ("rmdir", "d/g")):
        time.sleep(0.02)
        actor(*change)
        times.append((work / "d").stat().st_mtime_ns)
    assert times == sorted(set(times))


def test_attributes_survive_a_remount(mounted: object, bucket: object) -> None:
    """Modes, owners, times, links, inode numbers: the same after unmounting and mounting."""
    mount: Mount = mounted(bucket)  # type: ignore[operator]
    top = mount.path
    (top / "d").mkdir(mode=0o750)
    (top / "d" / "f").write_bytes(b"x" * 1000)
    os.chmod(top / "d" / "f", 0o640)
    os.chown(top / "d" / "f", 12, 34)
    os.utime(top / "d" / "f", ns=(10**18, 10**18 + 7))
    os.link(top / "d" / "f", top / "hard")
    os.symlink("d/f", top / "soft")
    os.setxattr(top / "d" / "f", "user.note", b"kept")

    def look() -> list[object]:
        seen: list[object] = []
        for path in ("d", "d/f", "hard", "soft"):
            told = os.lstat(top / path)
            seen.append((path, told.st_ino, told.st_mode, told.st_uid, told.st_gid, told.st_size))
            seen.append((told.st_mtime_ns, told.st_nlink))
        return [*seen, os.readlink(top / "soft"), os.getxattr(top / "hard", "user.note")]

    before = look()
    mount.remount()
    assert look() == before


def test_copy_of_a_tree(work: Work) -> None:
    """shutil.copytree in and out of the mount keeps everything it keeps on a local disk."""
    source = work.local / "tree"
    (source / "sub").mkdir(parents=True)
    for number in range(20):
        (source / "sub" / f"f{number}").write_bytes(os.urandom(number * 1000))
    (source / "link").symlink_to("sub/f1")
    shutil.copytree(source, work / "tree", symlinks=True)
    back = work.local / "back"
    shutil.copytree(work / "tree", back, symlinks=True)
    for number in range(20):
        original, copy = source / "sub" / f"f{number}", back / "sub" / f"f{number}"
        assert original.read_bytes() == copy.read_bytes()
        assert original.stat().st_mtime_ns == copy.stat().st_mtime_ns
    assert os.readlink(back / "link") == "sub/f1"
