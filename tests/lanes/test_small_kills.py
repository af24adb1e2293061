"""Small files, made without a word of Python, while others look on and daemons die."""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.place import Place
from tests.lanes.small import Storm, body, save
from tests.support.mounts import Mount, MountFactory

KILLED = ("ended unexpectedly",)
tracked = pytest.mark.parametrize("lane", ["tracked"], indirect=True)


@pytest.fixture
def storms(ram_dir: Path) -> Iterator[Callable[[Path, float], Storm]]:
    made: list[Storm] = []

    def start(folder: Path, seconds: float) -> Storm:
        made.append(Storm(folder, ram_dir / f"storm{len(made)}", seconds))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def test_somebody_else_in_the_directory(
    place: Place, storms: Callable[[Path, float], Storm]
) -> None:
    """Finds each file that was closed, whatever is done to it, and none that was removed."""
    storm, rng = storms(place / "storm", 2.0), random.Random(3)
    gone: set[str] = set()
    count = 0
    while not (names := storm.closed()) or names[-1] != "end":
        names = [name for name in names if name not in gone and name != "end"]
        if not names:
            continue
        count += 1
        name = rng.choice(names[-50:])
        path = storm.folder / name
        match rng.randrange(5):
            case 0:
                path.unlink()
                gone.add(name)
            case 1:
                path.rename(storm.folder / f"moved-{name}")
                gone.add(name)
            case 2:
                assert path.stat().st_size == len(body(name))
            case 3:
                assert path.read_bytes() == body(name)
            case _:
                shown = set(os.listdir(storm.folder))
                assert set(names) <= shown and not gone & shown
    assert count > 20
    storm.finish()


# ---- the end of the daemon --------------------------------------------------------------------


def check(mount: Mount, storm: Storm, names: list[str], store: Any) -> None:
    """Every file whose close returned is there whole, here and in the store."""
    made = [name for name in names if name != "end"]
    shown = set(os.listdir(storm.folder))
    assert set(made) <= shown
    assert len(shown - set(made)) <= 1  # the one that was being made
    for name in made:
        path = storm.folder / name
        assert path.read_bytes() == body(name), name
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    mount.wait(timeout=60)
    for name in made:
        assert store.get(f"{storm.folder.name}/{name}") == body(name), name


@tracked
@pytest.mark.timeout(120)
@pytest.mark.parametrize("cache", ["ram", pytest.param("disk", marks=pytest.mark.soak)])
def test_kills_during_a_storm(
    mounted: MountFactory, dir_store: Any, storms: Callable[[Path, float], Storm], cache: str
) -> None:
    """No call fails, nothing that was closed is missing."""
    mount = mounted(dir_store, cache=cache, allow=KILLED)
    running = [storms(mount.path / f"s{number}", 60.0) for number in range(2)]
    rng = random.Random(5)
    for _ in range(3):
        time.sleep(rng.uniform(0.1, 0.8))
        mount.took_over(mount.kill_daemon())
    closed = [(storm, storm.finish()) for storm in running]
    for storm, names in closed:
        assert len(names) > 5
        check(mount, storm, names, dir_store)


@tracked
@pytest.mark.timeout(120)
@pytest.mark.parametrize("both", [False, True], ids=["daemon", "supervisor as well"])
def test_killed_before_the_fold(mounted: MountFactory, dir_store: Any, *, both: bool) -> None:
    """The journal outlives them, and a check of the cache in between knows of it."""
    mount = mounted(dir_store, allow=KILLED)
    names: list[str] = []
    found = 0
    while found < 2:
        assert len(names) < 400, "no kill came before a fold"
        for _ in range(20):
            names.append(f"f{len(names)}")
            save(mount.path / names[-1])
        if both:
            os.kill(mount.supervisor_pid, signal.SIGKILL)
        old = mount.kill_daemon()
        if both:
            mount.crash()
            mount.wait_gone()
            assert mount.cli("fsck", *mount.cache_dirs, "--repair").returncode == 0
            mount.start()
        else:
            mount.took_over(old)
        assert set(os.listdir(mount.path)) == set(names)
        found += "left in the journal" in mount.log[-5000:]
    for name in names:
        assert (mount.path / name).read_bytes() == body(name)
    mount.wait()
    assert {name: dir_store.get(name) for name in names} == {name: body(name) for name in names}


@tracked
def test_a_journal_of_garbage(mounted: MountFactory, dir_store: Any) -> None:
    """Counts for nothing, and does not keep a daemon from starting."""
    mount = mounted(dir_store, allow=KILLED)
    for number in range(30):
        save(mount.path / f"f{number}")
    os.listdir(mount.path)
    mount.crash()
    (folder,) = mount.cache_dirs
    journal = folder / "meta" / "journal"
    whole = bytearray(journal.read_bytes())
    for at in range(200, 2000, 150):
        whole[at] ^= 0x55
    journal.write_bytes(whole)
    mount.wait_gone()
    mount.start()
    assert sorted(os.listdir(mount.path)) == sorted(f"f{number}" for number in range(30))
    for number in range(30):
        save(mount.path / f"more{number}")
    assert len(os.listdir(mount.path)) == 60


@tracked
def test_an_upgrade_during_a_storm(
    mounted: MountFactory, dir_store: Any, storms: Callable[[Path, float], Storm]
) -> None:
    mount = mounted(dir_store)
    storm = storms(mount.path / "s", 30.0)
    time.sleep(0.7)
    old = mount.daemon_pid
    mount.ask("upgrade")
    mount.took_over(old)
    check(mount, storm, storm.finish(), dir_store)
