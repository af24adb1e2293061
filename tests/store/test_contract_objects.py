"""The contract of every store, first half: whole objects."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs.errors import CacheFileLost, Corrupt, NotFound, PreconditionFailed, Refused
from cachefs.store import crc
from cachefs.store.base import FileRange
from tests.store.conftest import Place

BIG = bytes(range(256)) * 12_289  # 3 MiB and a bit: more than is sent from memory
NAMES = ("plain", "with space", "a+b=c&d?e#f%20g", "é-中-🚀", "q\"uo'te", "<x>&amp;", "semi;co,ma")


@pytest.mark.parametrize("content", [b"", b"x", b"hello" * 1000, BIG], ids=["0", "1", "5k", "3M"])
def test_put_then_read_gives_the_same_bytes(place: Place, content: bytes) -> None:
    receipt = place.store.put(place.key("k"), place.range(content))
    found = place.store.head(place.key("k"))
    assert place.store.get_bytes(place.key("k")) == content
    assert (receipt.size, receipt.etag, receipt.crc64) == (
        len(content),
        found.etag,
        crc.crc64_of(content),
    )
    assert found.size == len(content)
    assert abs(found.mtime_ns - _now_ns()) < 60 * 10**9


def _now_ns() -> int:
    import time

    return time.time_ns()


def test_put_replaces(place: Place) -> None:
    first = place.store.put(place.key("k"), b"one")
    second = place.store.put(place.key("k"), b"two!")
    assert place.store.get_bytes(place.key("k")) == b"two!"
    assert first.etag != second.etag


def test_etag_is_that_of_the_content_in_listing_head_and_receipt(place: Place) -> None:
    receipt = place.store.put(place.key("k"), b"content")
    (listed,) = place.store.list(place.key("k")).objects
    assert listed.etag == place.store.head(place.key("k")).etag == receipt.etag
    assert listed.size == 7


def test_metadata_comes_back_as_given(place: Place) -> None:
    given = {"mode": "33188", "uid": "0", "gid": "10", "mtime": "1700000000.123456789", "x": ""}
    given["xattr"] = "eyJ1c2VyLmEiOiAiYiJ9" * 40
    receipt = place.store.put(place.key("k"), b"data", metadata=given)
    found = dict(place.store.head(place.key("k")).metadata)
    found.setdefault("x", "")  # empty headers do not survive everywhere
    assert found == given == receipt.metadata


def test_replacing_replaces_metadata_too(place: Place) -> None:
    place.store.put(place.key("k"), b"data", metadata={"a": "1"})
    place.store.put(place.key("k"), b"data", metadata={"b": "2"})
    assert dict(place.store.head(place.key("k")).metadata) == {"b": "2"}


@pytest.mark.parametrize("name", NAMES)
def test_any_name(place: Place, name: str) -> None:
    place.store.put(place.key(name), b"content")
    assert place.store.get_bytes(place.key(name)) == b"content"
    assert place.names() == [name]
    place.store.copy(place.key(name), place.key("copy"))
    assert place.store.delete([place.key(name)]) == {}
    assert place.names() == ["copy"]


@pytest.mark.parametrize("name", ["new\nline", "tab\tbed", "bell\x07", "return\rx"])
def test_names_with_control_characters_can_be_deleted(place: Place, name: str) -> None:
    place.store.put(place.key(name), b"content")
    assert place.store.delete([place.key(name)]) == {}
    with pytest.raises(NotFound):
        place.store.head(place.key(name))


@pytest.mark.parametrize("call", ["head", "get_bytes"])
def test_missing_objects_are_not_found(place: Place, call: str) -> None:
    with pytest.raises(NotFound):
        getattr(place.store, call)(place.key("missing"))


def test_a_directory_is_not_an_object(place: Place) -> None:
    place.store.put(place.key("dir/file"), b"x")
    with pytest.raises(NotFound):
        place.store.head(place.key("dir"))
    with pytest.raises(NotFound):
        place.store.get_bytes(place.key("dir"))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 4, b"0123"), (3, 7, b"3456"), (8, 20, b"89"), (9, None, b"9"), (0, None, b"0123456789"),
        (10, 12, b""), (50, None, b""), (4, 4, b""),
    ],
)  # fmt: skip
def test_ranges_are_cut_at_the_end(
    place: Place, start: int, end: int | None, expected: bytes
) -> None:
    place.store.put(place.key("k"), b"0123456789")
    assert place.store.get_bytes(place.key("k"), start, end) == expected


def test_reading_an_empty_object(place: Place) -> None:
    place.store.put(place.key("k"), b"")
    assert place.store.get_bytes(place.key("k")) == b""
    assert place.store.get_bytes(place.key("k"), 0, 10) == b""


def test_get_into_writes_just_its_range(place: Place) -> None:
    place.store.put(place.key("k"), place.range(BIG))
    path = Path(place.file(b"." * (len(BIG) + 10), name="target"))
    start, end = 1_000_001, 2_500_003
    got = place.store.get_into(place.key("k"), str(path), start, end)
    assert got == (end - start, crc.crc64_of(BIG[start:end]))
    expected = b"." * start + BIG[start:end] + b"." * (len(BIG) + 10 - end)
    assert path.read_bytes() == expected


def test_get_into_elsewhere_and_beyond_the_end(place: Place) -> None:
    place.store.put(place.key("k"), b"0123456789")
    path = Path(place.file(b"....", name="target"))
    assert place.store.get_into(place.key("k"), str(path), 7, 100, at=1) == (
        3,
        crc.crc64_of(b"789"),
    )
    assert path.read_bytes() == b".789"
    assert place.store.get_into(place.key("k"), str(path), 10, 12, at=0) == (0, 0)


def test_get_into_needs_the_file(place: Place) -> None:
    place.store.put(place.key("k"), b"0123456789")
    with pytest.raises(CacheFileLost):
        place.store.get_into(place.key("k"), str(place.tmp / "missing"), 0, 10)


def test_reading_another_version_than_expected(place: Place) -> None:
    old = place.store.put(place.key("k"), b"old")
    assert place.store.get_bytes(place.key("k"), if_match=old.etag) == b"old"
    place.store.put(place.key("k"), b"new!")
    with pytest.raises(PreconditionFailed):
        place.store.get_bytes(place.key("k"), if_match=old.etag)
    with pytest.raises(PreconditionFailed):
        place.store.get_into(place.key("k"), place.file(b""), 0, 3, if_match=old.etag)


def test_put_only_if_new(place: Place) -> None:
    place.store.put(place.key("k"), b"first", if_none_match=True)
    with pytest.raises(PreconditionFailed):
        place.store.put(place.key("k"), b"second", if_none_match=True)
    assert place.store.get_bytes(place.key("k")) == b"first"


def test_put_only_over_a_known_version(place: Place) -> None:
    first = place.store.put(place.key("k"), b"first")
    second = place.store.put(place.key("k"), b"second", if_match=first.etag)
    with pytest.raises(PreconditionFailed):
        place.store.put(place.key("k"), b"third", if_match=first.etag)
    assert place.store.get_bytes(place.key("k")) == b"second"
    place.store.put(place.key("k"), b"third", if_match=second.etag)
    place.store.delete([place.key("k")])
    with pytest.raises(PreconditionFailed):
        place.store.put(place.key("k"), b"fourth", if_match=second.etag)


@pytest.mark.parametrize("content", [b"small", BIG], ids=["small", "big"])
def test_repeating_a_conditional_put_that_succeeded_succeeds(place: Place, content: bytes) -> None:
    old = place.store.put(place.key("old"), b"old")
    for key, condition in (("new", {"if_none_match": True}), ("old", {"if_match": old.etag})):
        body = place.range(content)
        once = place.store.put(place.key(key), body, metadata={"a": "1"}, **condition)
        again = place.store.put(place.key(key), body, metadata={"a": "1"}, **condition)
        assert (again.etag, again.size) == (once.etag, once.size)
        with pytest.raises(PreconditionFailed):  # the same content, but not our object
            place.store.put(place.key(key), body, metadata={"a": "2"}, **condition)


def test_only_one_of_many_wins(place: Place) -> None:
    if place.kind == "s3-plain":
        pytest.skip("conditions are emulated there, not atomic")
    barrier = threading.Barrier(8)

    def attempt(number: int) -> bool:
        barrier.wait()
        try:
            place.store.put(place.key("k"), f"{number}".encode(), if_none_match=True)
        except PreconditionFailed:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [number for number, wins in enumerate(pool.map(attempt, range(8))) if wins]
    assert place.store.get_bytes(place.key("k")) == f"{won[0]}".encode()
    assert len(won) == 1


def test_local_bytes_that_changed_are_not_sent(place: Place) -> None:
    with pytest.raises(Corrupt):
        place.store.put(place.key("k"), b"changed", crc64=crc.crc64_of(b"original"))
    with pytest.raises(NotFound):
        place.store.head(place.key("k"))


def test_a_cache_file_that_is_gone_or_too_short(place: Place) -> None:
    for path, end in ((str(place.tmp / "missing"), 5), (place.file(b"1234"), 5)):
        with pytest.raises(CacheFileLost):
            place.store.put(place.key("k"), FileRange(path, 0, end))
    assert place.names() == []


def test_copy_keeps_or_replaces_metadata(place: Place) -> None:
    made = place.store.put(place.key("src"), b"content", metadata={"a": "1"})
    kept = place.store.copy(place.key("src"), place.key("kept"))
    replaced = place.store.copy(place.key("src"), place.key("other"), metadata={"b": "2"})
    for name, receipt, tags in (("kept", kept, {"a": "1"}), ("other", replaced, {"b": "2"})):
        found = place.store.head(place.key(name))
        assert place.store.get_bytes(place.key(name)) == b"content"
        assert dict(found.metadata) == tags == dict(receipt.metadata)
        assert found.etag == receipt.etag
        assert found.size == receipt.size == made.size


def test_copy_onto_itself_changes_metadata(place: Place) -> None:
    place.store.put(place.key("k"), b"content", metadata={"mode": "1"})
    place.store.copy(place.key("k"), place.key("k"), metadata={"mode": "2"})
    assert dict(place.store.head(place.key("k")).metadata) == {"mode": "2"}
    assert place.store.get_bytes(place.key("k")) == b"content"


def test_copy_conditions(place: Place) -> None:
    src, dst = place.key("src"), place.key("dst")
    first = place.store.put(src, b"first")
    place.store.copy(src, dst, if_none_match=True, if_source_match=first.etag)
    place.store.copy(src, dst, if_none_match=True)  # the very same: our own, whose reply was lost
    second = place.store.put(src, b"second")
    with pytest.raises(PreconditionFailed):
        place.store.copy(src, dst, if_source_match=first.etag)
    with pytest.raises(PreconditionFailed):
        place.store.copy(src, dst, if_none_match=True)
    with pytest.raises(PreconditionFailed):
        place.store.copy(src, dst, if_match=second.etag)
    assert place.store.get_bytes(dst) == b"first"
    place.store.copy(src, dst, if_match=first.etag)
    assert place.store.get_bytes(dst) == b"second"


def test_copying_what_is_too_large_for_one_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.store.s3.COPY_LIMIT", 5 * 1024**2)
    monkeypatch.setattr("cachefs.store.s3.COPY_PART", 5 * 1024**2)
    content = BIG * 4
    src, dst = place.key("src"), place.key("dst")
    made = place.store.put(src, place.range(content), metadata={"a": "1"})
    copied = place.store.copy(src, dst, if_source_match=made.etag, if_none_match=True)
    assert place.store.get_bytes(dst) == content
    assert copied.etag == place.store.head(dst).etag
    assert (copied.size, dict(place.store.head(dst).metadata)) == (len(content), {"a": "1"})
    place.store.put(src, b"other content", metadata={"a": "1"})
    place.store.put(src, place.range(content[:-1]))
    with pytest.raises(PreconditionFailed):
        place.store.copy(src, dst, if_none_match=True)
    if place.kind != "s3-weather":  # where the abort may fail as well
        assert place.store.list_uploads(place.prefix) == []


def test_copying_what_is_missing(place: Place) -> None:
    with pytest.raises(NotFound):
        place.store.copy(place.key("missing"), place.key("dst"))
    assert place.names() == []


def test_delete_many_present_and_missing(place: Place) -> None:
    names = [f"d{number % 7}/f{number:04}" for number in range(60)]
    for name in names:
        place.store.put(place.key(name), b"")
    wanted = [place.key(name) for name in names[:50]] + [place.key("missing"), place.key("d0/no")]
    assert place.store.delete(wanted) == {}
    assert sorted(place.names()) == sorted(names[50:])
    assert place.store.delete([]) == {}


def test_markers_of_directories(place: Place) -> None:
    marker = place.key("dir/")
    place.store.put(marker, b"", metadata={"mode": "16877"}, if_none_match=True)
    assert place.store.head(marker).size == 0
    assert place.store.get_bytes(marker) == b""
    assert place.names() == ["dir/"]
    assert place.names(delimiter="/") == ["dir/"]
    place.store.put(place.key("dir/file"), b"x")
    assert place.store.delete([place.key("dir/file")]) == {}
    assert place.names() == ["dir/"], "an explicit directory outlives its files"
    assert place.store.delete([marker]) == {}
    assert place.names() == []


def test_markers_keep_metadata_where_the_store_does(place: Place) -> None:
    if place.kind.startswith("s3"):
        pytest.skip("SeaweedFS keeps no metadata of directory markers")
    place.store.put(place.key("dir/"), b"", metadata={"mode": "16877"})
    assert dict(place.store.head(place.key("dir/")).metadata) == {"mode": "16877"}
    with pytest.raises(PreconditionFailed):
        place.store.put(place.key("dir/"), b"", if_none_match=True)


def test_file_and_directory_of_one_name(place: Place) -> None:
    place.store.put(place.key("foo"), b"file")
    if place.kind.startswith("s3"):
        place.store.put(place.key("foo/bar"), b"below")
        assert place.names(delimiter="/") == ["foo", "foo/"]
        assert place.names() == ["foo", "foo/bar"]
        return
    with pytest.raises(Refused, match="one name"):
        place.store.put(place.key("foo/bar"), b"below")
    place.store.put(place.key("dir/bar"), b"below")
    with pytest.raises(Refused, match="one name"):
        place.store.put(place.key("dir"), b"file")
    assert place.names() == ["dir/bar", "foo"]


def test_a_name_may_turn_from_file_to_directory_and_back(place: Place) -> None:
    foo, bar = place.key("foo"), place.key("foo/bar")
    place.store.put(foo, b"file")
    place.store.delete([foo])
    place.store.put(bar, b"below")
    place.store.delete([bar])
    place.store.put(foo, b"file again")
    assert place.store.get_bytes(foo) == b"file again"
    assert place.names() == ["foo"]


def test_keys_that_are_too_long_are_refused(place: Place) -> None:
    with pytest.raises(Refused):
        place.store.put(place.key("k" * 1100), b"x")
