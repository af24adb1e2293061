"""What may not be adopted, and what comes along."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cachefs.model.objectmeta import XATTR_LIMIT, decode
from cachefs.store.directory import DirectoryStore
from tests.daemon.lab import MOUNTPOINT, Lab, fails, in_lab


async def _silent(values: object, /) -> None:
    pass


async def adopt(lab: Lab, source: Path, name: str) -> Any:
    words = {"src": str(source), "dst": f"{MOUNTPOINT}/{name}"}
    return await lab.handlers["adopt"](words, _silent)


def source_in(lab: Lab, place: str) -> Path:
    """A file on the filesystem of the cache, or on another one."""
    folder = lab.services.devices[0].directory.parent
    source = folder / "source" if place == "here" else Path("/dev/shm", folder.name)
    source.write_bytes(b"mine")
    return source


def xattrs(lab: Lab, name: str) -> dict[bytes, bytes]:
    row = lab.services.meta.inodes.lookup(1, name.encode())
    assert row is not None
    return dict(lab.services.meta.inodes.xattrs(row.ino))


@in_lab(flusher=False)
async def test_files_of_the_cache_itself(lab: Lab) -> None:
    """Whoever has them would lose them."""
    await lab.write("f.bin", b"mine")
    (device,) = lab.services.devices
    row = lab.services.meta.generations.current(2)
    assert row is not None
    source = device.path(row.file)
    assert "cache" in await fails(adopt(lab, Path(source), "g.bin"), 2)
    assert device.exists(row.file)


@in_lab()
async def test_extended_attributes_come_along(lab: Lab) -> None:
    """Those of users, into the store too; what cachefs itself says of a file is no such thing."""
    source = source_in(lab, "here")
    os.setxattr(source, "user.step", b"4000")
    os.setxattr(source, "user.bytes", bytes(range(20)))
    os.setxattr(source, "user.cachefs.state", b"durable")
    if os.geteuid() == 0:
        os.setxattr(source, "trusted.other", b"1")
    await adopt(lab, source, "f.bin")
    assert not source.exists()
    expected = {b"user.step": b"4000", b"user.bytes": bytes(range(20))}
    assert xattrs(lab, "f.bin") == expected
    await lab.wait()
    store = DirectoryStore(Path(lab.services.settings.store.url.removeprefix("file://")))
    assert dict(decode(store.head("f.bin").metadata).xattrs) == expected


@in_lab(flusher=False)
async def test_they_replace_those_that_were_there(lab: Lab) -> None:
    await lab.write("f.bin", b"old")
    row = lab.services.meta.inodes.lookup(1, b"f.bin")
    assert row is not None
    lab.services.namespace.set_xattr(row, b"user.old", b"1")
    source = source_in(lab, "here")
    os.setxattr(source, "user.new", b"2")
    await adopt(lab, source, "f.bin")
    assert xattrs(lab, "f.bin") == {b"user.new": b"2"}


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_more_than_an_object_can_carry(tmp_path: Path, place: str) -> None:
    """Refused before anything is done: the file stays where it is, and is whole."""

    @in_lab(flusher=False)
    async def test(lab: Lab) -> None:
        source = source_in(lab, place)
        try:
            os.setxattr(source, "user.large", bytes(XATTR_LIMIT))
        except OSError:
            source.unlink()
            pytest.skip("this filesystem has no such attributes")
        told = await fails(adopt(lab, source, "f.bin"), 1)
        assert "extended attributes" in told
        assert "1024" in told
        assert source.read_bytes() == b"mine"
        assert lab.services.meta.inodes.lookup(1, b"f.bin") is None
        source.unlink()

    test(tmp_path)


@in_lab(flusher=False)
async def test_one_that_changes_meanwhile(lab: Lab) -> None:
    source = source_in(lab, "here")
    device = lab.services.devices[0]
    take = device.adopt

    def late(path: Any, gen: int) -> Any:
        os.setxattr(source, "user.late", b"1")
        return take(path, gen)

    device.adopt = late  # type: ignore[method-assign]
    await fails(adopt(lab, source, "f.bin"), 1)
    assert source.read_bytes() == b"mine"
    assert lab.services.meta.inodes.lookup(1, b"f.bin") is None
