"""Listings that the kernel gives out again: never of something that is gone or not yet there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.work import Work

pytestmark = [pytest.mark.either_lane, pytest.mark.timeout(120), pytest.mark.slow]

PAGE = 128
"""Entries with names of up to eight bytes that fill a page of the kernel's."""
CHUNK = 256
"""Entries, the two dots among them, that one getdents64 with a buffer of 8 KiB gives."""
MANY = CHUNK - 2 + 5 * PAGE - 2
"""So many that the rest after the first chunk, with the dots, fills pages to the last byte: there
Linux takes an entry that is gone for the end."""


def _fill(folder: Path, count: int = MANY) -> set[str]:
    """With names that are not uploaded: a thousand objects for each test would take ten seconds."""
    names = {f"tmp-{number:04}" for number in range(count)}
    for name in names:
        os.mknod(folder / name)
    return names


def _asked(work: Work) -> int:
    """How often the kernel has asked for a part of a directory."""
    requests: dict[str, int] = work.mount.status()["requests"]
    return requests.get("READDIR", 0) + requests.get("READDIRPLUS", 0)


def test_a_second_listing_is_not_asked_for(work: Work) -> None:
    """A directory that was read is given out by the kernel, until something in it changes."""
    names = _fill(work.path)
    assert set(os.listdir(work)) == names
    before = _asked(work)
    assert set(os.listdir(work)) == names
    assert _asked(work) == before, "the second listing was the daemon's"
    os.unlink(work / "tmp-0007")
    os.rename(work / "tmp-0008", work / "renamed")
    os.link(work / "tmp-0009", work / "linked")
    os.mkdir(work / "made")
    changed = names - {"tmp-0007", "tmp-0008"} | {"renamed", "linked", "made"}
    assert set(os.listdir(work)) == changed
    assert _asked(work) > before


def test_attributes_are_not_older_than_names(work: Work) -> None:
    """What a listing by the kernel leads to has the size of now."""
    _fill(work.path, 20)
    for size in (10, 20, 30):
        (work / "tmp-0003").write_bytes(b"x" * size)
        with os.scandir(work) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        assert sizes["tmp-0003"] == size and len(sizes) == 20


def _remove_while_others_list(folder: str) -> list[int]:
    """Like `rm -r`: read some, remove all that was read, read on; others list the directory from
    the start after each step. (entries seen in all, listings of others that were wrong)"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(8192)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    left = set(os.listdir(folder))
    seen, wrong = 0, 0
    while (got := libc.syscall(217, fd, buffer, len(buffer))) > 0:
        at, names = 0, []
        while at < got:
            length = int.from_bytes(buffer.raw[at + 16 : at + 18], "little")
            name = buffer.raw[at + 19 : at + length].split(b"\0")[0].decode()
            names += [name] if name not in (".", "..") else []
            at += length
        seen += len(names)
        for name in names:
            os.unlink(os.path.join(folder, name))
            left.discard(name)
        for _ in range(2):
            wrong += set(os.listdir(folder)) != left
    os.close(fd)
    return [seen, wrong, len(left)]


@pytest.mark.parametrize("listed", [False, True], ids=["never listed", "listed before"])
def test_removing_what_others_list(work: Work, listed: bool) -> None:
    """Nothing is skipped when the entry that was given out last is gone and the kernel has read the
    directory anew for somebody else."""
    _fill(work.path)
    if listed:
        os.listdir(work)
    seen, wrong, left = work.run(_remove_while_others_list, work.path)
    assert (seen, wrong, left) == (MANY, 0, 0)


def _rewind(folder: str) -> list[int]:
    """Listings of one open directory, rewound after each change; how many were wrong."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    wrong = []
    for number in range(20):
        os.mknod(os.path.join(folder, f"new{number}"))
        wrong.append(set(os.listdir(fd)) != set(os.listdir(folder)))
        os.lseek(fd, 0, os.SEEK_SET)
        wrong.append(f"new{number}" not in os.listdir(fd))
        if number % 3 == 0:
            os.unlink(os.path.join(folder, f"new{number}"))
            wrong.append(f"new{number}" in os.listdir(fd))
    os.close(fd)
    return [sum(wrong), len(wrong)]


def test_rewound(work: Work) -> None:
    """rewinddir(3) shows the directory as it is then."""
    _fill(work.path, 300)
    wrong, _ = work.run(_rewind, work.path)
    assert wrong == 0
