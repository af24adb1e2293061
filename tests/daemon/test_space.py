"""How much room a mount says that it has."""

from __future__ import annotations

from tests.daemon.lab import Lab, in_lab

MIB = 1 << 20


@in_lab()
async def test_what_the_store_lacks_takes_room_until_it_has_it(lab: Lab) -> None:
    space = lab.parts.space
    before = space.usage()
    await lab.write("dirty", b"d" * 8 * MIB)
    fh = await lab.open("open")
    await lab.put(fh, b"o" * 4 * MIB)
    assert before.free - 13 * MIB < space.usage().free <= before.free - 12 * MIB
    lab.close(fh)
    await lab.wait()
    assert space.usage().free > before.free - MIB, "it can be evicted when room is wanted"
    assert space.usage().size == before.size
