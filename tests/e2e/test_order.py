"""No marker is ever in the bucket before every file it stands for, whoever looks and whenever."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.mounts import Mount, MountFactory
from tests.support.poller import Poller

pytestmark = pytest.mark.either_lane

DIED = "no takeover|died|killed|exit|signal|gone|abort|ended|restart|crash|recover|orphan"


def index_and_latest(bucket: Any) -> list[str]:
    """Hugging Face style: the index names the shards, `latest` names the step."""
    wrong = []
    markers = [k for k in bucket.keys() if k.endswith(".index.json") or k == "latest"]  # noqa: SIM118
    told = {marker: bucket.get(marker) for marker in markers}
    present = set(bucket.keys())
    for marker, body in told.items():
        if marker == "latest":
            step = body.decode()
            needed = {f"{step}/model.safetensors.index.json", f"{step}/optimizer.pt"}
        else:
            folder = marker.rpartition("/")[0]
            needed = {f"{folder}/{name}" for name in json.loads(body)["shards"]}
        if missing := needed - present:
            wrong.append(f"{marker} is there, {sorted(missing)} not")
    return wrong


def _save_step(mount: Mount, step: str, shards: int, size: int) -> None:
    folder = mount.path / step
    folder.mkdir()
    names = [f"model-{n:05d}.safetensors" for n in range(shards)]
    for name in names:
        (folder / name).write_bytes(os.urandom(size))
    (folder / "optimizer.pt").write_bytes(os.urandom(size * 3))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"shards": names}))
    (mount.path / "latest").write_text(step)


@contextmanager
def _jitter(link: Any, most: float) -> Iterator[None]:
    """Requests take a random time, so that they finish in any order."""
    stop = threading.Event()

    def run() -> None:
        rng = random.Random(1)
        while not stop.wait(0.02):
            link.delay = rng.random() * most

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        link.delay = 0


def test_shards_then_index_then_latest(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Three checkpoints in a row, polled all the while, with requests that overtake each other."""
    mount = mounted(bucket, endpoint=link.endpoint)
    with Poller(bucket, index_and_latest) as poller, _jitter(link, 0.3):
        for number in range(3):
            _save_step(mount, f"step_{number}", 8, 300_000)
        mount.wait()
    poller.assert_ordered()
    assert bucket.get("latest") == b"step_2"
    assert len(bucket.keys()) == 3 * 11 + 1


@pytest.mark.parametrize("mode", ["safe", "strict"])
def test_order_modes(mounted: MountFactory, bucket: Any, link: Any, mode: str) -> None:
    """The law holds in both modes; in strict mode every file waits for all before it."""
    options = {"order.mode": mode}
    mount = mounted(bucket, endpoint=link.endpoint, options=options)
    seen: list[list[str]] = []

    def look(view: Any) -> list[str]:
        seen.append(sorted(view.keys()))
        return index_and_latest(view)

    with Poller(bucket, look) as poller, _jitter(link, 0.2):
        _save_step(mount, "step_0", 6, 100_000)
        mount.wait()
    poller.assert_ordered()
    if mode == "strict":
        order = [f"step_0/model-{n:05d}.safetensors" for n in range(6)]
        for keys in seen:
            there = [name in keys for name in order]
            assert there == sorted(there, reverse=True), keys


