"""Checkpoints that several nodes save together, and which one is the newest whole one."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.link import Link
from tests.support.mounts import Mount, MountFactory, poll

pytestmark = [pytest.mark.either_lane, pytest.mark.timeout(120)]


class _Watcher:
    """Looks at the bucket all the time: no marker without all that it stands for."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket
        self._ended = threading.Event()
        self.torn: list[str] = []
        self.looks = 0
        self.needs: dict[str, set[str]] = {}
        """Marker -> keys."""

    def run(self) -> None:
        while not self._ended.is_set():
            # Asked in this order: what comes in between can only make it look better.
            seen = [marker for marker in list(self.needs) if self._bucket.exists(marker)]
            keys = set(self._bucket.sizes())
            for marker in seen:
                if lacking := self.needs[marker] - keys:
                    self.torn.append(f"{marker} without {sorted(lacking)}")
            self.looks += 1

    def end(self) -> None:
        self._ended.set()


@contextmanager
def _watching(bucket: Any) -> Iterator[_Watcher]:
    watcher = _Watcher(bucket)
    thread = threading.Thread(target=watcher.run, daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        watcher.end()
        thread.join()
    assert watcher.looks > 3
    assert not watcher.torn, watcher.torn[:5]


def _manifests(bucket: Any, path: str) -> dict[str, Any]:
    prefix = f".cachefs/ckpt/{path}/"
    keys = [key for key in bucket.sizes(reserved=True) if key.startswith(prefix)]
    return {Path(key).stem: json.loads(bucket.get(key)) for key in keys}


def _latest(mount: Mount, folder: str = "run") -> str | None:
    done = mount.cli("latest", mount.path / folder)
    assert done.returncode in (0, 1), done.stderr
    return os.path.relpath(done.stdout.strip(), mount.path) if done.returncode == 0 else None


def _mounts(mounted: MountFactory, bucket: Any, links: list[Link], nodes: int) -> list[Mount]:
    shared = {"checkpoint.nodes": str(nodes), "mount.metadata_ttl": "1s"}
    return [
        mounted(
            bucket,
            endpoint=link.endpoint,
            options={**shared, "node.id": f"node-{number}"},
            allow=(".",),
        )
        for number, link in enumerate(links)
    ]


@pytest.mark.slow
def test_a_marker_waits_for_all_nodes(
    mounted: MountFactory, bucket: Any, seaweed: Any, after_mounts: Any
) -> None:
    """Four nodes, one of them slow, one that pauses between its shards, one that dies and is
    replaced: `.metadata` and `latest`, written by the first after all have saved, show last."""
    links = [after_mounts.enter_context(Link(seaweed.endpoint)) for _ in range(4)]
    mounts = _mounts(mounted, bucket, links, 4)
    with _watching(bucket) as watcher:
        for step in (1, 2):
            folder = f"run/step_{step}"
            shards = {f"{folder}/__{node}_{n}.distcp" for node in range(4) for n in range(2)}
            watcher.needs[f"{folder}/.metadata"] = shards
            for mount in mounts:
                (mount.path / folder).mkdir(parents=True, exist_ok=True)
            for part in range(2):
                for node, mount in enumerate(mounts):
                    body = os.urandom(100_000 + node)
                    (mount.path / folder / f"__{node}_{part}.distcp").write_bytes(body)
                if part == 0:  # All of them are in the bucket, and each node has said so.
                    poll(lambda: len(_manifests(bucket, folder)) == 4, 20)  # noqa: B023
                    links[3].delay = 1.0
            (mounts[0].path / folder / ".metadata").write_bytes(b"made of __0_0.distcp")
            (mounts[0].path / "run/latest").write_bytes(folder[4:].encode())
            if step == 1:
                watcher.needs["run/latest"] = shards
                pid = mounts[2].kill_daemon()
                mounts[2].took_over(pid)
            links[3].delay = 0.0
            mounts[0].wait(timeout=60)
            assert bucket.get("run/latest") == folder[4:].encode()
            found = _manifests(bucket, folder)
            assert sorted(found) == [f"node-{n}" for n in range(4)]
            for node in range(4):
                own = {each["key"] for each in found[f"node-{node}"]["files"]}
                assert {key for key in shards if f"/__{node}_" in key} <= own
            assert _latest(mounts[1]) == folder
    assert not [key for key in bucket.sizes(reserved=True) if key.startswith(".cachefs/asks/")]


def test_a_marker_waits_as_long_as_a_node_is_away(mounted: MountFactory, bucket: Any) -> None:
    """Of two nodes one is not there: the marker stays here, data goes, and it shows when the other
    has come and answered, though it has saved nothing of its own."""
    options = {"checkpoint.nodes": "2", "mount.metadata_ttl": "1s"}
    one = mounted(bucket, options={**options, "node.id": "one"})
    (one.path / "step_7").mkdir()
    (one.path / "step_7/model.safetensors").write_bytes(b"weights")
    (one.path / "step_7/model.safetensors.index.json").write_bytes(b"{}")
    poll(lambda: bucket.keys() == ["step_7/model.safetensors"], 20)
    time.sleep(2)
    assert bucket.keys() == ["step_7/model.safetensors"]
    assert ["1 other node"] in [each["waits_for"] for each in one.status()["effects"]]
    assert _latest(one, "") is None
    one.remount() if one.unmount(drain_timeout=1) == 3 else pytest.fail("nothing was left")
    other = mounted(bucket, options={**options, "node.id": "other"})
    one.wait()
    assert bucket.exists("step_7/model.safetensors.index.json")
    assert _latest(other, "") == "step_7"


def test_manifest_of_one_node(mounted: MountFactory, bucket: Any) -> None:
    """It comes after the last key, follows changes, and goes with its checkpoint."""
    mount = mounted(bucket, options={"node.id": "solo"})
    folder = mount.path / "run/checkpoint-10"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "trainer_state.json"):
        (folder / name).write_bytes(name.encode())
    mount.wait()
    assert _latest(mount) == "run/checkpoint-10"
    found = poll(lambda: _manifests(bucket, "run/checkpoint-10"), 10)["solo"]
    names = {each["key"].rpartition("/")[2]: each["size"] for each in found["files"]}
    assert names == {"model.safetensors": 17, "trainer_state.json": 18}
    assert found["nodes"] == 1
    bucket.delete("run/checkpoint-10/model.safetensors")
    assert _latest(mount) is None, "a manifest that is not true any more is not believed"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    mount.wait()
    left = "run/checkpoint-10/solo.json"
    poll(lambda: f".cachefs/ckpt/{left}" not in bucket.sizes(reserved=True), 10)


