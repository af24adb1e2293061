"""Probing: what a store that ignores or refuses things is found to support."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from cachefs.errors import (
    Corrupt,
    CredentialsError,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
    Transient,
)
from cachefs.store import crc
from cachefs.store.base import Capabilities
from cachefs.store.s3probe import CONTENT, Probe

ALL = Capabilities(True, True, True, True, True, "")


class FakeClient:
    """An S3 store that has one object and treats given parameters in given ways."""

    def __init__(self, quirks: dict[str, StoreError | str]) -> None:
        self.quirks = quirks
        self.exists = self.open_uploads = 0

    def _check(self, op: str, given: dict[str, Any]) -> None:
        for name in (op, *given):
            quirk = self.quirks.get(name)
            if isinstance(quirk, StoreError):
                raise quirk
            if quirk == "ignored":
                given.pop(name, None)
        if given.get("ChecksumCRC64NVME") not in (None, crc.encode(crc.crc64_of(CONTENT))):
            raise Corrupt("BadDigest")
        if "IfNoneMatch" in given and self.exists:
            raise PreconditionFailed("exists")
        if given.get("IfMatch", '"right"') != '"right"':
            raise PreconditionFailed("another")

    def put_object(self, **given: Any) -> None:
        self._check("put", given)
        self.exists = 1

    def head_object(self, **_: Any) -> dict[str, str]:
        return {"ETag": '"right"'}

    def copy_object(self, **given: Any) -> None:
        self._check("copy", given)

    def create_multipart_upload(self, **given: Any) -> dict[str, str]:
        self.open_uploads += 1
        return {"UploadId": "u"}

    def upload_part(self, **_: Any) -> dict[str, str]:
        return {"ETag": '"part"'}

    def upload_part_copy(self, **given: Any) -> None:
        self._check("copy_part", given)

    def complete_multipart_upload(self, **given: Any) -> None:
        self._check("complete", given)

    def abort_multipart_upload(self, **_: Any) -> None:
        self.open_uploads -= 1

    def delete_object(self, **_: Any) -> None:
        self._check("delete", {})
        self.exists = 0


def probe(
    *, checksum: str = "auto", quirks: dict[str, StoreError | str] | None = None
) -> tuple[Capabilities, FakeClient]:
    """Probe a store with these quirks."""
    client = FakeClient(quirks or {})

    @contextlib.contextmanager
    def request(verb: str, key: str) -> Iterator[Any]:
        assert key.startswith("some/prefix/.cachefs/probe-")
        yield client

    return Probe(cast(Any, request), "bucket", "some/prefix", checksum).run(), client


def test_a_store_that_supports_everything() -> None:
    found, client = probe()
    assert found == ALL
    assert (client.exists, client.open_uploads) == (0, 0)


@pytest.mark.parametrize(
    "quirk", ["ignored", Refused("400"), CredentialsError("SignatureDoesNotMatch")], ids=repr
)
@pytest.mark.parametrize(
    ("parameter", "lost"),
    [
        ("ChecksumCRC64NVME", {"crc64"}),
        ("IfNoneMatch", {"conditional_put", "conditional_complete", "conditional_copy"}),
        ("IfMatch", {"conditional_put"}),
    ],
)
def test_a_parameter_that_is_ignored_or_refused_is_not_relied_on(
    parameter: str, lost: set[str], quirk: StoreError | str
) -> None:
    found, _ = probe(quirks={parameter: quirk})
    for name in ("crc64", "conditional_put", "conditional_complete", "conditional_copy"):
        assert getattr(found, name) is (name not in lost)
    assert found.note


def test_copying_parts_may_be_missing() -> None:
    found, _ = probe(quirks={"copy_part": Refused("501")})
    assert not found.copy_part
    assert "sent whole" in found.note


def test_checksums_can_be_switched_off_and_demanded() -> None:
    assert not probe(checksum="none")[0].crc64
    assert probe(checksum="crc64nvme")[0].crc64
    with pytest.raises(Refused, match="CRC64NVME"):
        probe(checksum="crc64nvme", quirks={"ChecksumCRC64NVME": "ignored"})


@pytest.mark.parametrize("where", ["put", "copy", "copy_part", "complete"])
def test_passing_trouble_is_not_a_missing_capability(where: str) -> None:
    with pytest.raises(Transient):
        probe(quirks={where: Transient("500")})


def test_a_missing_bucket_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        probe(quirks={"put": NotFound("404")})
    assert "bucket" in caught.value.hint


def test_a_store_that_forbids_deleting_can_be_used() -> None:
    assert probe(quirks={"delete": Refused("403")})[0] == ALL
