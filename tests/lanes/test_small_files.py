"""New small files, made without a word of Python: nothing else may tell.

What each test asserts of `handled` says that the files were made that way indeed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.place import Place
from tests.lanes.small import body, handled, save
from tests.support.client import Client
from tests.support.livedb import database_of
from tests.support.mounts import Mount, MountFactory, poll

tracked = pytest.mark.parametrize("lane", ["tracked"], indirect=True)


def attributes(path: Path) -> dict[str, Any]:
    status = path.lstat()
    names = ("st_mode", "st_uid", "st_gid", "st_nlink", "st_size")
    return {name: getattr(status, name) for name in names}


# ---- what they are ----------------------------------------------------------------------------


@tracked
def test_they_are_files_like_any_other(place: Place) -> None:
    before, released = handled(place.mount), handled(place.mount, "release")
    watch = place.watch()
    names = [f"f{number}" for number in range(150)]
    for name in names:
        save(place / name)
    assert watch.seen()["CREATE"] == len(names)
    assert handled(place.mount) - before < len(names) / 3
    assert handled(place.mount, "release") - released < len(names) / 3
    assert sorted(os.listdir(place.path)) == sorted(names)
    assert {name: (place / name).read_bytes() for name in names} == {n: body(n) for n in names}
    place.durable()
    for name in names:
        assert place.store.get(name) == body(name)
        assert place.state_of(name) == "durable"


def test_each_is_seen_at_once(place: Place) -> None:
    """By whatever is done next, with it, to it or around it."""

    def removed(path: Path, other: Path) -> bool:
        path.unlink()
        return not path.exists()

    def renamed(path: Path, other: Path) -> bool:
        path.rename(other)
        return other.read_bytes() == body(path.name) and not path.exists()

    def linked(path: Path, other: Path) -> bool:
        os.link(path, other)
        return path.stat().st_nlink == other.stat().st_nlink == 2

    def made_private(path: Path, other: Path) -> bool:
        path.chmod(0o600)
        return path.stat().st_mode & 0o777 == 0o600

    def cut(path: Path, other: Path) -> bool:
        os.truncate(path, 3)
        return path.stat().st_size == 3

    def timed(path: Path, other: Path) -> bool:
        os.utime(path, ns=(1, 2))
        return path.stat().st_mtime_ns == 2

    def beside_a_folder(path: Path, other: Path) -> bool:
        other.mkdir()
        return other.is_dir() and path.is_file()

    def beside_a_link(path: Path, other: Path) -> bool:
        other.symlink_to(path.name)
        return other.read_bytes() == body(path.name)

    steps: list[Callable[[Path, Path], bool]] = [
        lambda path, other: path.stat().st_size == len(body(path.name)),
        lambda path, other: path.name in os.listdir(path.parent),
        lambda path, other: path.read_bytes() == body(path.name),
        lambda path, other: os.getxattr(path, "user.cachefs.state") != b"open",
        removed, renamed, linked, made_private, cut, timed, beside_a_folder, beside_a_link,
    ]  # fmt: skip
    for number, step in enumerate(steps):
        for again in range(4):
            for name in range(5):  # so that the directory is granted (again)
                save(place / f"warm-{number}-{again}-{name}")
            save(place / f"f{number}-{again}")
            assert step(place / f"f{number}-{again}", place / f"other{number}-{again}"), number
    with pytest.raises(FileExistsError):
        save(place / "f0-0")


def test_what_is_adopted_beside_them(place: Place, tmp_path: Path) -> None:
    """Is there at once, and is no other file."""
    for number in range(6):
        source, path = tmp_path / "outside", place / f"adopted{number}"
        for name in range(5):  # so that the directory is granted (again)
            save(place / f"f{number}-{name}")
        source.write_bytes(b"mine")
        place.mount.ask("adopt", {"src": str(source), "dst": str(path)})
        with pytest.raises(FileExistsError):
            save(path)
        assert path.read_bytes() == b"mine"
    place.durable()
    assert place.store.get("adopted0") == b"mine"


def test_changes_of_the_directory_itself(place: Place) -> None:
    """Are seen at once, between files that are made in it and by them."""

    def some(prefix: str) -> os.stat_result:
        for number in range(6):
            save(place / f"{prefix}-{number}")
        return (place / f"{prefix}-5").stat()

    def now() -> os.stat_result:
        return place.path.stat()

    some("a")
    os.chown(place.path, 0, 77)
    place.path.chmod(0o2750)
    assert some("b").st_gid == 77
    assert (stat.S_IMODE(now().st_mode), now().st_gid) == (0o2750, 77)
    (place / "folder").mkdir()
    assert now().st_nlink == 3
    assert some("c").st_gid == now().st_gid == 77
    (place / "folder").rmdir()
    assert now().st_nlink == 2
    last = now().st_mtime_ns
    (place / "c-0").unlink()
    assert now().st_mtime_ns > last
    os.utime(place.path, ns=(5, 6))
    assert now().st_mtime_ns == 6
    some("d")
    assert now().st_mtime_ns > last


@tracked
def test_attributes_are_those_of_a_local_directory(place: Place) -> None:
    """Another user, set-group-ID and sticky directories, umasks and modes."""
    for top in (place.path, place.local):
        top.chmod(0o755)
        for name, mode, gid in (("plain", 0o777, 0), ("setgid", 0o2777, 77), ("sticky", 0o1777, 5)):
            (top / name).mkdir()
            os.chown(top / name, 0, gid)
            (top / name).chmod(mode)
    place.local.parent.chmod(0o755)
    pairs = [place.actor(), place.twin()], [place.actor(), place.twin()]
    for actor in pairs[1]:
        actor("become", 12345, 6789, [77])
    for number, both in enumerate(pairs * 2):
        for mode, mask in ((0o644, 0o022), (0o600, 0o077), (0o777, 0), (0o666, 0o002)):
            for folder in ("plain", "setgid", "sticky"):
                for name in (f"{number}-{mode}-{k}" for k in range(8)):
                    for actor in both:
                        actor("umask", mask)
                        actor("open", 0, f"{folder}/{name}", "WRONLY|CREAT|EXCL", mode)
                        actor("write", 0, 1, 100)
                        actor("close", 0)
    assert handled(place.mount, "release") < 2000
    for path in sorted(place.local.rglob("*")):
        shown = place.path / path.relative_to(place.local)
        assert attributes(shown) == {**attributes(path), "st_size": shown.stat().st_size}, path
    for actor in pairs[1]:
        with pytest.raises(PermissionError):
            actor("unlink", f"sticky/0-{0o644}-0")


@tracked
def test_times_move_on_with_each_change(place: Place) -> None:
    last = time.time_ns() - 10**9
    for number in range(60):
        path = place / f"f{number}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        made, folder = os.fstat(fd), os.stat(place.path)
        assert made.st_mtime_ns == made.st_ctime_ns >= made.st_atime_ns > last
        assert folder.st_mtime_ns == folder.st_ctime_ns >= made.st_mtime_ns
        os.write(fd, b"x")
        os.close(fd)
        written = os.stat(path)
        assert written.st_mtime_ns == written.st_ctime_ns > made.st_mtime_ns
        last = written.st_mtime_ns
        if number % 3:
            save(place / f"unseen{number}")


@tracked
def test_names_that_only_python_can_judge(place: Place) -> None:
    for number in range(10):
        save(place / f"f{number}")
    save(place / "naïve ü")
    with pytest.raises(OSError, match="Invalid or incomplete"):
        os.open(os.fsencode(place.path) + b"/\xff\xfe", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match="File name too long"):
        save(place / ("n" * 256))
    deep = place.path
    while len(str(deep.relative_to(place.mount.path))) < 780:
        deep /= "d" * 200
        deep.mkdir()
    for number in range(10):
        save(deep / f"f{number}")
    with pytest.raises(OSError, match="File name too long"):
        save(deep / ("n" * 250))
    save(place / ("n" * 200))
    for number in range(5):
        save(place.mount.path / f"top{number}-{place.path.name}")
    with pytest.raises(PermissionError):
        save(place.mount.path / ".cachefs")


@tracked
def test_what_grows_beyond_goes_on_as_any_file(place: Place) -> None:
    for number in range(10):
        save(place / f"f{number}")
    expected = random.Random(1).randbytes(300_000)
    for number in range(10):
        with open(place / f"large{number}", "wb", buffering=0) as file:
            pieces = range(0, len(expected), 30_000)
            file.writelines(expected[start : start + 30_000] for start in pieces)
    with open(place / "both", "w+b", buffering=0) as file:
        file.write(expected[:1000])
        file.seek(0)
        assert file.read() == expected[:1000]
        os.fsync(file.fileno())
    for number in range(10):
        assert (place / f"large{number}").read_bytes() == expected
    place.durable()
    assert place.store.get("large9") == expected


@tracked
def test_numbers_follow_the_closes(mounted: MountFactory, dir_store: Any) -> None:
    """The order law goes by them: files that were open together, and one that Python closed."""
    mount = mounted(dir_store, options={"flush.settle": "1h", "flush.settle_max": "1h"})
    for number in range(5):
        save(mount.path / f"warm{number}")
    for names, large in (("uvwxyz", ""), ("abcdef", "e")):
        fds = {name: os.open(mount.path / name, os.O_WRONLY | os.O_CREAT) for name in names}
        for name in large:
            os.write(fds[name], bytes(100_000))
        for place in (3, 1, 5, 0, 4, 2):
            os.close(fds[names[place]])
    save(mount.path / "latest")
    mount.status()
    (folder,) = mount.cache_dirs
    with database_of(folder) as database:
        rows = database.execute(
            'SELECT d.name FROM effect e JOIN dentry d ON d.id=e.dentry ORDER BY "end"'
        ).fetchall()
    assert [row[0].decode() for row in rows][5:] == [*"xvzuyw", *"dbfaec", "latest"]


def test_what_is_asked_before_a_create(place: Place) -> None:
    """Whether the name is there, and how the directory is: in passthrough, too."""
    watch, before = place.watch(), handled(place.mount, "lookup")
    for number in range(60):
        save(place / f"f{number}")
    assert watch.seen()["LOOKUP"] >= 60
    assert handled(place.mount, "lookup") - before < 20


def _is_made_without_handlers(mount: Mount, name: str) -> bool:
    before = handled(mount)
    save(mount.path / name)
    return handled(mount) == before


@tracked
def test_handlers_make_all_while_one_is_under_way(
    mounted: MountFactory, bucket: Any, link: Any, client: Client
) -> None:
    """One that waits for the store, say, and will act upon the names that there were."""
    bucket.put("old/x", b"1")
    mount = mounted(bucket, endpoint=link.endpoint)
    numbers = itertools.count()
    poll(lambda: _is_made_without_handlers(mount, f"a{next(numbers)}"), what="spare files")
    link.delay = 3.0
    actor = client.actor(mount.path)
    actor.send("listdir", "old")
    poll(lambda: mount.status()["requests"].get("READDIRPLUS"), what="the listing begins")
    before = handled(mount)
    for number in range(20):
        save(mount.path / f"b{number}")
    assert handled(mount) - before == 20
    link.delay = 0.0
    assert actor.receive() == {"ok": ["x"]}


# ---- where there is no room -------------------------------------------------------------------


@tracked
def test_a_cache_too_small_for_spare_files(mounted: MountFactory, dir_store: Any) -> None:
    options = {"cache.size": "1MiB", "cache.meta_reserve": "64KiB"}
    mount = mounted(dir_store, options=options, allow=("full|room|space",))
    for number in range(100):
        save(mount.path / f"f{number}")
    mount.wait()
    assert len(dir_store.keys()) == 100


@tracked
def test_a_device_without_a_free_inode(
    mounted: MountFactory, dir_store: Any, ram_dir: Path
) -> None:
    """What cannot be made fails as it would without spare files, and all else goes on."""
    device = ram_dir / "device"
    device.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nr_inodes=700,size=256m", "none", device], check=True
    )
    try:
        mount = mounted(dir_store, cache_dirs=[device / "cache"], allow=("room|space|spare|long",))
        made = 0
        with pytest.raises(OSError, match="No space"):
            while made < 2000:
                save(mount.path / f"f{made}")
                made += 1
        assert 100 < made < 700
        assert sorted(os.listdir(mount.path)) == sorted(f"f{number}" for number in range(made))
        mount.wait()
        os.unlink(mount.path / "f0")
        save(mount.path / "again")
        mount.unmount()
        mount.wait_gone()
    finally:
        subprocess.run(["umount", "-l", device], check=True)


def test_off(mounted: MountFactory, dir_store: Any) -> None:
    options = {"mount.small_files": "off", "mount.passthrough": "off"}
    mount = mounted(dir_store, options=options)
    for number in range(20):
        save(mount.path / f"f{number}")
    assert handled(mount) == 20
    assert json.dumps(mount.status())
