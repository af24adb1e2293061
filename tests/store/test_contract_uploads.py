"""The contract of every store: multipart uploads."""

from __future__ import annotations

import random
import time

import pytest

from cachefs.errors import CacheFileLost, Corrupt, NoSuchUpload, NotFound, PreconditionFailed
from cachefs.store import crc
from cachefs.store.base import FileRange, PartReceipt
from tests.store.conftest import Place

PART = 5 * 1024 * 1024
DATA = random.Random(7).randbytes(PART * 2 + 12_345)


def send(place: Place, name: str, data: bytes = DATA) -> tuple[str, list[PartReceipt]]:
    """Upload all parts of an object."""
    key, path = place.key(name), place.file(data, name="upload")
    upload_id = place.store.create_upload(key, {"mode": "33188"})
    parts = [
        place.store.upload_part(
            key, upload_id, start // PART + 1, FileRange(path, start, min(start + PART, len(data)))
        )
        for start in range(0, len(data), PART)
    ]
    return upload_id, parts


def test_parts_become_an_object_at_once(place: Place) -> None:
    key = place.key("k")
    upload_id, parts = send(place, "k")
    assert place.names() == [], "parts are invisible"
    made = place.store.complete_upload(
        key, upload_id, parts, crc64=crc.crc64_of(DATA), size=len(DATA)
    )
    assert place.store.get_bytes(key) == DATA
    found = place.store.head(key)
    assert (found.etag, found.size) == (made.etag, made.size) == (made.etag, len(DATA))
    assert dict(found.metadata) == {"mode": "33188"}
    assert made.crc64 == crc.crc64_of(DATA)
    assert place.store.list_uploads(place.prefix) == []


def test_receipts_have_the_checksum_of_their_bytes(place: Place) -> None:
    _, parts = send(place, "k")
    for part in parts:
        start = (part.number - 1) * PART
        assert part.size == len(DATA[start : start + PART])
        assert part.crc64 == crc.crc64_of(DATA[start : start + PART])


def test_parts_and_uploads_are_listed(place: Place) -> None:
    upload_id, parts = send(place, "dir/k")
    listed = place.store.list_parts(place.key("dir/k"), upload_id)
    assert [(p.number, p.etag, p.size) for p in listed] == [
        (p.number, p.etag, p.size) for p in parts
    ]
    assert all(p.crc64 in (None, q.crc64) for p, q in zip(listed, parts, strict=True))
    (upload,) = place.store.list_uploads(place.prefix)
    assert upload[:2] == (place.key("dir/k"), upload_id)
    assert abs(upload.started_ns - time.time_ns()) < 60 * 10**9
    assert place.store.list_uploads(place.key("other")) == []


def test_several_uploads_of_one_key(place: Place) -> None:
    ids = {place.store.create_upload(place.key("k")) for _ in range(3)}
    ids |= {place.store.create_upload(place.key("k2")) for _ in range(2)}
    assert {upload.upload_id for upload in place.store.list_uploads(place.prefix)} == ids
    for upload in place.store.list_uploads(place.prefix):
        place.store.abort_upload(upload.key, upload.upload_id)
    assert place.store.list_uploads(place.prefix) == []


def test_a_part_sent_again_replaces_the_first(place: Place) -> None:
    key = place.key("k")
    upload_id = place.store.create_upload(key)
    place.store.upload_part(key, upload_id, 1, b"wrong")
    right = place.store.upload_part(key, upload_id, 1, b"right!")
    assert right.etag in {part.etag for part in place.store.list_parts(key, upload_id)}
    place.store.complete_upload(key, upload_id, [right])
    assert place.store.get_bytes(key) == b"right!"


def test_parts_arrive_in_any_order_with_gaps(place: Place) -> None:
    key, path = place.key("k"), place.file(DATA)
    upload_id = place.store.create_upload(key)
    last = place.store.upload_part(key, upload_id, 9, FileRange(path, PART, len(DATA)))
    first = place.store.upload_part(key, upload_id, 2, FileRange(path, 0, PART))
    place.store.complete_upload(key, upload_id, [first, last], size=len(DATA))
    assert place.store.get_bytes(key) == DATA


def test_copied_parts(place: Place) -> None:
    old = place.store.put(place.key("old"), place.range(DATA))
    key = place.key("new")
    upload_id = place.store.create_upload(key)
    copied = place.store.copy_part(
        key, upload_id, 1, place.key("old"), 1000, 1000 + PART, if_source_match=old.etag
    )
    sent = place.store.upload_part(key, upload_id, 2, b"tail")
    expected = DATA[1000 : 1000 + PART] + b"tail"
    assert copied.size == PART
    assert copied.crc64 in (None, crc.crc64_of(DATA[1000 : 1000 + PART]))
    place.store.complete_upload(key, upload_id, [copied, sent], crc64=crc.crc64_of(expected))
    assert place.store.get_bytes(key) == expected