def test_a_save_that_was_not_finished_is_not_the_latest(mounted: MountFactory, bucket: Any) -> None:
    """Its files are in the bucket, and the manifest says so; but nothing says that it is all."""
    mount = mounted(bucket)
    for step in (1, 2):
        (mount.path / f"run/global_step{step}").mkdir(parents=True)
        (mount.path / f"run/global_step{step}/rank_0.pt").write_bytes(b"weights")
        if step == 1:
            (mount.path / "run/latest").write_bytes(b"global_step1\n")
    mount.wait()
    poll(lambda: _manifests(bucket, "run/global_step2"), 10)
    assert _latest(mount) == "run/global_step1"
    (mount.path / "run/latest").write_bytes(b"global_step2\n")
    mount.wait()
    assert _latest(mount) == "run/global_step2"


def test_latest_of_what_others_saved(mounted: MountFactory, bucket: Any) -> None:
    """No manifests: what a framework's own index says, never that something is there."""
    index = json.dumps({"weight_map": {"a": "m-00001-of-00002.safetensors"}}).encode()
    for name in ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"):
        bucket.put(f"run/checkpoint-1/{name}", b"w")
    bucket.put("run/checkpoint-1/m.safetensors.index.json", index)
    bucket.put("run/checkpoint-2/m-00001-of-00002.safetensors", b"w")
    bucket.put("run/checkpoint-2/m.safetensors.index.json", index)
    bucket.put("run/checkpoint-3/m-00001-of-00001.safetensors", b"w")
    bucket.put("other/model.txt", b"nothing")
    mount = mounted(bucket, options={"mount.metadata_ttl": "1s"})
    assert _latest(mount) == "run/checkpoint-1"
    assert _latest(mount, "other") is None
    bucket.put("run/checkpoint-2/m-00002-of-00002.safetensors", b"w")
    told = json.loads(mount.cli("latest", mount.path / "run", "--json").stdout)
    assert told["path"] == str(mount.path / "run/checkpoint-2")
    assert (told["step"], told["files"], told["proof"]) == (2, 3, "index")
