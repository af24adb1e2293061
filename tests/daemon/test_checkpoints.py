"""Checkpoints in `status`."""

from __future__ import annotations

from typing import Any

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.daemon import checkpoints
from cachefs.model.survival import Level
from tests.daemon.lab import Lab, in_lab


@pytest.fixture(autouse=True)
def _always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_CHEAP", 60.0)


async def _points(lab: Lab) -> dict[str, dict[str, Any]]:
    told = (await lab.ask("status"))["checkpoints"]
    return {each["path"].removeprefix("/mnt/ckpt/"): each for each in told}


@in_lab()
async def test_a_checkpoint_from_its_first_file_to_its_last_upload(lab: Lab) -> None:
    fh = await lab.open("run/checkpoint-10/model-00001-of-00002.safetensors")
    await lab.put(fh, b"x" * 100)
    point = (await _points(lab))["run/checkpoint-10"]
    assert (point["complete"], point["durable"], point["survives"]) == (False, False, "process")
    lab.close(fh)
    await lab.write("run/checkpoint-10/model-00002-of-00002.safetensors", b"x" * 50)
    assert not (await _points(lab))["run/checkpoint-10"]["complete"]
    await lab.write("run/checkpoint-10/model.safetensors.index.json", b"{}")
    point = (await _points(lab))["run/checkpoint-10"]
    assert (point["complete"], point["durable"]) == (True, False)
    assert (point["files"], point["bytes"], point["step"]) == (3, 152, 10)
    await lab.wait()
    point = (await _points(lab))["run/checkpoint-10"]
    assert (point["complete"], point["durable"], point["survives"]) == (True, True, "site")


@in_lab()
async def test_one_file_is_complete_once_closed(lab: Lab) -> None:
    await lab.write("epoch=3-step=9.ckpt", b"x")
    point = (await _points(lab))["epoch=3-step=9.ckpt"]
    assert (point["complete"], point["files"], point["bytes"]) == (True, 1, 1)


@in_lab()
async def test_files_that_share_a_prefix(lab: Lab) -> None:
    await lab.write("tf/ckpt-5.data-00000-of-00001", b"x" * 10)
    await lab.write("tf/ckpt-5.index", b"x")
    points = await _points(lab)
    assert points.keys() == {"tf/ckpt-5"}
    assert (points["tf/ckpt-5"]["files"], points["tf/ckpt-5"]["bytes"]) == (2, 11)
    assert points["tf/ckpt-5"]["complete"]


@in_lab()
async def test_a_directory_known_by_what_is_in_it(lab: Lab) -> None:
    await lab.write("final/__0_0.distcp", b"x" * 10)
    await lab.write("final/.metadata", b"x")
    points = await _points(lab)
    assert points.keys() == {"final"}
    assert (points["final"]["files"], points["final"]["framework"]) == (2, "PyTorch DCP")


@in_lab()
async def test_unfinished_names_keep_it_incomplete(lab: Lab) -> None:
    await lab.write("checkpoint-1/trainer_state.json")
    await lab.write("checkpoint-1/optimizer.pt.tmp")
    assert not (await _points(lab))["checkpoint-1"]["complete"]


@in_lab()
async def test_a_deletion_that_is_pending_is_not_durable_yet(lab: Lab) -> None:
    await lab.write("checkpoint-1/a.bin")
    await lab.write("checkpoint-1/trainer_state.json")
    await lab.write("checkpoint-2/trainer_state.json")
    await lab.wait()
    await lab.remove("checkpoint-1/a.bin")
    points = await _points(lab)
    assert (points["checkpoint-1"]["durable"], points["checkpoint-2"]["durable"]) == (False, True)


@in_lab(syncer=True)
async def test_it_survives_what_its_worst_file_does(lab: Lab) -> None:
    device: CacheDevice = lab.services.devices[0]
    device._survives = Level.REBOOT
    await lab.write("checkpoint-1/a.bin")
    assert (await _points(lab))["checkpoint-1"]["survives"] == "process"
    await lab.wait(survives="reboot")
    assert (await _points(lab))["checkpoint-1"]["survives"] == "reboot"


@in_lab()
async def test_the_newest_oldest_first(lab: Lab) -> None:
    for number in range(60):
        await lab.write(f"run/checkpoint-{number}/a.bin")
    told = (await lab.ask("status"))["checkpoints"]
    assert [each["step"] for each in told] == list(range(10, 60))


@in_lab()
async def test_what_is_no_checkpoint(lab: Lab) -> None:
    await lab.write("data/train.txt")
    await lab.write("checkpoint-7.tmp/a.bin")
    assert await _points(lab) == {}