def test_copied_parts_come_from_the_expected_version(place: Place) -> None:
    old = place.store.put(place.key("old"), b"version 1")
    place.store.put(place.key("old"), b"version 2")
    upload_id = place.store.create_upload(place.key("new"))
    with pytest.raises(PreconditionFailed):
        place.store.copy_part(
            place.key("new"), upload_id, 1, place.key("old"), 0, 9, if_source_match=old.etag
        )
    with pytest.raises(PreconditionFailed):
        place.store.copy_part(place.key("new"), upload_id, 1, place.key("old"), 0, 10)
    with pytest.raises(NotFound):
        place.store.copy_part(place.key("new"), upload_id, 1, place.key("missing"), 0, 9)


def test_completing_something_else_than_intended(place: Place) -> None:
    upload_id, parts = send(place, "k")
    with pytest.raises(Corrupt):
        place.store.complete_upload(place.key("k"), upload_id, parts, size=len(DATA) + 1)
    with pytest.raises(Corrupt):
        place.store.complete_upload(place.key("k"), upload_id, parts, crc64=1)
    assert place.names() == []


def test_completing_only_if_new(place: Place) -> None:
    upload_id, parts = send(place, "k")
    other = place.store.put(place.key("k"), b"somebody else's")
    with pytest.raises(PreconditionFailed):
        place.store.complete_upload(place.key("k"), upload_id, parts, if_none_match=True)
    assert place.store.get_bytes(place.key("k")) == b"somebody else's"
    place.store.complete_upload(place.key("k"), upload_id, parts, if_match=other.etag)
    assert place.store.get_bytes(place.key("k")) == DATA


def test_completing_over_a_version_that_is_gone(place: Place) -> None:
    old = place.store.put(place.key("k"), b"version 1")
    place.store.put(place.key("k"), b"version 2")
    upload_id, parts = send(place, "k")
    with pytest.raises(PreconditionFailed):
        place.store.complete_upload(place.key("k"), upload_id, parts, if_match=old.etag)
    place.store.abort_upload(place.key("k"), upload_id)
    assert place.store.get_bytes(place.key("k")) == b"version 2"


@pytest.mark.parametrize("condition", [{}, {"if_none_match": True}], ids=["always", "if-new"])
def test_repeating_a_complete_that_succeeded_succeeds(
    place: Place, condition: dict[str, bool]
) -> None:
    upload_id, parts = send(place, "k")
    once = place.store.complete_upload(place.key("k"), upload_id, parts, **condition)  # type: ignore[arg-type]
    again = place.store.complete_upload(place.key("k"), upload_id, parts, **condition)  # type: ignore[arg-type]
    assert (again.etag, again.size) == (once.etag, once.size)


def test_completing_what_was_aborted(place: Place) -> None:
    upload_id, parts = send(place, "k")
    place.store.abort_upload(place.key("k"), upload_id)
    with pytest.raises(NoSuchUpload):
        place.store.complete_upload(place.key("k"), upload_id, parts)
    place.store.put(place.key("k"), b"another object of this name")
    with pytest.raises(NoSuchUpload):
        place.store.complete_upload(place.key("k"), upload_id, parts)


def test_an_aborted_upload_is_gone(place: Place) -> None:
    key = place.key("k")
    upload_id, _ = send(place, "k")
    place.store.abort_upload(key, upload_id)
    place.store.abort_upload(key, upload_id)
    assert place.store.list_uploads(place.prefix) == []
    with pytest.raises(NoSuchUpload):
        place.store.upload_part(key, upload_id, 1, b"late")
    with pytest.raises(NoSuchUpload):
        place.store.list_parts(key, upload_id)


@pytest.mark.parametrize("upload_id", ["junk", "0" * 32])
def test_uploads_that_never_were(place: Place, upload_id: str) -> None:
    place.store.abort_upload(place.key("k"), upload_id)
    with pytest.raises(NoSuchUpload):
        place.store.upload_part(place.key("k"), upload_id, 1, b"x")


def test_a_part_whose_file_was_cut_off(place: Place) -> None:
    upload_id = place.store.create_upload(place.key("k"))
    with pytest.raises(CacheFileLost):
        place.store.upload_part(
            place.key("k"), upload_id, 1, FileRange(place.file(DATA[:-1]), 0, len(DATA))
        )
    assert place.store.list_parts(place.key("k"), upload_id) == []
