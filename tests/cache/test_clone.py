"""Copies of cache files: equal, sparse where the source is, whatever the kernel offers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from cachefs.cache.clone import clone_file, data_extents

MIB = 1 << 20


def make(path: Path, size: int, data: dict[int, bytes]) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.ftruncate(fd, size)
    for offset, content in data.items():
        os.pwrite(fd, content, offset)
    return fd


def refuse(number: int) -> Callable[..., NoReturn]:
    def call(*args: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


LAYOUTS = {
    "empty": (0, {}),
    "only a hole": (3 * MIB, {}),
    "no hole": (100_001, {0: b"a" * 100_001}),
    "hole first": (2 * MIB + 5, {2 * MIB: b"tail!"}),
    "hole last": (5 * MIB, {0: b"head"}),
    "holes between": (9 * MIB, {MIB: os.urandom(70_000), 6 * MIB: os.urandom(MIB), 8 * MIB: b"z"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["kernel", "bytes", "copies nothing"])
def test_a_copy_is_equal_and_keeps_holes(
    place: Path, layout: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "bytes":
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    elif way == "copies nothing":
        monkeypatch.setattr(os, "copy_file_range", lambda *args: 0)
    size, data = LAYOUTS[layout]
    source, target = make(place / "a", size, data), make(place / "b", 0, {})
    clone_file(source, target)
    assert os.pread(target, size + 1, 0) == os.pread(source, size + 1, 0)
    assert os.fstat(target).st_size == size
    assert os.fstat(target).st_blocks <= os.fstat(source).st_blocks
    os.close(source)
    os.close(target)


def test_a_filesystem_without_hole_search_is_copied_whole(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "lseek", refuse(errno.EINVAL))
    fd = make(place / "a", MIB, {0: b"x"})
    assert list(data_extents(fd, MIB)) == [(0, MIB)]
    os.close(fd)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_real_errors_are_not_taken_for_missing_features(
    place: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", refuse(number))
    source, target = make(place / "a", 10, {0: b"x"}), make(place / "b", 0, {})
    with pytest.raises(OSError, match=os.strerror(number)):
        clone_file(source, target)
    os.close(source)
    os.close(target)


def test_short_writes_are_completed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "copy_file_range", refuse(errno.EXDEV))
    source, target = make(place / "a", 0, {0: os.urandom(300_000)}), make(place / "b", 0, {})
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:70_000], at))
    clone_file(source, target)
    assert os.pread(target, MIB, 0) == os.pread(source, MIB, 0)
    os.close(source)
    os.close(target)
