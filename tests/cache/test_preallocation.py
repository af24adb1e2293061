"""What a filesystem sets aside behind the end of a file that grows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache import system

MIB = 1 << 20
SIZE = 24 * MIB


@pytest.fixture
def xfs(ram_dir: Path) -> Iterator[Path]:
    image, top = ram_dir / "image", ram_dir / "xfs"
    top.mkdir()
    with open(image, "wb") as file:
        file.truncate(512 * MIB)
    subprocess.run(["mkfs.xfs", "-q", "-K", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, top], check=True)
    yield top
    subprocess.run(["umount", "-l", top], check=True)


def grown(path: Path) -> int:
    """A descriptor of a file that was appended to."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    for start in range(0, SIZE, MIB):
        os.pwrite(fd, bytes([start // MIB + 1]) * MIB, start)
    return fd


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_xfs_gives_it_back(xfs: Path) -> None:
    """All but what the file has, which stays, with its end, also while it goes on growing."""
    fd = grown(xfs / "file")
    assert allocated(fd) > SIZE + MIB, "nothing was set aside: this test tells nothing"
    system.free_preallocation(fd)
    assert allocated(fd) == SIZE == os.fstat(fd).st_size
    os.pwrite(fd, b"\xff" * MIB, SIZE)
    system.free_preallocation(fd)
    assert [os.pread(fd, MIB, n * MIB)[::MIB - 1] for n in (0, 23, 24)] == [
        b"\x01\x01", b"\x18\x18", b"\xff\xff",
    ]  # fmt: skip
    os.close(fd)


def test_others_have_nothing_of_it(tmp_path: Path, ram_dir: Path) -> None:
    for folder in (tmp_path, ram_dir):
        fd = grown(folder / "file")
        system.free_preallocation(fd)
        assert os.fstat(fd).st_size == SIZE
        os.close(fd)
