"""The warm tier: a second copy of everything, on a filesystem that outlives the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane
NEVER = {"flush.settle": "100s", "flush.settle_max": "100s"}
"""The store has to wait, so what survives does so because of the tier."""
KILLED = ("ended unexpectedly", "taken over", "takeover")


@pytest.fixture
def warm(disk_dir: Path) -> Path:
    folder = disk_dir / "warm"
    folder.mkdir()
    return folder


def options(warm: Path, **more: str) -> dict[str, str]:
    return {"tiers.warm": str(warm), **{k.replace("__", "."): v for k, v in more.items()}}


def shown(warm: Path) -> dict[str, bytes]:
    """Path -> content of the plain files that a user of the directory finds."""
    found = {}
    for folder, folders, names in os.walk(warm):
        folders[:] = [each for each in folders if each != ".cachefs"]
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # things go while we look
                if not path.is_symlink():
                    found[str(path.relative_to(warm))] = path.read_bytes()
    return found


def settled(mount: Mount, warm: Path, files: dict[str, bytes]) -> None:
    poll(lambda: shown(warm) == files, 30, what=f"{sorted(files)} in the warm tier")


def test_copies_are_plain_files_at_the_same_paths(
    mounted: MountFactory, bucket: Any, warm: Path
) -> None:
    mount = mounted(bucket, options=options(warm) | NEVER)
    (mount.path / "run/step-1").mkdir(parents=True)
    shard = mount.path / "run/step-1/model.safetensors"
    shard.write_bytes(b"x" * 3_000_000)
    with open(mount.path / "run/sparse.bin", "wb") as file:
        file.truncate(50 << 20)
    os.chmod(shard, 0o640)
    os.utime(shard, ns=(10**18, 10**18))
    mount.wait(survives="instance")
    assert mount.status(shard)["state"] == "dirty"
    assert mount.xattr("survives", "run/step-1/model.safetensors") == "instance"
    copy = warm / "run/step-1/model.safetensors"
    assert copy.read_bytes() == b"x" * 3_000_000
    assert (warm / "run/sparse.bin").stat().st_blocks == 0
    told = mount.status()["tiers"]["warm"]
    assert (told["files"], told["files_left"], told["error"]) == (2, 0, None)
    mount.wait()
    assert mount.xattr("survives", "run/step-1/model.safetensors") == "site"


def test_levels_are_reached_in_their_order(
    mounted: MountFactory, bucket: Any, warm: Path, link: Any
) -> None:
    """Each within what it takes, while the next is not reached: the store answers nobody."""
    mount = mounted(bucket, options=options(warm) | NEVER, cache="ram")
    (mount.path / "f").write_bytes(b"1" * 100_000)
    mount.wait(mount.path / "f", survives="process", timeout=10)
    mount.wait(mount.path / "f", survives="reboot", timeout=20)  # by the copy: the cache is in RAM
    mount.wait(mount.path / "f", survives="instance", timeout=20)
    assert bucket.keys() == []
    mount.wait(mount.path / "f", survives="site", timeout=60)
    assert bucket.get("f") == b"1" * 100_000


def watch(warm: str, stop: str) -> list[str]:
    """Look at the markers for ever: what each tells of must be there."""
    torn: list[str] = []
    looks = 0
    while not os.path.exists(stop):
        looks += 1
        try:
            step = Path(warm, "latest").read_text()
        except FileNotFoundError:
            continue
        needed = ("model.index.json", "a.safetensors", "b.safetensors")
        torn += [f"latest: {step}/{n}" for n in needed if not Path(warm, step, n).exists()]
        told = [index.parent for index in Path(warm).glob("step-*/model.index.json")]
        torn += [str(folder) for folder in told if not (folder / "a.safetensors").exists()]
    return torn if looks > 10 else ["never looked"]


def test_a_marker_never_comes_before_what_it_tells_of(
    mounted: MountFactory, bucket: Any, warm: Path, client: Client, tmp_path: Path
) -> None:
    """Saves in a temporary directory that is renamed, with a pointer, killed twice on the way; the
    bucket gets it all, after the tier."""
    more = {"tiers.warm_policy": "before"}
    mount = mounted(bucket, options=options(warm) | more, allow=KILLED)
    stop = tmp_path / "stop"
    watcher = client.start(watch, str(warm), str(stop))
    for number in range(6):
        folder = mount.path / f"tmp-step-{number}"
        folder.mkdir()
        for name in ("a.safetensors", "b.safetensors"):
            (folder / name).write_bytes(bytes([number]) * 400_000)
        (folder / "model.index.json").write_text("{}")
        folder.rename(mount.path / f"step-{number}")
        pointer = mount.path / "latest.tmp"
        pointer.write_text(f"step-{number}")
        pointer.rename(mount.path / "latest")
        if number in (2, 4):
            mount.took_over(mount.kill_daemon())
        time.sleep(0.2)
    poll(lambda: (warm / "latest").exists() and (warm / "latest").read_text() == "step-5", 30)
    stop.touch()
    assert watcher.result(20) == []
    assert len(shown(warm)) == 6 * 3 + 1
    mount.wait()
    assert len(bucket.keys()) == 6 * 3 + 1
    assert list((warm / ".cachefs/staging").rglob("*.safetensors")) == []


def test_changes_of_names_follow(mounted: MountFactory, bucket: Any, warm: Path) -> None:
    mount = mounted(bucket, options=options(warm))
    p = mount.path
    (p / "d").mkdir()
    for name in ("d/one", "d/two", "d/gone", "a", "b"):
        (p / name).write_bytes(name.encode())
    os.symlink("d", p / "link")
    os.link(p / "a", p / "hard")
    settled(
        mount,
        warm,
        {n: n.encode() for n in ("d/one", "d/two", "d/gone", "a", "b")} | {"hard": b"a"},
    )
    poll(lambda: os.path.islink(warm / "link"), 10)
    assert os.readlink(warm / "link") == "d"
    (p / "d/gone").unlink()
    (p / "d").rename(p / "e")
    (p / "a").rename(p / "c")
    (p / "b").rename(p / "a")
    (p / "c").rename(p / "b")
    settled(mount, warm, {"e/one": b"d/one", "e/two": b"d/two", "a": b"b", "b": b"a", "hard": b"a"})
    poll(lambda: not (warm / "d").exists(), 10)
    (p / "a").write_bytes(b"again")
    shutil.rmtree(p / "e")
    settled(mount, warm, {"a": b"again", "b": b"a", "hard": b"a"})
    poll(lambda: not (warm / "e").exists(), 10)


def downloaded(mount: Mount) -> float:
    return mount.metric("cachefs_download_bytes_total")


def test_reads_prefer_it_and_do_not_depend_on_it(
    mounted: MountFactory, bucket: Any, warm: Path
) -> None:
    more = {"cache.size": "24MiB", "cache.meta_reserve": "1MiB"}
    mount = mounted(bucket, options=options(warm) | more, allow=("a copy cannot be read",))
    for number in range(6):
        (mount.path / f"f{number}").write_bytes(bytes([number]) * (6 << 20))
        mount.wait(timeout=60)
    evicted = [n for n in range(6) if mount.status(mount.path / f"f{n}")["lane"] == "none"]
    assert len(evicted) >= 3
    poll(lambda: len(shown(warm)) == 6, what="all copied: nothing is evicted before it was")
    first, second, third = evicted[:3]
    assert (mount.path / f"f{first}").read_bytes() == bytes([first]) * (6 << 20)
    assert downloaded(mount) == 0
    (warm / f"f{second}").write_bytes(b"by somebody else")
    (warm / f"f{third}").unlink()
    for number in (second, third):
        assert (mount.path / f"f{number}").read_bytes() == bytes([number]) * (6 << 20)
    assert downloaded(mount) == 2 * (6 << 20)


def test_a_filesystem_that_is_not_mounted_gets_nothing(
    mounted: MountFactory, bucket: Any, warm: Path
) -> None:
    mount = mounted(bucket, options=options(warm), allow=("nothing is copied to the warm tier",))
    (mount.path / "f").write_bytes(b"1")
    settled(mount, warm, {"f": b"1"})
    away = warm.with_name("away")
    warm.rename(away)
    warm.mkdir()  # the bare mount point
    mount.unmount()
    mount.wait_gone()
    done = mount.cli(*mount.command())
    assert done.returncode == 0, "it comes up without it"
    assert "warning: nothing is copied to the warm tier" in done.stderr
    mount.reread()
    (mount.path / "g").write_bytes(b"2")
    mount.wait(survives="instance")
    assert bucket.get("g") == b"2", "the store has it instead"
    assert "has lost its id" in mount.status()["tiers"]["warm"]["error"]
    assert list(warm.iterdir()) == []
    warm.rmdir()
    away.rename(warm)
    settled(mount, warm, {"f": b"1", "g": b"2"})
