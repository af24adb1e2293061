"""Multipart uploads: parts that are invisible until one request makes an object of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from cachefs.errors import (
    Contradiction,
    Corrupt,
    NoSuchUpload,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
)
from cachefs.store import crc
from cachefs.store.base import (
    Body,
    ObjectInfo,
    PartReceipt,
    Receipts,
    UploadInfo,
    Uploads,
)
from cachefs.store.conditions import Condition, Intent, multipart_etag, settle, whole
from cachefs.store.s3base import (
    S3Base,
    check_echo,
    etag_of,
    in_memory_if_small,
    nanoseconds,
    opened,
    quoted,
)
from cachefs.store.s3errors import code_of
from cachefs.store.s3probe import upload_checksum
from cachefs.store.transfer import size_of


class S3Uploads(S3Base):
    """The multipart half of `S3Store`. Methods as in ObjectStore."""

    def create_upload(self, key: str, metadata: Mapping[str, str] | None = None) -> str:
        """See ObjectStore.create_upload."""
        checksum = upload_checksum(self.probe().crc64)
        with self._request("CREATE UPLOAD", key) as s3:
            reply = s3.create_multipart_upload(
                Bucket=self._bucket, Key=key, Metadata=dict(metadata or {}), **checksum
            )
        return reply["UploadId"]

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartReceipt:
        """See ObjectStore.upload_part."""
        body = in_memory_if_small(body)
        value, checksum = self._integrity(body, None)
        with opened(body) as stream, self._request("PUT PART", key) as s3:
            reply = s3.upload_part(
                Bucket=self._bucket,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=stream,
                **checksum,
            )
        what = f"part {number} of {key}"
        check_echo(reply, value, what)
        return PartReceipt(number, etag_of(reply, what), size_of(body), value)

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        src: str,
        start: int,
        end: int,
        *,
        if_source_match: str | None = None,
    ) -> PartReceipt:
        """See ObjectStore.copy_part."""
        extra: dict[str, Any] = {}
        if if_source_match:
            extra["CopySourceIfMatch"] = quoted(if_source_match)
        try:
            with self._request("COPY PART", key) as s3:
                reply = s3.upload_part_copy(
                    Bucket=self._bucket,
                    Key=key,
                    UploadId=upload_id,
                    PartNumber=number,
                    CopySource={"Bucket": self._bucket, "Key": src},
                    CopySourceRange=f"bytes={start}-{end - 1}",
                    **extra,
                )
        except Refused as error:
            if code_of(error) == "InvalidRange":
                raise PreconditionFailed(f"{src} is shorter than {end} bytes") from error
            raise
        result = reply["CopyPartResult"]
        value = crc.decode(result.get("ChecksumCRC64NVME"))
        return PartReceipt(number, etag_of(result, f"part {number} of {key}"), end - start, value)

    def list_parts(self, key: str, upload_id: str) -> Receipts:
        """See ObjectStore.list_parts."""
        with self._request("LIST PARTS", key) as s3:
            pages = s3.get_paginator("list_parts").paginate(
                Bucket=self._bucket, Key=key, UploadId=upload_id
            )
            return [
                PartReceipt(
                    part["PartNumber"],
                    part["ETag"].strip('"'),
                    part["Size"],
                    crc.decode(part.get("ChecksumCRC64NVME")),
                )
                for page in pages
                for part in page.get("Parts", [])
            ]

    def list_uploads(self, prefix: str) -> Uploads:
        """See ObjectStore.list_uploads."""
        with self._request("LIST UPLOADS", prefix) as s3:
            pages = s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            return [
                UploadInfo(item["Key"], item["UploadId"], nanoseconds(item.get("Initiated")))
                for page in pages
                for item in page.get("Uploads", [])
                if item["Key"].startswith(prefix)  # some stores ignore the parameter
            ]

    def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[PartReceipt],
        *,
        if_none_match: bool = False,
        if_match: str | None = None,
        crc64: int | None = None,
        size: int | None = None,
    ) -> ObjectInfo:
        """See ObjectStore.complete_upload."""
        condition = Condition(if_none_match, if_match)
        intent = Intent(*whole(key, parts, size, crc64), lambda: multipart_etag(parts))
        try:
            guard = self._guard(key, condition, self.probe().conditional_complete)
            reply = self._complete(key, upload_id, parts, intent, guard)
        except (NoSuchUpload, PreconditionFailed) as error:
            undecided = _undecided(key, error)
            return settle(self._head_or_none(key), intent, condition, error, undecided)
        return self._confirmed(key, reply, intent)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See ObjectStore.abort_upload."""
        with (
            contextlib.suppress(NoSuchUpload, NotFound),
            self._request("ABORT UPLOAD", key) as s3,
        ):
            s3.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)

    def _complete(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[PartReceipt],
        intent: Intent,
        guard: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        crc64 = self.probe().crc64
        checksum: dict[str, Any] = {}
        if crc64 and intent.crc64 is not None:
            checksum = {
                "ChecksumCRC64NVME": crc.encode(intent.crc64),
                "ChecksumType": "FULL_OBJECT",
                "MpuObjectSize": intent.size,
            }
        listed: list[Any] = [_listed(part, crc64) for part in parts]
        with self._request("COMPLETE UPLOAD", key) as s3:
            return s3.complete_multipart_upload(
                Bucket=self._bucket,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={"Parts": listed},
                **checksum,
                **guard,
            )

    def _confirmed(self, key: str, reply: Mapping[str, Any], intent: Intent) -> ObjectInfo:
        """The new object, once the store has vouched for its content: by checksum, by the etag that
        these parts must give, or at least by its size."""
        etag = etag_of(reply, key)
        check_echo(reply, intent.crc64, key)
        if crc.decode(reply.get("ChecksumCRC64NVME")) is None and etag != intent.etag():
            present = self.head(key)
            if present.size != intent.size:
                raise Corrupt(f"{key} has {present.size} bytes, expected {intent.size}")
            if None not in (present.crc64, intent.crc64) and not intent.matches(present):
                raise Corrupt(f"{key} does not have the content that was sent")
        return ObjectInfo(key, intent.size, etag, crc64=intent.crc64)


def _listed(part: PartReceipt, crc64: bool) -> dict[str, Any]:
    listed: dict[str, Any] = {"PartNumber": part.number, "ETag": quoted(part.etag)}
    if crc64 and part.crc64 is not None:
        listed["ChecksumCRC64NVME"] = crc.encode(part.crc64)
    return listed


def _undecided(key: str, error: StoreError) -> StoreError:
    """What to report when the object is not ours, but its condition holds: after a conflict with
    another write at the same moment S3 wants the upload made anew."""
    if isinstance(error, NoSuchUpload):
        return error
    if code_of(error) == "ConditionalRequestConflict":
        return NoSuchUpload(f"{key}: another write at the same moment; upload again")
    return Contradiction(str(error))
