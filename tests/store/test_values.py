"""Checksums, bodies, errors: the small things every store is built from."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import threading
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs import errors
from cachefs.store import crc
from cachefs.store.base import FileRange, ObjectInfo, PartReceipt
from cachefs.store.receiving import receive
from cachefs.store.s3body import Body
from cachefs.store.transfer import (
    BUFFER,
    Abandoned,
    RangeReader,
    abandon_when,
    load,
    pieces,
)


def test_the_published_check_value() -> None:
    # The check value of CRC-64/NVME: https://reveng.sourceforge.io/crc-catalogue/17plus.htm
    assert crc.crc64_of(b"123456789") == 0xAE8B14860A799888


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=8))
def test_checksums_of_parts_combine_into_that_of_the_whole(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert crc.combine((crc.crc64_of(part), len(part)) for part in parts) == crc.crc64_of(data)


@given(st.integers(0, 2**64 - 1))
def test_the_header_form_can_be_read_back(value: int) -> None:
    assert crc.decode(crc.encode(value)) == value


@pytest.mark.parametrize("text", [None, "", "AAAA", "not base64!", "AAAAAAAAAAAAAAAA"])
def test_malformed_headers_are_no_checksum(text: str | None) -> None:
    assert crc.decode(text) is None


@pytest.fixture
def body(tmp_path: Path) -> tuple[FileRange, bytes]:
    """A range of a file that takes several buffers, and its bytes."""
    content = os.urandom(3 * BUFFER + 17)
    path = tmp_path / "body"
    path.write_bytes(b"before" + content + b"after")
    return FileRange(str(path), 6, 6 + len(content)), content


def test_a_range_reads_as_its_bytes_again_and_again(body: tuple[FileRange, bytes]) -> None:
    source, content = body
    with RangeReader(source) as reader:
        assert len(reader) == len(content)
        for _ in range(2):
            assert reader.read() == content
            assert (reader.tell(), bytes(reader.read(10))) == (len(content), b"")
            assert reader.seek(0) == 0
        assert reader.seek(-4, os.SEEK_END) == len(content) - 4
        assert bytes(reader.read(1)) == content[-4:]
    assert load(source) == content
    assert crc.crc64_of(source) == crc.crc64_of(content)


def test_an_empty_range(tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(b"x")
    assert load(FileRange(str(path), 1, 1)) == b""


def test_a_range_that_is_cut_off_while_it_is_read(body: tuple[FileRange, bytes]) -> None:
    source, content = body
    reader = pieces(source)
    assert bytes(next(reader)) == content[:BUFFER]
    os.truncate(source.path, BUFFER)
    with pytest.raises(errors.CacheFileLost):
        list(reader)


def test_writing_a_stream_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "target"
    path.write_bytes(b"." * 10)
    got = receive(io.BytesIO(b"0123456789"), str(path), 2, 5)
    assert got == (5, crc.crc64_of(b"01234"))
    assert path.read_bytes() == b"..01234..."
    assert receive(io.BytesIO(b"012"), str(path), 9, 100).size == 3
    assert path.read_bytes() == b"..01234..012"


class _Reply:
    """A reply of a urllib3 that has nothing below it to read from."""

    def __init__(self, data: bytes) -> None:
        self.read = io.BytesIO(data).read


def test_the_body_of_an_unknown_kind_of_reply(tmp_path: Path) -> None:
    path = tmp_path / "target"
    path.touch()
    data = os.urandom(3 * BUFFER + 17)
    assert receive(Body(_Reply(data)), str(path), 0, len(data)) == (len(data), crc.crc64_of(data))
    assert path.read_bytes() == data


def test_a_full_disk_is_said_to_be_full() -> None:
    with pytest.raises(errors.CacheFull):
        receive(io.BytesIO(b"x"), "/dev/full", 0, 1)


def test_a_transfer_can_be_abandoned(body: tuple[FileRange, bytes]) -> None:
    event = threading.Event()
    with abandon_when(event):
        reader = pieces(body[0])
        next(reader)
        event.set()
        with pytest.raises(Abandoned):
            next(reader)
    assert load(body[0]) == body[1], "only while it is asked for"


def _all_errors(kind: type[errors.CachefsError]) -> list[type[errors.CachefsError]]:
    below = [each for sub in kind.__subclasses__() for each in _all_errors(sub)]
    return [kind, *below]


@pytest.mark.parametrize("kind", _all_errors(errors.CachefsError), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[errors.CachefsError]) -> None:
    error = kind("what failed", hint="what to do")
    if isinstance(error, errors.Throttled):
        error.retry_after = 1.5
    copy = cast(errors.CachefsError, pickle.loads(pickle.dumps(error)))
    assert type(copy) is kind
    assert (copy.message, copy.hint) == ("what failed", "what to do")
    assert copy.__dict__ == error.__dict__
    assert copy.errno > 0


def test_values_survive_pickling() -> None:
    for value in (
        FileRange("/p", 1, 2),
        ObjectInfo("k", 1, "e", 2, {"a": "b"}, 3),
        PartReceipt(1, "e", 2, 3),
    ):
        assert pickle.loads(pickle.dumps(value)) == value
