"""`wait --survives`: what the cache device gives is enough where it does."""

from __future__ import annotations

import pytest
import trio

from cachefs.cache.device import CacheDevice
from cachefs.model.survival import Level
from tests.daemon.lab import Lab, fails, in_lab, until


def _device(lab: Lab, level: Level) -> CacheDevice:
    """The cache device, made to give this level."""
    device = lab.services.devices[0]
    device._survives = level
    return device


@in_lab()
async def test_process_is_reached_at_once(lab: Lab) -> None:
    lab.bucket.hold()
    await lab.write("d/f.bin")
    await lab.write("d/f.bin.tmp")
    told = await lab.wait(survives="process", timeout=0)
    assert told["files"] == 0
    assert lab.bucket.waiting == 0


@in_lab()
async def test_process_waits_for_open_files_to_close(lab: Lab) -> None:
    lab.bucket.hold()
    fh = await lab.open("f.bin")
    await lab.put(fh, b"x")
    answer = lab.asking(lambda: lab.wait("f.bin", survives="process"))
    await trio.sleep(0.3)
    assert not answer.done
    lab.close(fh)
    await answer
    assert (await lab.ask("status", path="f.bin"))["state"] == "dirty"


@in_lab(syncer=True)
async def test_reboot_needs_a_sync(lab: Lab) -> None:
    _device(lab, Level.REBOOT)
    lab.bucket.hold()
    await lab.write("d/f.bin")
    assert (await lab.ask("status", path="d/f.bin"))["survives"] == "process"
    await lab.wait("d", survives="reboot")
    found = await lab.ask("status", path="d/f.bin")
    assert (found["state"], found["survives"]) == ("dirty", "reboot")
    assert (await lab.ask("status", path="d"))["survives"] == "reboot"


@in_lab()
async def test_reboot_is_not_reached_while_nothing_is_synced(lab: Lab) -> None:
    _device(lab, Level.REBOOT)
    lab.bucket.hold()
    await lab.write("f.bin")
    await fails(lab.wait(survives="reboot", timeout=0.3), 4)
    assert lab.bucket.waiting == 0, "the store was asked although the disk is enough"
    lab.bucket.let_go()
    await lab.wait()
    await lab.wait(survives="reboot")


@in_lab(syncer=True)
async def test_names_alone_need_the_database(lab: Lab) -> None:
    """A rename survives a reboot once the database is synced, and that is asked for."""
    _device(lab, Level.REBOOT)
    await lab.write("a.bin")
    await lab.wait()
    lab.bucket.hold()
    await lab.rename("a.bin", "b.bin")
    synced = []

    async def sync() -> None:
        synced.append(True)

    lab.services.sync_meta = sync
    await lab.wait(survives="reboot")
    assert synced


@in_lab(syncer=True)
async def test_what_the_device_does_not_give_the_store_must(lab: Lab) -> None:
    """Memory does not survive a reboot, nor a disk the instance: bytes must be at the site."""
    for device, level in ((Level.PROCESS, "reboot"), (Level.REBOOT, "instance")):
        _device(lab, device)
        lab.bucket.hold()
        await lab.write(f"{level}.bin")
        answer = lab.asking(lambda level=level: lab.wait(survives=level))  # type: ignore[misc]
        await until(lambda: lab.bucket.waiting)
        await trio.sleep(0.1)
        assert not answer.done
        lab.bucket.let_go()
        await answer
        assert lab.bucket.get(f"{level}.bin") == b"x"


@in_lab(syncer=True)
async def test_a_network_volume_survives_the_instance(lab: Lab) -> None:
    _device(lab, Level.INSTANCE)
    lab.bucket.hold()
    await lab.write("f.bin")
    await lab.wait(survives="instance")
    assert (await lab.ask("status", path="f.bin"))["survives"] == "instance"


@in_lab(syncer=True)
async def test_trouble_with_the_store_does_not_matter_to_the_disk(lab: Lab) -> None:
    _device(lab, Level.REBOOT)
    lab.bucket.hold()
    await lab.write("x.tmp")
    await lab.wait(survives="reboot")


@pytest.mark.parametrize("name", ["Site", " site "])
def test_levels_are_taken_as_people_write_them(name: str) -> None:
    assert Level.parse(name) is Level.SITE
