"""Everything at once, for a long time: writers, kills, store faults, a disk that fills up."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cuts.recording import run, unmount
from tests.lanes.test_kills import check_space
from tests.support.faults import weather
from tests.support.mounts import Mount, MountFactory, poll

SAVER = Path(__file__).with_name("saver.py")
SECONDS = float(os.environ.get("CACHEFS_TEST_SECONDS", "1200"))
WRITERS = 8
DISK = 400 << 20
NEARLY_FULL = 6 << 20
"""Bytes that are left when the disk is filled."""


@pytest.fixture
def disk(ram_dir: Path, after_mounts: ExitStack) -> Path:
    """A small ext4 filesystem of its own."""
    image, top = ram_dir / "image", ram_dir / "disk"
    top.mkdir()
    with open(image, "wb") as file:
        file.truncate(DISK)
    run("mkfs.ext4", "-q", image)
    run("mount", "-o", "loop", image, top)
    after_mounts.callback(unmount, top)
    return top


@pytest.fixture
def savers(mounted: MountFactory) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()


class Ordeal:
    """What befalls the mount, second by second."""

    def __init__(self, mount: Mount, faults: Any, disk: Path, rng: random.Random) -> None:
        self.mount, self.faults, self.disk, self.rng = mount, faults, disk, rng
        self.counts: Counter[str] = Counter()
        self._ballast = disk / "ballast"

    def go_on_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._change_weather()
            self._fill() if self.rng.random() < 0.15 else self._empty()
            for _ in range(self.rng.randrange(1, 4)):
                time.sleep(self.rng.uniform(0.5, 5.0))
                self._kill()
        self._change_weather()
        self.faults.clear()
        self._empty()

    def _change_weather(self) -> None:
        self.counts["faults"] += sum(self.faults.used())
        self.faults.set(*weather(self.rng.randrange(10**6)))

    def _kill(self) -> None:
        old = self.mount.kill_daemon()
        self.counts["kills"] += 1
        if self.rng.random() < 0.2:
            poll(lambda: self._pid() != old, 60, what="the start of a new daemon")
        else:
            self.mount.took_over(old, timeout=60)

    def _pid(self) -> int:
        self.mount.reread()
        return self.mount.daemon_pid

    def _fill(self) -> None:
        told = os.statvfs(self.disk)
        free = told.f_bavail * told.f_frsize - NEARLY_FULL
        if free > 0 and not self._ballast.exists():
            with open(self._ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, free)
            self.counts["times full"] += 1

    def _empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@pytest.mark.soak
@pytest.mark.either_lane
@pytest.mark.timeout(SECONDS + 900)
def test_all_at_once(
    mounted: MountFactory, bucket: Any, faults: Any, disk: Path,
    savers: list[subprocess.Popen[str]],
) -> None:  # fmt: skip
    """At the end tree, cache and bucket agree."""
    seed = int(os.environ.get("CACHEFS_TEST_SEED", random.randrange(10**6)))
    print(f"CACHEFS_TEST_SEED={seed}")
    mount = mounted(
        bucket, endpoint=faults.endpoint, cache_dirs=[disk / "cache"], allow=(".*",),
        options={"cache.size": "250MiB", "cache.meta_reserve": "16MiB"},
    )  # fmt: skip
    for number in range(WRITERS):
        words = [sys.executable, str(SAVER), str(mount.path / f"w{number}"), str(seed + number)]
        savers.append(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    ordeal = Ordeal(mount, faults, disk, random.Random(seed))
    try:
        ordeal.go_on_for(SECONDS)
        mount.took_over(0, timeout=60)
        told = [_end(each) for each in savers]
        _report(ordeal, told)
        mount.wait(*(mount.path / f"w{n}" / name for n, t in enumerate(told) for name in t["kept"]),
                   timeout=300)  # fmt: skip
        _check(mount, bucket, told)
    except BaseException:
        print(mount.log[-20_000:])
        raise


def _end(saver: subprocess.Popen[str]) -> dict[str, Any]:
    assert saver.stdin is not None
    saver.stdin.close()
    saver.stdin = None
    told: dict[str, Any] = json.loads(saver.communicate(timeout=240)[0])
    return told


def _report(ordeal: Ordeal, told: list[dict[str, Any]]) -> None:
    total: Counter[str] = Counter()
    for each in told:
        total.update(each["counts"])
    longest = max(each["longest"] for each in told)
    print(f"{SECONDS:.0f} s, {WRITERS} writers:", dict(ordeal.counts), dict(total))
    print(f"longest call {longest:.1f} s; load {os.getloadavg()[0]:.1f}")


def _check(mount: Mount, bucket: Any, told: list[dict[str, Any]]) -> None:
    assert [each["differences"] for each in told] == [[]] * len(told)
    wrong, shown = [], bucket.sizes()
    for number, each in enumerate(told):
        for name, digest in each["kept"].items():
            key = f"w{number}/{name}"
            here = hashlib.sha1((mount.path / key).read_bytes()).hexdigest()
            there = hashlib.sha1(bucket.get(key)).hexdigest() if key in shown else "missing"
            if (here, there) != (digest, digest):
                wrong.append(f"{key}: {digest} was saved, the mount has {here}, the bucket {there}")
        known = each["kept"].keys() | set(each["doubtful"])
        wrong += [f"w{number}/{name} is there" for name in os.listdir(mount.path / f"w{number}")
                  if name not in known]  # fmt: skip
        wrong += [f"{key} is in the bucket" for key in shown
                  if key.startswith(f"w{number}/") and key[:-1] != f"w{number}"
                  and key.split("/", 1)[1] not in known]  # fmt: skip
    assert not wrong, "\n".join(wrong[:20])
    check_space(mount)