def test_index_opened_first_and_closed_last(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """What counts is when a file was completed, not when it was opened."""
    mount = mounted(bucket, endpoint=link.endpoint)
    with Poller(bucket, index_and_latest) as poller, _jitter(link, 0.2):
        (mount.path / "s").mkdir()
        names = [f"model-{n}.safetensors" for n in range(6)]
        with open(mount.path / "s" / "model.safetensors.index.json", "w") as index:
            for name in names:
                (mount.path / "s" / name).write_bytes(os.urandom(200_000))
                time.sleep(0.03)
            index.write(json.dumps({"shards": names}))
        mount.wait()
    poller.assert_ordered()
    assert len(bucket.keys()) == 7


def test_latest_by_rename(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """`latest.tmp` is written before the last shard and becomes `latest` after it."""
    mount = mounted(bucket, endpoint=link.endpoint)

    def check(view: Any) -> list[str]:
        keys = view.keys()
        temp = [f"temporary name {k} is visible" for k in keys if k.endswith(".tmp")]
        if "latest" in keys and len([k for k in view.keys() if k.endswith(".bin")]) < 5:  # noqa: SIM118
            temp.append("latest is ahead of the shards")
        return temp

    with Poller(bucket, check) as poller, _jitter(link, 0.2):
        for number in range(4):
            (mount.path / f"shard{number}.bin").write_bytes(os.urandom(500_000))
        (mount.path / "latest.tmp").write_text("5 shards")
        time.sleep(0.3)
        (mount.path / "shard4.bin").write_bytes(os.urandom(500_000))
        os.rename(mount.path / "latest.tmp", mount.path / "latest")
        mount.wait()
    poller.assert_ordered()
    assert bucket.get("latest") == b"5 shards"


def test_directory_renamed_when_complete(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """tmp-step_1 becomes step_1, then a marker: no key of the temporary name is ever visible."""
    mount = mounted(bucket, endpoint=link.endpoint)

    def check(view: Any) -> list[str]:
        keys = view.keys()
        wrong = [k for k in keys if k.startswith("tmp-")]
        if "step_1/_SUCCESS" in keys and len([k for k in view.keys() if "shard" in k]) < 6:  # noqa: SIM118
            wrong.append("_SUCCESS is ahead of the shards")
        return wrong

    with Poller(bucket, check) as poller, _jitter(link, 0.2):
        folder = mount.path / "tmp-step_1"
        folder.mkdir()
        for number in range(6):
            (folder / f"shard{number}.bin").write_bytes(os.urandom(300_000))
        time.sleep(0.3)
        os.rename(folder, mount.path / "step_1")
        (mount.path / "step_1" / "_SUCCESS").touch()
        mount.wait()
    poller.assert_ordered()
    assert len(bucket.keys()) == 7


@pytest.mark.slow
def test_killed_midway(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """The daemon dies while the checkpoint goes up: the order holds before and after."""
    mount = mounted(
        bucket, endpoint=link.endpoint, options={"mount.takeover": "off"}, allow=(DIED,)
    )
    with Poller(bucket, index_and_latest) as poller, _jitter(link, 0.3):
        for number in range(3):
            _save_step(mount, f"step_{number}", 6, 300_000)
            time.sleep(0.3)
            mount.kill_daemon()
            mount.wait_gone()
            mount.start()
        mount.wait()
    poller.assert_ordered()
    assert bucket.get("latest") == b"step_2"


def test_latest_never_starves(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """`latest` is rewritten faster than it can be published: versions appear all the same."""
    mount = mounted(bucket, endpoint=link.endpoint)
    link.delay = 0.05
    seen = set()
    deadline = time.monotonic() + 6
    number = 0
    while time.monotonic() < deadline:
        (mount.path / f"w{number}.bin").write_bytes(b"x" * 1000)
        (mount.path / "latest").write_text(str(number))
        number += 1
        time.sleep(0.1)
        if bucket.exists("latest"):
            seen.add(bucket.get("latest"))
    link.delay = 0
    mount.wait()
    assert len(seen) >= 3, seen
    assert bucket.get("latest") == str(number - 1).encode()


def test_deletes_follow_their_replacement(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Rotation: the new one is complete, `latest` moves, the old one is removed: in order."""
    mount = mounted(bucket, endpoint=link.endpoint)

    def check(view: Any) -> list[str]:
        if not view.exists("latest"):
            return []
        step = view.get("latest").decode()
        after = set(view.keys())
        if view.get("latest").decode() != step:
            return []  # moved on while we looked
        needed = {f"{step}/shard{n}.bin" for n in range(4)}
        return [f"latest says {step}, missing {needed - after}"] if needed - after else []

    with Poller(bucket, check) as poller, _jitter(link, 0.15):
        for number in range(4):
            folder = mount.path / f"step_{number}"
            folder.mkdir()
            for shard in range(4):
                (folder / f"shard{shard}.bin").write_bytes(os.urandom(100_000))
            (mount.path / "latest").write_text(folder.name)
            if number:
                old = mount.path / f"step_{number - 1}"
                for shard in range(4):
                    (old / f"shard{shard}.bin").unlink()
                old.rmdir()
        mount.wait()
    poller.assert_ordered()
    assert bucket.keys() == ["latest", *(f"step_3/shard{n}.bin" for n in range(4))]
