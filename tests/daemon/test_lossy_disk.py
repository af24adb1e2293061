"""A disk that lost bytes of a file, and works again: nobody is told that they survive a reboot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cachefs.daemon import tasks
from cachefs.flush.reboot import Reboots
from tests.daemon.lab import Lab, fails, lab
from tests.support import ramdevice
from tests.support.lossydisk import LossyDisk

DATA = os.urandom(1 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LossyDisk]:
    """The cache device."""
    (device,) = ramdevice.directories(tmp_path, ram=False)
    made = LossyDisk(tmp_path, device.name, 80)
    yield made
    made.end()


async def syncs(made: Lab, path: str) -> bool:
    """Whether a file is said to be on the disk once that was tried."""
    unsynced = made.services.meta.generations.in_states(*tasks._UNSAFE)
    row = max(unsynced, key=lambda each: each.gen)
    await made.parts.syncer._sync([row.gen])
    told = await made.ask("status", path=path)
    return bool(told["survives"] == "reboot")


@pytest.mark.parametrize("told", ["a program", "nobody"])
def test_lost_bytes_survive_no_reboot(tmp_path: Path, disk: LossyDisk, told: str) -> None:
    async def main() -> None:
        async with lab(tmp_path, "flush.settle=1h", "flush.settle_max=1h", flusher=False) as made:
            await made.write("whole.bin", DATA)
            assert await syncs(made, "whole.bin")
            disk.fail()
            fh = await made.open("f.bin")
            await made.put(fh, DATA)
            if told == "a program":
                with pytest.raises(OSError, match=r"space|Input"):
                    await made.services.files.fsync(fh)
            else:
                os.sync()
            made.close(fh)
            disk.work()
            for _ in range(2):
                assert not await syncs(made, "f.bin")
            await fails(made.wait("f.bin", survives="reboot", timeout=0.3), 4)
            reboots = Reboots(made.services.meta)
            reboots.remember()
            for _ in range(2):  # Of the whole disk, too, the kernel tells once.
                await tasks.bring_to_disk(made.services.meta, made.services.devices)
            assert reboots.in_use(), "a reboot is told of by the next daemon"

    trio.run(main)
