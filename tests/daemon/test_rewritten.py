"""A file too large to be kept is written to again before the store has it, in the same cache file.

Its generation stays the same one, so nothing that was found out about it before may count.
"""

from __future__ import annotations

import os

from cachefs.errors import Refused
from tests.daemon.lab import Lab, in_lab, until

MIB = 1 << 20


async def rewrite(lab: Lab, text: bytes) -> None:
    """The first bytes, in place."""
    fh = await lab.open("f.bin", os.O_RDWR)
    await lab.put(fh, text)
    lab.close(fh)


async def refused(lab: Lab, name: str) -> None:
    """Until the store has refused an entry."""
    entry = lab.services.meta.dentries.get(1, name.encode())
    assert entry is not None
    await until(lambda: any(e.state != "pending" for e in lab.services.queue.of_dentry(entry.id)))


@in_lab("cache.preserve_limit=1", "flush.settle=0s")
async def test_one_of_two_names_was_shown(lab: Lab) -> None:
    """What that name shows are the bytes before: neither name is done with them."""
    await lab.write("f.bin", b"first")
    entry = lab.services.meta.dentries.get(1, b"f.bin")
    assert entry is not None
    await lab.services.namespace.link(entry.ino, 1, b"g.bin")
    lab.bucket.refused["g.bin"] = Refused("not now")
    await until(lambda: "f.bin" in lab.bucket.keys())  # noqa: SIM118
    await refused(lab, "g.bin")
    await rewrite(lab, b"again")
    lab.bucket.refused.clear()
    await lab.wait()
    assert {key: lab.bucket.get(key) for key in lab.bucket.keys()} == {  # noqa: SIM118
        "f.bin": b"again",
        "g.bin": b"again",
    }


@in_lab(
    "cache.preserve_limit=1",
    "flush.settle=0s",
    "flush.part_size=5MiB",
    "flush.single_put_max=5MiB",
)
async def test_it_was_compared_with_the_object_before(lab: Lab) -> None:
    """Where both were equal it has other bytes now."""
    first = b"a" * (5 * MIB) + b"b" * (5 * MIB) + b"c" * (2 * MIB)
    await lab.write("f.bin", first)
    await lab.wait()
    lab.bucket.refused["f.bin"] = Refused("not now")
    second = first.replace(b"b", b"x")
    await lab.write("f.bin", second)
    await refused(lab, "f.bin")
    await rewrite(lab, b"new")
    lab.bucket.refused.clear()
    await lab.wait()
    assert lab.bucket.get("f.bin") == b"new" + second[3:]
