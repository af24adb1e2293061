"""Saves come faster than the store takes them: `checkpoint.supersede = "unstarted"`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import Mount, MountFactory, poll
from tests.support.poller import Poller

pytestmark = pytest.mark.either_lane

OPTIONS = {"checkpoint.supersede": "unstarted", "flush.settle": "1s", "flush.settle_max": "1s"}
SHARDS = 4


def latest_is_whole(bucket: Any) -> list[str]:
    """`latest` names a checkpoint all of which is there."""
    if not bucket.exists("latest"):
        return []
    step = bucket.get("latest").decode()
    missing = {f"{step}/{name}" for name in names()} - set(bucket.keys())
    return [f"latest says {step}, but {sorted(missing)} are missing"] if missing else []


def names() -> list[str]:
    return [*(f"shard{n}.bin" for n in range(SHARDS)), "model.safetensors.index.json"]


def save(mount: Mount, number: int, *, point: bool = True) -> Path:
    """One checkpoint, and `latest` that names it."""
    folder = mount.path / f"step_{number}"
    folder.mkdir()
    for name in names()[:-1]:
        (folder / name).write_bytes(os.urandom(300_000))
    (folder / names()[-1]).write_text(json.dumps({"step": number}))
    if point:
        (mount.path / "latest").write_text(folder.name)
    return folder


def steps_in(bucket: Any) -> list[str]:
    found = {key.split("/")[0] for key in bucket.keys() if "/" in key}  # noqa: SIM118
    return sorted(found)


@pytest.fixture
def behind(mounted: MountFactory, bucket: Any, link: Any) -> Iterator[Mount]:
    """Three checkpoints were saved while the store was away."""
    mount = mounted(bucket, endpoint=link.endpoint, options=OPTIONS, allow=("reach|transient",))
    (mount.path / "first").write_text("so that all is known of the bucket")
    mount.wait()
    link.cut()
    for number in range(3):
        save(mount, number)
    yield mount


def test_only_the_newest_goes_up(behind: Mount, bucket: Any, link: Any) -> None:
    """Two are skipped, and told so wherever one asks; `latest` never names one that is missing."""
    poll(lambda: behind.xattr("state", "step_1/shard0.bin") == "superseded", 10)
    with Poller(bucket, latest_is_whole) as poller:
        link.mend()
        behind.wait(behind.path / "step_2")
        behind.wait(behind.path / "latest")
    poller.assert_ordered()
    assert steps_in(bucket) == ["step_2"]
    assert bucket.get("latest") == b"step_2"
    done = behind.cli("wait", behind.path / "step_0")
    assert done.returncode == 6
    assert "newer checkpoint" in done.stderr
    told = {Path(each["path"]).name: each for each in behind.status()["checkpoints"]}
    assert told["step_0"]["superseded"]
    assert not told["step_0"]["durable"]
    assert told["step_2"]["durable"]
    assert (behind.path / "step_0" / "shard0.bin").stat().st_size == 300_000
    assert len((behind.path / "step_0" / "shard0.bin").read_bytes()) == 300_000


def test_somebody_waits_for_one_that_is_skipped(behind: Mount, link: Any) -> None:
    poll(lambda: behind.xattr("state", "step_1/shard0.bin") == "superseded", 10)
    done = behind.cli("wait", behind.path / "step_1", "--timeout", "30")
    assert done.returncode == 6
    link.mend()


def test_it_can_be_had_nonetheless(behind: Mount, bucket: Any, link: Any) -> None:
    poll(lambda: behind.xattr("state", "step_1/shard0.bin") == "superseded", 10)
    assert behind.cli("resolve", behind.path / "step_1", "--keep").returncode == 0
    link.mend()
    behind.wait(behind.path / "step_1")
    assert {f"step_1/{name}" for name in names()} <= set(bucket.keys())


def test_removed_after_it_was_skipped(behind: Mount, bucket: Any, link: Any) -> None:
    """Rotation goes on as if it were there."""
    for step in ("step_0", "step_1"):
        poll(lambda each=step: behind.xattr("state", f"{each}/shard0.bin") == "superseded", 10)
    for name in names():
        (behind.path / "step_0" / name).unlink()
    (behind.path / "step_0").rmdir()
    link.mend()
    behind.wait(behind.path / "step_2")
    behind.wait(behind.path / "latest")
    assert steps_in(bucket) == ["step_2"]


def test_a_pointer_that_was_not_rewritten_keeps_it(
    mounted: MountFactory, bucket: Any, link: Any
) -> None:
    """The newer one is complete, but `latest` names the older one still."""
    mount = mounted(bucket, endpoint=link.endpoint, options=OPTIONS, allow=("reach|transient",))
    link.cut()
    save(mount, 0)
    save(mount, 1, point=False)
    with Poller(bucket, latest_is_whole) as poller:
        link.mend()
        mount.wait()
    poller.assert_ordered()
    assert steps_in(bucket) == ["step_0", "step_1"]
    assert bucket.get("latest") == b"step_0"


def test_never_is_the_default(mounted: MountFactory, bucket: Any, link: Any) -> None:
    mount = mounted(bucket, endpoint=link.endpoint, allow=("reach|transient",))
    link.cut()
    for number in range(2):
        save(mount, number)
    link.mend()
    mount.wait()
    assert steps_in(bucket) == ["step_0", "step_1"]
