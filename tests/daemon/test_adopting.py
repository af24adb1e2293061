"""What may not be adopted."""

from __future__ import annotations

from tests.daemon.lab import MOUNTPOINT, Lab, fails, in_lab


@in_lab(flusher=False)
async def test_files_of_the_cache_itself(lab: Lab) -> None:
    """Whoever has them would lose them."""
    await lab.write("f.bin", b"mine")
    (device,) = lab.services.devices
    row = lab.services.meta.generations.current(2)
    assert row is not None
    source = str(device.path(row.file))
    adopting = lab.handlers["adopt"]({"src": source, "dst": f"{MOUNTPOINT}/g.bin"}, _silent)
    assert "cache" in await fails(adopting, 2)
    assert device.exists(row.file)


async def _silent(values: object, /) -> None:
    pass
