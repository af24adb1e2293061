"""Commits go on while the disk stands still, and none of them is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from cachefs.meta import Meta, ring
from cachefs.meta.database import Database
from tests.e2e.test_readonly_disk import Ext4
from tests.meta.committer import PATIENT, Committer, frozen
from tests.support import scratch
from tests.support.badcalls import BadCalls
from tests.support.mounts import poll

Open = Callable[..., Committer]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Ext4]:
    made = Ext4(tmp_path)
    yield made
    subprocess.run(["umount", made.top], check=True)


@pytest.fixture
def memory() -> Iterator[Path]:
    with scratch.directory("/dev/shm") as folder:
        yield folder


@pytest.fixture
def opened(disk: Ext4, memory: Path) -> Iterator[Open]:
    """Opens the database on the disk in a process of its own."""
    with ExitStack() as stack:

        def opened(**options: Any) -> Committer:
            found = Committer(disk.top / "db", memory, **options)
            stack.callback(found.end)
            return found

        yield opened


def names(key: str, count: int) -> list[str]:
    return sorted(f"{key}{number}" for number in range(count))


def test_commits_and_reads_go_on(opened: Open, disk: Ext4, memory: Path) -> None:
    """Both of the connection that commits and of others; what waits is told, and gets there."""
    database = opened()
    database("commit", "before", 10)
    with frozen(disk.top):
        assert database("many", "k", 300, 2000) < PATIENT / 2
        assert database("keys") == sorted(["before", *names("k", 300)])
        assert database("others") == sorted(["before", *names("k", 300)])
        assert database("integrity") == "ok"
        nbytes, seconds, error = database("lag")
        assert nbytes > 300 * 2000 and seconds > 0 and not error
        assert not database("crowded")
    assert database("sync") == "ok"
    assert database("lag") == [0, 0.0, 0]
    database.end()
    assert list(memory.iterdir()) == []
    assert not ring.pointer(disk.top / "db").exists()


@pytest.mark.parametrize("what", ["sync", "checkpoint"])
def test_what_promises_the_disk_waits_for_it(opened: Open, disk: Ext4, what: str) -> None:
    database = opened()
    database("commit", "before", 10)
    with frozen(disk.top):
        database("commit", "k", 10)
        database.send(what)
        with pytest.raises(TimeoutError):
            database.receive(0.5)
    assert database.receive() == "ok"
    assert database("lag")[0] == 0


def test_a_killed_process_leaves_its_commits(opened: Open, disk: Ext4, memory: Path) -> None:
    """Every one that was acknowledged, in the log before anybody looks at that."""
    database = opened()
    database("commit", "before", 10)
    with frozen(disk.top):
        database("many", "k", 200, 2000)
        database.kill()
    database.gone()
    assert ring.pending(disk.top / "db") > 200 * 2000
    after = opened()
    assert after.note == ""
    assert after("keys") == sorted(["before", *names("k", 200)])
    assert after("integrity") == "ok"
    assert len(list(memory.glob("*.ring"))) == 1


def test_what_was_left_is_found_without_the_extension(opened: Open, disk: Ext4) -> None:
    database = opened()
    with frozen(disk.top):
        database("many", "k", 20, 2000)
        database.kill()
    database.gone()
    plain = Database(disk.top / "db")
    assert len(plain.all("SELECT 1 FROM setting WHERE key LIKE 'k%'")) == 20
    plain.close()


def test_a_new_round_of_the_log(opened: Open, disk: Ext4) -> None:
    """The header that begins it, and its sync, wait like everything else, and come first."""
    database = opened()
    database("many", "old", 50, 2000)
    assert database("checkpoint") == "ok"
    with frozen(disk.top):
        assert database("many", "k", 20, 2000) < PATIENT / 2
        assert database("others") == sorted([*names("old", 50), *names("k", 20)])
        database.kill()
    database.gone()
    after = opened()
    assert after.note == ""
    assert after("keys") == sorted([*names("old", 50), *names("k", 20)])
    assert after("integrity") == "ok"


def test_a_ring_without_room_makes_commits_wait(opened: Open, disk: Ext4) -> None:
    """As the last resort; who asks is told long before."""
    database = opened()
    with frozen(disk.top):
        count = database("fill", "k")
        assert database("crowded")
        database.send("many", "more", 20, 50_000)
        with pytest.raises(TimeoutError):
            database.receive(0.5)
    database.receive()
    assert database("sync") == "ok"
    assert database("keys") == sorted([*names("k", count), *names("more", 20)])
    assert not database("crowded")
    assert database("integrity") == "ok"


def test_a_full_disk_is_told_at_once(memory: Path, tmp_path: Path) -> None:
    """A disk that answers is waited for: a commit that fails is rolled back."""
    top = tmp_path / "tiny"
    top.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", top], check=True)
    try:
        database = Committer(top / "db", memory, patience=10.0)
        answers = [database("commit", f"k{number}", 50_000) for number in range(40)]
        kept = sorted(f"k{number}" for number, answer in enumerate(answers) if answer == "ok")
        assert "OperationalError: database or disk is full" in answers
        assert database("lag")[0] == 0
        assert database("keys") == kept
        subprocess.run(["mount", "-o", "remount,size=8M", top], check=True)
        assert database("commit", "late", 50_000) == "ok"
        assert database("keys") == sorted([*kept, "late"])
        assert database("integrity") == "ok"
        database.end()
    finally:
        subprocess.run(["umount", top], check=True)


@pytest.fixture
def scarce(tmp_path: Path) -> Iterator[Path]:
    """Memory that is soon full."""
    top = tmp_path / "scarce"
    top.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "none", top], check=True)
    yield top
    subprocess.run(["umount", "-l", top], check=True)


def fill(memory: Path) -> None:
    with open(memory / "others", "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_memory_that_others_fill_fails_no_commit(scarce: Path, tmp_path: Path) -> None:
    """The index of the log is there, however long that gets."""
    meta = Meta(tmp_path / "db", memory=scarce)
    assert meta.db.deferral is not None
    fill(scarce)
    for number in range(200):
        meta.set_setting(f"k{number}", "x" * 100_000)
    assert meta.db.wal_bytes > 18 << 20
    meta.close()


def test_memory_without_room_for_the_index(scarce: Path, tmp_path: Path) -> None:
    """The database is opened all the same."""
    database = Committer(tmp_path / "db", scarce)
    database("commit", "before", 10)
    database.kill()
    database.gone()
    for path in scarce.glob("*.index"):
        path.unlink()
    fill(scarce)
    after = Meta(tmp_path / "db", memory=scarce)
    assert after.db.deferral is None and "no room" in after.db.undeferred
    assert after.setting("before") is not None
    after.close()


def test_a_write_that_fails_later_is_kept_and_tried_again(
    opened: Open, disk: Ext4, tmp_path: Path
) -> None:
    """Nothing that was acknowledged is lost; whoever comes next learns of it."""
    badcalls = BadCalls(tmp_path)
    database = opened(env=badcalls.env, patience=1.0)
    with badcalls.failing("write", "-wal", errno.ENOSPC):
        assert database("commit", "none", 10) == "OperationalError: database or disk is full"
        badcalls._plan[0:1] = b"\0"
        with frozen(disk.top):
            assert database("commit", "one", 10) == "ok"
            assert database("commit", "two", 10) == "ok"
            badcalls._plan[0:1] = b"w"
        poll(lambda: database("lag")[2] == errno.ENOSPC)
        assert "No space left" in database("sync")
        assert database("commit", "three", 10) == "OperationalError: database or disk is full"
        assert database("keys") == ["one", "two"]
        assert database("others") == ["one", "two"]
    assert database("commit", "four", 10) == "ok"
    assert database("sync") == "ok"
    database.kill()
    database.gone()
    assert opened()("keys") == ["four", "one", "two"]


def test_a_log_that_went_on_is_left_alone(opened: Open, disk: Ext4, memory: Path) -> None:
    """Its commits are newer than those of the ring."""
    database = opened()
    database("commit", "before", 10)
    with frozen(disk.top):
        database("many", "k", 20, 2000)
        database.kill()
    database.gone()
    name = ring.pointer(disk.top / "db")
    kept = name.read_bytes()
    name.unlink()
    other = opened()
    other("many", "other", 40, 2000)
    other("sync")
    other.kill()
    other.gone()
    name.write_bytes(kept)
    after = opened()
    assert "went on without them" in after.note
    assert set(names("other", 40)) < set(after("keys"))
    assert after("integrity") == "ok"


def test_another_log_is_left_alone(opened: Open, disk: Ext4) -> None:
    database = opened()
    database("commit", "before", 10)
    with frozen(disk.top):
        database("many", "k", 20, 2000)
        database.kill()
    database.gone()
    (disk.top / "db-wal").unlink()
    plain = Meta(disk.top / "new")
    plain.set_setting("mine", "mine ")
    for name in ("db", "db-wal", "db-shm"):
        shutil.copy(disk.top / name.replace("db", "new"), disk.top / name)
    plain.close()
    after = opened()
    assert "another one" in after.note
    assert after("keys") == ["mine"]


def test_a_copy_of_the_cache_has_nothing_to_do_with_the_ring(
    opened: Open, disk: Ext4, memory: Path
) -> None:
    database = opened()
    database("commit", "before", 10)
    shutil.copytree(disk.top, disk.top / "copy", ignore=shutil.ignore_patterns("lost+found"))
    copy = Committer(disk.top / "copy" / "db", memory)
    assert copy.note == ""
    copy("commit", "mine", 10)
    database("commit", "theirs", 10)
    copy.end()
    assert database("keys") == ["before", "theirs"]
    assert len(list(memory.glob("*.ring"))) == 1


@pytest.fixture
def waiting(tmp_path: Path, memory: Path) -> Path:
    """A database whose log is in a ring as a whole, and that ring's daemon is gone."""
    source = Meta(tmp_path / "db")
    source.set_setting("mine", "here")
    database = tmp_path / "cache" / "db"
    database.parent.mkdir()
    shutil.copy(source.db.path, database)
    log = Path(f"{source.db.path}-wal").read_bytes()
    fd = ring.make(database, memory)
    os.pwrite(fd, log, ring._HEAD_BYTES)
    os.pwrite(fd, ring._ENTRY.pack(0, 0, len(log), ring._DATA), ring._TABLE)
    os.pwrite(fd, struct.pack("=2Q", 0, 1), 40)
    os.close(fd)
    source.close()
    return database


