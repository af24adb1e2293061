"""The warm tier's directory: what is staged, shown, moved, removed and read there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cachefs.cache.clone import copy_range
from cachefs.cache.warmdir import Attributes, Shown, WarmDirectory
from cachefs.errors import CacheError

LOOKS = Attributes(0o640, os.getuid(), os.getgid(), 10**18, 10**18 + 5)


def opened(root: Path, node: str = "n1") -> WarmDirectory:
    made = WarmDirectory(root, node)
    made.open(None)
    return made


def staged(root: Path) -> set[str]:
    return {p.name for p in (root / ".cachefs/staging").rglob("*") if not p.is_dir()}


def show(directory: WarmDirectory, path: str, content: bytes) -> Shown:
    source = directory.directory.parent / "source"
    source.write_bytes(content)
    directory.stage("7", str(source), len(content), LOOKS)
    return Shown(path, len(content), directory.show("7", path))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "warm"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("node", ["n1", "..", "."])
def test_a_node_clears_up_after_itself_alone(root: Path, node: str) -> None:
    one, other = opened(root, node), opened(root, "n2")
    one.stage_link("1", b"x")
    other.stage_link("2", b"x")
    known = one.open(None)
    assert staged(root) == {"2"}
    assert other.open(known) == known
    assert staged(root) == set()


def test_another_directory_is_refused(root: Path) -> None:
    known = opened(root).open(None)
    for path in (root / ".cachefs").rglob("*"):
        if path.name == "id":
            path.unlink()
    with pytest.raises(CacheError, match="lost its id"):
        WarmDirectory(root, "n1").open(known)
    with pytest.raises(CacheError, match="not there"):
        WarmDirectory(root / "none", "n1").open(known)


def test_a_copy_has_bytes_and_attributes(root: Path) -> None:
    copy = show(opened(root), "a/b/f", b"x" * 100_000)
    found = (root / "a/b/f").stat()
    assert (found.st_size, found.st_mode & 0o777, found.st_mtime_ns) == (
        100_000,
        0o640,
        LOOKS.mtime_ns,
    )
    assert copy.is_it(found)
    assert staged(root) == set()


def test_removed_is_what_was_shown(root: Path) -> None:
    directory = opened(root)
    copy = show(directory, "a/f", b"one")
    assert directory.remove(copy)
    assert not (root / "a").exists()
    assert directory.remove(copy), "it may be gone already"
    copy = show(directory, "a/f", b"two")
    (root / "a/f").write_bytes(b"owt")
    assert not directory.remove(copy)
    assert (root / "a/f").read_bytes() == b"owt"


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def test_a_copy_is_read_as_it_was_shown_or_not_at_all(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(root)
    copy = show(directory, "f", b"0123456789")
    target = tmp_path / "target"
    target.write_bytes(bytes(10))
    assert directory.read_into(copy, str(target), 2, 5)
    assert target.read_bytes() == b"\0\x00234" + bytes(5)
    assert not directory.read_into(copy, str(target), 8, 11), "too short"

    def meanwhile(*args: int) -> int:
        count = copy_range(*args)
        touch(root / "f")
        return count

    monkeypatch.setattr("cachefs.cache.warmdir.copy_range", meanwhile)
    assert not directory.read_into(copy, str(target), 0, 10), "touched while it was read"
    monkeypatch.undo()
    assert not directory.read_into(copy, str(target), 0, 10), "touched before"


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_is_moved_as_it_was_shown(
    root: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(root)
    copy = show(directory, "f", b"content")
    if not links:

        def refuse(*args: object, **more: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    assert directory.stage_again("8", copy)
    (root / "f").unlink()
    assert directory.stage_again("8", copy), "it is staged already"
    moved = Shown("g", copy.size, directory.show("8", "g"))
    assert moved.is_it((root / "g").stat())
    touch(root / "g")
    assert not directory.stage_again("8", moved)
    assert staged(root) == set()


def test_what_a_file_or_a_symlink_says(root: Path) -> None:
    directory = opened(root)
    show(directory, "latest", b"step-5\n")
    directory.stage_link("9", b"step-6")
    directory.show("9", "current")
    assert directory.text_of("latest", 4) == b"step"
    assert directory.text_of("current", 256) == b"step-6"
    assert directory.text_of("none", 256) == b""
    assert directory.has_file("latest", 7)
    assert directory.has_file("latest", None)
    assert not directory.has_file("latest", 8)
    assert not directory.has_file("current", None), "it leads nowhere"
