"""What the cache and the warm tier keep of fifty checkpoints; the next tier has each whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

COUNT = 50
SHARD = 50_000
FILES = ("model.safetensors", "model.safetensors.index.json")
RULES = {
    "tiers.hot_newest": "3",
    "tiers.hot_every": "25",
    "tiers.warm_newest": "10",
    "tiers.warm_every": "20",
}
HOT = {0, 25, 47, 48, 49}
WARM = {0, 7, 20, *range(39, 50)}
"""Step 7 is named by `latest`; 40 is kept for ever, so it is not one of the ten newest."""


@pytest.fixture
def warm(disk_dir: Path) -> Path:
    folder = disk_dir / "warm"
    folder.mkdir()
    return folder


def save(mount: Mount, step: int) -> None:
    folder = mount.path / f"checkpoint-{step}"
    folder.mkdir()
    (folder / FILES[0]).write_bytes(bytes(SHARD))
    (folder / FILES[1]).write_text("{}")


def steps(told: list[dict[str, Any]], tier: str, *, removed: bool) -> set[int]:
    """Steps that an answer of `retain` tells of."""
    return {e["step"] for e in told if e["tier"] == tier and e["removed"] is removed}


def ask(mount: Mount, *words: str) -> list[dict[str, Any]]:
    done = mount.cli("retain", mount.path, "--json", *words)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = json.loads(done.stdout)["checkpoints"]
    return told


def cached(mount: Mount) -> dict[int, int]:
    """Step -> how many of its files are in the cache."""
    found = {}
    for step in range(COUNT):
        paths = (f"checkpoint-{step}/{name}" for name in FILES)
        found[step] = sum(mount.xattr("lane", path) != "none" for path in paths)
    return found


def watch(root: str, warm: str, stop: str) -> list[str]:
    """Look at both tiers for ever: what is not whole in one is whole in the next."""
    torn: list[str] = []
    looks = 0
    while not os.path.exists(stop):
        looks += 1
        for step in range(50):
            names = [
                f"checkpoint-{step}/{n}"
                for n in ("model.safetensors", "model.safetensors.index.json")
            ]
            hot = [os.getxattr(f"{root}/{n}", "user.cachefs.lane") != b"none" for n in names]
            below = [os.path.exists(f"{warm}/{n}") for n in names]
            state = {os.getxattr(f"{root}/{n}", "user.cachefs.state") for n in names}
            in_store = state <= {b"durable", b"remote"}
            if not (all(hot) or all(below) or in_store) or not (all(below) or in_store):
                torn.append(f"{step}: {hot} {below} {state}")
    return torn if looks > 1 else ["never looked"]


@pytest.mark.timeout(150)
def test_both_tiers_keep_what_the_dry_run_said(
    mounted: MountFactory, bucket: Any, warm: Path, client: Client, tmp_path: Path
) -> None:
    """The bucket keeps all fifty."""
    mount = mounted(bucket, options={"tiers.warm": str(warm)})
    for step in range(COUNT):
        save(mount, step)
    (mount.path / "latest").write_text("checkpoint-7")
    mount.wait(timeout=100)
    mount.wait(survives="instance", timeout=60)
    poll(lambda: (warm / "latest").exists(), 60)
    tried = [word for key, value in RULES.items() for word in ("-o", f"{key}={value}")]
    said = ask(mount, "--dry-run", *tried)
    assert mount.cli("retain", mount.path, *tried).returncode == 2, "rules are only tried"
    assert set(cached(mount).values()) == {2}, "nothing was removed"
    stop = tmp_path / "stop"
    mount.remount(**{key.replace(".", "__"): value for key, value in RULES.items()})
    watcher = client.start(watch, str(mount.path), str(warm), str(stop))
    expected = {step: 2 * (step not in steps(said, "hot", removed=True)) for step in range(COUNT)}
    poll(lambda: cached(mount) == expected, 30)
    kept = {f"checkpoint-{step}" for step in steps(said, "warm", removed=False)}
    poll(lambda: {path.name for path in warm.glob("checkpoint-*")} == kept, 30)
    stop.touch()
    assert watcher.result(30) == []
    assert steps(said, "hot", removed=False) == HOT
    assert steps(said, "warm", removed=False) == WARM
    for step in WARM:
        assert sorted(os.listdir(warm / f"checkpoint-{step}")) == sorted(FILES), "whole or gone"
    assert len(bucket.keys()) == 2 * COUNT + 1
    for step in (1, 20, 49):
        assert (mount.path / f"checkpoint-{step}" / FILES[0]).read_bytes() == bytes(SHARD)
    log = mount.log
    assert 'event="removed from the cache" checkpoint=checkpoint-1 reason="' in log
    assert 'event="removed from the warm tier" checkpoint=checkpoint-1 reason="' in log
    later = ask(mount)
    assert not any(each["removed"] for each in later), "there is nothing left to be done"
    reasons = {(e["tier"], e["step"]): e["reason"] for e in later}
    assert reasons["warm", 7] == "named by latest"
    assert reasons["hot", 25] == "kept for ever: step 25"
    assert reasons["hot", 1] == "it was fetched again"


def test_without_tiers_and_rules_there_is_nothing_to_retain(
    mounted: MountFactory, dir_store: Any
) -> None:
    mount = mounted(dir_store)
    done = mount.cli("retain", mount.path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "tiers.warm" in done.stderr
    assert mount.status()["tiers"] == {"warm": None}
