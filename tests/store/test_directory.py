"""The directory store as a directory: what other programs do in it, and what it does to them."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from cachefs.errors import NotFound, PreconditionFailed, Refused, StoreUnreachable, UsageError
from cachefs.store.base import FileRange, open_store
from cachefs.store.directory import DirectoryStore
from cachefs.store.dirlayout import INTERNAL, STALE_DRAFT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The store's directory."""
    path = tmp_path / "a root"
    path.mkdir()
    return path


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    """A store in it."""
    return DirectoryStore(root)


def test_objects_are_plain_files(store: DirectoryStore, root: Path) -> None:
    store.put("runs/1/model.bin", b"weights", metadata={"mode": "33188"})
    assert (root / "runs/1/model.bin").read_bytes() == b"weights"
    upload_id = store.create_upload("runs/1/big")
    parts = [store.upload_part("runs/1/big", upload_id, n, b"part%d" % n) for n in (1, 2)]
    store.complete_upload("runs/1/big", upload_id, parts)
    assert (root / "runs/1/big").read_bytes() == b"part1part2"


def test_urls(root: Path) -> None:
    store = open_store({"url": root.as_uri()})
    assert "%20" in store.url
    store.put("k", b"x")
    assert (root / "k").exists()
    for url in ("file://host/dir", "file:relative"):
        with pytest.raises(UsageError):
            open_store({"url": url})


def test_files_of_other_programs_are_objects(store: DirectoryStore, root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub/theirs").write_bytes(b"content")
    info = store.head("sub/theirs")
    assert (info.size, info.crc64, dict(info.metadata)) == (7, None, {})
    assert store.get_bytes("sub/theirs", if_match=info.etag) == b"content"
    assert [each.key for each in store.list("").objects] == ["sub/theirs"]
    copied = store.copy("sub/theirs", "ours", metadata={"a": "1"})
    assert copied.crc64 is not None
    store.delete(["sub/theirs"])
    assert not (root / "sub").exists()


def test_a_file_edited_by_another_program_is_another_version(
    store: DirectoryStore, root: Path
) -> None:
    ours = store.put("k", b"ours", metadata={"mode": "1"})
    time.sleep(0.02)
    (root / "k").write_bytes(b"hers")
    theirs = store.head("k")
    assert theirs.etag != ours.etag
    assert dict(theirs.metadata) == {}
    with pytest.raises(PreconditionFailed):
        store.put("k", b"again", if_match=ours.etag)
    store.put("k", b"again", if_match=theirs.etag)


def test_internal_files_are_no_objects(store: DirectoryStore) -> None:
    store.put(".cachefs/id", b"identity")
    assert [info.key for info in store.list("").objects] == [".cachefs/id"]
    assert store.list(".cachefs/", delimiter="/").prefixes == ()
    with pytest.raises(Refused):
        store.put(f"{INTERNAL}evil", b"")


@pytest.mark.parametrize("key", ["a//b", "/a", "a/../b", "..", ".", "a/./b", "nul\0byte", ""])
def test_keys_that_are_no_paths_are_refused(store: DirectoryStore, root: Path, key: str) -> None:
    with pytest.raises(Refused):
        store.put(key, b"x")
    with pytest.raises(Refused):
        store.head(key)
    assert list(root.parent.iterdir()) == [root]


def test_what_is_not_a_file_or_not_utf8_is_not_listed(store: DirectoryStore, root: Path) -> None:
    store.put("k", b"x")
    os.mkfifo(root / "pipe")
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9")).write_bytes(b"latin")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to(".")
    assert [info.key for info in store.list("").objects] == ["k"]
    with pytest.raises(NotFound):
        store.head("pipe")


def test_empty_directories_go_with_their_last_object(store: DirectoryStore, root: Path) -> None:
    store.put("a/b/c/d", b"x")
    store.put("a/other", b"x")
    store.delete(["a/b/c/d"])
    assert sorted(path.name for path in (root / "a").iterdir()) == ["other"]
    store.delete(["a/other"])
    assert [path.name for path in root.iterdir()] == [".cachefs"]


def test_a_missing_directory_is_refused_and_not_made(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "missing")
    for _ in range(2):
        with pytest.raises(Refused, match="does not exist") as caught:
            store.probe()
        assert "mount" in caught.value.hint
    assert not (tmp_path / "missing").exists()


def test_a_store_that_is_unmounted_has_not_lost_its_objects(
    store: DirectoryStore, root: Path
) -> None:
    store.put("k", b"x")
    away = root.with_name("away")
    root.rename(away)
    root.mkdir()  # the bare mountpoint
    for call in (
        lambda: store.head("k"),
        lambda: store.get_bytes("k"),
        lambda: store.delete(["k"]),
        lambda: store.put("k", b"y"),
        lambda: store.list(""),
    ):
        with pytest.raises(StoreUnreachable):
            call()
    root.rmdir()
    away.rename(root)
    assert store.get_bytes("k") == b"x"


def test_a_directory_without_write_permission(root: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    root.chmod(0o500)
    with pytest.raises(Refused):
        DirectoryStore(root).probe()


def test_drafts_of_crashed_writers_are_removed_much_later(
    store: DirectoryStore, root: Path
) -> None:
    store.probe()
    young, old = (root / INTERNAL / "tmp" / name for name in ("young", "old"))
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - STALE_DRAFT - 60))
    DirectoryStore(root).probe()
    assert young.exists()
    assert not old.exists()


def test_readers_keep_the_version_they_opened(store: DirectoryStore, tmp_path: Path) -> None:
    content = b"v1" * 500_000
    store.put("k", content)
    target = tmp_path / "target"
    target.touch()
    with store._reading("k", None) as (file, info):
        store.put("k", b"v2")
        store.delete(["k"])
        assert os.fstat(file.fileno()).st_size == info.size == len(content)


def test_changing_metadata_does_not_disturb_content(store: DirectoryStore, root: Path) -> None:
    made = store.put("k", b"content", metadata={"mode": "1"})
    inode = (root / "k").stat().st_ino
    changed = store.copy("k", "k", metadata={"mode": "2"}, if_match=made.etag)
    assert (root / "k").stat().st_ino == inode
    assert dict(store.head("k").metadata) == {"mode": "2"} == changed.metadata
    assert changed.etag == made.etag
    assert store.get_bytes("k") == b"content"


def test_parts_are_whole_or_not_there(store: DirectoryStore, root: Path, tmp_path: Path) -> None:
    upload_id = store.create_upload("k")
    path = tmp_path / "body"
    path.write_bytes(b"x" * 10)
    with pytest.raises(Exception, match="ends at 10"):
        store.upload_part("k", upload_id, 1, FileRange(str(path), 0, 20))
    assert store.list_parts("k", upload_id) == []
    assert list((root / INTERNAL / "tmp").iterdir()) == []


def _claim(uri: str, number: int) -> bool:
    try:
        open_store({"url": uri}).put("claim", b"%d" % number, if_none_match=True)
    except PreconditionFailed:
        return False
    return True


def test_conditions_hold_between_processes(root: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        won = pool.starmap(_claim, [(root.as_uri(), number) for number in range(12)])
    assert sum(won) == 1
    assert (root / "claim").read_bytes() == b"%d" % won.index(True)


def test_writers_and_deleters_of_one_directory(store: DirectoryStore) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(number: int) -> None:
        for _ in range(10):
            store.put(f"dir/sub/{number}", b"x")
            assert store.delete([f"dir/sub/{number}"]) == {}

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert store.list("").objects == ()
