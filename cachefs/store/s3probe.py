"""Finding out what an S3 store supports, by trying it.

Stores that call themselves S3 differ most in what they silently ignore, so each capability is
tested with a request that a supporting store must refuse: a wrong checksum, a condition that does
not hold. One probe is about ten small requests on one object under `.cachefs/`, which is deleted
again. What a probe that was killed leaves there is found by its name (see `flush.remains`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from cachefs.errors import (
    Corrupt,
    CredentialsError,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
    Throttled,
    Transient,
)
from cachefs.model.names import PROBES
from cachefs.store import crc
from cachefs.store.base import Capabilities

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONTENT = b"cachefs probe: safe to delete\n"
WRONG_ETAG = '"00000000000000000000000000000000"'
_UNCLEAR = (Transient, Throttled)


class Probe:
    """One run. `request` is the store's context manager that yields a client and translates
    errors."""

    def __init__(
        self,
        request: Callable[[str, str], AbstractContextManager[S3Client]],
        bucket: str,
        prefix: str,
        checksum: str,
        owner: str = "",
    ) -> None:
        """`owner`: see `ObjectStore.probe`."""
        self._request = request
        self._bucket = bucket
        name = "-".join(filter(None, (owner, secrets.token_hex(8))))
        self._key = "/".join(filter(None, (prefix, PROBES + name)))
        self._checksum = checksum

    def run(self) -> Capabilities:
        """What the store supports. Raises StoreError if it cannot be used or did not answer."""
        self._first_put()
        try:
            crc64 = self._checksum != "none" and self._takes_crc64()
            conditional_put = self._conditional_put()
            conditional_copy = self._refuses(PreconditionFailed, self._copy, IfNoneMatch="*")
            with self._upload(crc64) as upload_id:
                copy_part = self._copies_parts(upload_id)
                conditional_complete = self._conditional_complete(upload_id)
        finally:
            with contextlib.suppress(StoreError), self._request("DELETE", self._key) as s3:
                s3.delete_object(Bucket=self._bucket, Key=self._key)
        found = Capabilities(
            conditional_put=conditional_put,
            conditional_complete=conditional_complete,
            conditional_copy=conditional_copy,
            crc64=crc64,
            copy_part=copy_part,
            note=_note(conditional_put and conditional_complete, crc64, copy_part, self._checksum),
        )
        if self._checksum == "crc64nvme" and not crc64:
            raise Refused(
                f"s3://{self._bucket} does not check CRC64NVME, which store.checksum demands",
                hint="set store.checksum to auto",
            )
        return found

    def _first_put(self) -> None:
        try:
            self._put()
        except NotFound as error:  # only a bucket can be missing here
            raise Refused(str(error), hint="create the bucket, or correct the store URL") from error

    def _takes_crc64(self) -> bool:
        right = crc.crc64_of(CONTENT)
        if not self._refuses(Corrupt, self._put, ChecksumCRC64NVME=crc.encode(right ^ 1)):
            return False
        return self._accepts(self._put, ChecksumCRC64NVME=crc.encode(right))

    def _conditional_put(self) -> bool:
        with self._request("HEAD", self._key) as s3:
            etag = s3.head_object(Bucket=self._bucket, Key=self._key)["ETag"]
        return (
            self._refuses(PreconditionFailed, self._put, IfNoneMatch="*")
            and self._refuses(PreconditionFailed, self._put, IfMatch=WRONG_ETAG)
            and self._accepts(self._put, IfMatch=etag)
        )

    def _copies_parts(self, upload_id: str) -> bool:
        def copy() -> None:
            with self._request("COPY PART", self._key) as s3:
                s3.upload_part_copy(
                    Bucket=self._bucket,
                    Key=self._key,
                    UploadId=upload_id,
                    PartNumber=1,
                    CopySource={"Bucket": self._bucket, "Key": self._key},
                    CopySourceRange=f"bytes=0-{len(CONTENT) - 2}",
                )

        return self._accepts(copy)

    def _conditional_complete(self, upload_id: str) -> bool:
        with self._request("PUT PART", self._key) as s3:
            part = s3.upload_part(
                Bucket=self._bucket, Key=self._key, UploadId=upload_id, PartNumber=1, Body=CONTENT
            )

        def complete() -> None:
            with self._request("COMPLETE", self._key) as s3:
                s3.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
                    IfNoneMatch="*",
                )

        return self._refuses(PreconditionFailed, complete)

    @contextlib.contextmanager
    def _upload(self, crc64: bool) -> Iterator[str]:
        with self._request("CREATE UPLOAD", self._key) as s3:
            upload_id = s3.create_multipart_upload(
                Bucket=self._bucket, Key=self._key, **upload_checksum(crc64)
            )["UploadId"]
        try:
            yield upload_id
        finally:
            with contextlib.suppress(StoreError), self._request("ABORT", self._key) as s3:
                s3.abort_multipart_upload(Bucket=self._bucket, Key=self._key, UploadId=upload_id)

    def _put(self, **extra: Any) -> None:
        with self._request("PUT", self._key) as s3:
            s3.put_object(Bucket=self._bucket, Key=self._key, Body=CONTENT, **extra)

    def _copy(self, **extra: Any) -> None:
        with self._request("COPY", self._key) as s3:
            s3.copy_object(
                Bucket=self._bucket,
                Key=self._key,
                CopySource={"Bucket": self._bucket, "Key": self._key},
                MetadataDirective="REPLACE",
                **extra,
            )

    @staticmethod
    def _refuses(expected: type[StoreError], attempt: Callable[..., None], **extra: Any) -> bool:
        """Whether the store refuses a request in the right way. Any other refusal means that it
        does not know the header; success, that it ignores it."""
        try:
            attempt(**extra)
        except expected:
            return True
        except _UNCLEAR:
            raise
        except StoreError:
            pass
        return False

    @staticmethod
    def _accepts(attempt: Callable[..., None], **extra: Any) -> bool:
        try:
            attempt(**extra)
        except _UNCLEAR:
            raise
        except (Refused, Corrupt, CredentialsError, NotFound, PreconditionFailed):
            return False
        return True


def upload_checksum(crc64: bool) -> dict[str, Any]:
    """Parameters of a new multipart upload whose parts carry CRC64NVME."""
    if not crc64:
        return {}
    return {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}


def _note(conditions: bool, crc64: bool, copy_part: bool, checksum: str) -> str:
    lacks = []
    if not conditions:
        lacks.append("no conditional writes (checked by HEAD before writing)")
    if not crc64 and checksum != "none":
        lacks.append("no CRC64NVME (uploads are checked by MD5)")
    if not copy_part:
        lacks.append("no UploadPartCopy (changed files are sent whole)")
    return "; ".join(lacks)
