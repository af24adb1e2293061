"""What is left in memory of caches that are gone is removed, and of no others."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache import identity, leftovers
from cachefs.cache.leftovers import Belongings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="handles are root's to open")


@pytest.fixture
def memory(ram_dir: Path) -> Path:
    place = ram_dir / "memory"
    place.mkdir()
    return place


def killed(memory: Path, cache: Path, number: int = 0) -> list[Path]:
    """A cache whose daemon was killed: what that has left in memory."""
    cache.mkdir(parents=True)
    name = identity.give(cache)
    files = [memory / f"{number:032x}{kind}" for kind in (".ring", ".index", ".journal")]
    for file in files:
        file.write_bytes(b"acknowledged")
    keeper = Belongings(memory, name, cache)
    keeper.note(files)
    os.close(keeper._fd)  # as the end of a process does
    return [*files, memory / f"{name}.cache"]


def test_of_a_deleted_cache_it_goes(memory: Path, disk_dir: Path) -> None:
    cache = disk_dir / "job" / "cache"
    files = killed(memory, cache)
    other = killed(memory, disk_dir / "other", 1)
    assert leftovers.sweep([memory]) == []
    shutil.rmtree(cache.parent)
    assert leftovers.find([memory]) == []
    (removed,) = leftovers.sweep([memory])
    assert removed.directory == str(cache)
    assert not any(file.exists() for file in files)
    assert all(file.exists() for file in other)


def test_it_goes_when_another_has_its_place(memory: Path, disk_dir: Path) -> None:
    files = killed(memory, disk_dir / "cache")
    shutil.rmtree(disk_dir / "cache")
    other = killed(memory, disk_dir / "cache", 1)
    assert len(leftovers.sweep([memory])) == 1
    assert not any(file.exists() for file in files)
    assert all(file.exists() for file in other)


def test_of_a_moved_cache_it_is_kept_and_named(memory: Path, disk_dir: Path) -> None:
    files = killed(memory, disk_dir / "cache")
    (disk_dir / "cache").rename(disk_dir / "moved")
    assert leftovers.sweep([memory]) == []
    (found,) = leftovers.find([memory])
    assert found.directory == str(disk_dir / "cache")
    assert set(found.files) == set(files[:3])
    assert all(file.exists() for file in files)


def test_while_somebody_uses_it_nothing_goes(memory: Path, disk_dir: Path) -> None:
    """A daemon goes on in a directory that was deleted."""
    cache = disk_dir / "cache"
    cache.mkdir()
    (memory / "0.ring").write_bytes(b"acknowledged")
    keeper = Belongings(memory, identity.give(cache), cache)
    keeper.note([memory / "0.ring"])
    shutil.rmtree(cache)
    assert leftovers.sweep([memory]) == []
    assert leftovers.find([memory]) == []
    assert (memory / "0.ring").exists()
    keeper.close()
    assert len(leftovers.sweep([memory])) == 1


@pytest.fixture
def disk(disk_dir: Path) -> Iterator[Path]:
    """A place where disks are mounted."""
    place = disk_dir / "disk"
    place.mkdir()
    yield place
    while os.path.ismount(place):
        subprocess.run(["umount", "-l", place], check=True)


def _mount(place: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)


@pytest.mark.parametrize("instead", ["nothing", "another disk", "another cache"])
def test_a_disk_that_is_not_mounted_now(memory: Path, disk: Path, instead: str) -> None:
    """It may come back, and then what is in memory is needed."""
    _mount(disk)
    files = killed(memory, disk / "cache")
    kept = os.open(disk, os.O_RDONLY)  # the disk itself is not gone
    subprocess.run(["umount", "-l", disk], check=True)
    if instead != "nothing":
        _mount(disk)
    if instead == "another cache":
        (disk / "cache").mkdir()
        identity.give(disk / "cache")
    assert leftovers.sweep([memory]) == []
    (found,) = leftovers.find([memory])
    assert found.nbytes > 0
    assert all(file.exists() for file in files)
    os.close(kept)


def test_a_note_that_makes_no_sense_removes_nothing(memory: Path, disk_dir: Path) -> None:
    """Cut short, of a filesystem without handles, or with names of files elsewhere."""
    files = killed(memory, disk_dir / "cache")
    shutil.rmtree(disk_dir / "cache")
    note = files.pop()
    told = note.read_text()
    outside = disk_dir / "0.ring"
    outside.write_bytes(b"another's")
    for text in ("", told[:-9], told.replace('"handles": [', '"handles": [], "": ['), "[]", "{}"):
        note.write_text(text)
        assert leftovers.sweep([memory]) == []
        assert all(file.exists() for file in files)
    note.write_text(told.replace(files[0].name, "../../x.ring").replace(files[1].name, "LOCK"))
    assert len(leftovers.sweep([memory])) == 1
    assert outside.exists()
    assert files[0].exists()


def test_what_is_there_still_stays_noted(memory: Path, disk_dir: Path) -> None:
    """But for a copy of the cache: what the original left is not the copy's."""
    cache, copy = disk_dir / "cache", disk_dir / "copy"
    first, *_ = killed(memory, cache)
    shutil.copytree(cache, copy)
    name = identity.read(cache)
    assert name is not None
    for directory, kept in ((cache, True), (copy, False)):
        keeper = Belongings(memory, name, directory)
        keeper.note([memory / "1.ring"])
        keeper.close()
        assert (memory / f"{name}.cache").exists() is kept
    assert first.exists()


def test_a_note_goes_with_the_last_file(memory: Path, disk_dir: Path) -> None:
    cache = disk_dir / "cache"
    cache.mkdir()
    keeper = Belongings(memory, identity.give(cache), cache)
    keeper.note([memory / "0.ring"])
    keeper.close()
    assert list(memory.iterdir()) == []