def test_the_ring_of_a_daemon_that_is_not_quite_gone(waiting: Path, memory: Path) -> None:
    """It has given up the cache, but its memory is being looked at."""
    (place,) = memory.glob("*.ring")
    fd = os.open(place, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    threading.Timer(0.2, os.close, [fd]).start()
    after = Meta(waiting)
    assert after.db.note == "" and after.setting("mine") == "here"
    after.close()


def test_a_ring_of_another_user(waiting: Path, memory: Path) -> None:
    (place,) = memory.glob("*.ring")
    os.chown(place, 65534, -1)
    left = ring.recover(waiting)
    assert "another user's" in left.note and left.fd is None
    assert not Path(f"{waiting}-wal").exists()


def test_after_a_reboot_there_is_no_ring(opened: Open, disk: Ext4) -> None:
    name = ring.pointer(disk.top / "db")
    database = opened()
    database("commit", "before", 10)
    database.kill()
    database.gone()
    name.write_text(name.read_text().replace(ring._boot_id(), "another"))
    assert opened().note == ""


def test_memory_that_is_gone_is_told(opened: Open, memory: Path) -> None:
    database = opened()
    database("commit", "before", 10)
    database("sync")
    database.kill()
    database.gone()
    for path in memory.iterdir():
        path.unlink()
    after = opened()
    assert "is gone" in after.note
    assert after("keys") == ["before"]


def test_any_order_of_things(opened: Open, disk: Ext4) -> None:
    """Commits, checkpoints and kills, on a disk that stands still now and then."""
    chance = random.Random(int(os.environ.get("CACHEFS_TEST_SEED", "7")))
    database, known, stall = opened(), set[str](), ExitStack()
    for step in range(60):
        match chance.choice(["many", "many", "checkpoint", "freeze", "thaw", "kill", "look"]):
            case "many":
                count = chance.randrange(1, 30)
                assert database("many", f"s{step}-", count, chance.choice([10, 3000, 30_000]))
                known |= set(names(f"s{step}-", count))
            case "freeze":
                stall.close()
                stall.enter_context(frozen(disk.top))
            case "thaw":
                stall.close()
            case "checkpoint":
                database.send("checkpoint")
                stall.close()
                assert database.receive() == "ok"
            case "kill":
                database.kill()
                stall.close()
                database.gone()
                database = opened()
                assert database.note == ""
            case "look":
                assert database("others") == database("keys") == sorted(known)
                assert database("integrity") == "ok"
    stall.close()
    assert database("keys") == sorted(known)


def test_another_process_finds_the_database_in_use(tmp_path: Path) -> None:
    """Else it would take the log's index for nobody's, and begin it anew under our feet."""
    first = Meta(tmp_path / "db")
    first.set_setting("one", "1")
    shutil.copytree(tmp_path, tmp_path / "later")
    meta = Meta(tmp_path / "later" / "db")
    assert meta.db.had_wal
    inode = (tmp_path / "later" / "db-shm").stat().st_ino
    locks = Path("/proc/locks").read_text().splitlines()
    assert any(line.endswith(f":{inode} 128 128") for line in locks)
    meta.close()
    first.close()
