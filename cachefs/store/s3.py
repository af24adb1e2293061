"""S3 through boto3: Amazon's and everybody else's.

Requests go out once (the flusher owns retries), checksums are computed here and sent as headers,
and what a store does not support is found by a probe and stood in for: conditions by a HEAD before
the write, CRC64NVME by Content-MD5. Errors leave this module only as the classes of
`cachefs.errors`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cachefs.errors import (
    Contradiction,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
    Transient,
)
from cachefs.store import crc
from cachefs.store.base import (
    DELETE_BATCH,
    LIST_PAGE,
    Body,
    Failures,
    Listing,
    ObjectInfo,
    PartReceipt,
    Received,
)
from cachefs.store.conditions import Condition, Intent, settle
from cachefs.store.receiving import NOTHING, receive
from cachefs.store.s3base import (
    check_echo,
    etag_of,
    in_memory_if_small,
    md5_of,
    nanoseconds,
    opened,
    quoted,
)
from cachefs.store.s3body import Body as ReplyBody
from cachefs.store.s3client import S3Options
from cachefs.store.s3errors import code_of, from_code
from cachefs.store.s3uploads import S3Uploads
from cachefs.store.transfer import size_of

COPY_LIMIT = 5 * 1024**3
"""Largest object that CopyObject takes, bytes."""
COPY_PART = 512 * 1024**2
"""Part size for copying larger ones, bytes; grows when there would be more than MAX_PARTS."""
COPY_THREADS = 8
MAX_PARTS = 10_000

_NOT_XML = re.compile("[\x00-\x08\x0b-\x1f\ufffe\uffff]")
"""Characters a batch delete cannot name: XML has no form for them, or normalises them."""
_KEEPS_EMPTIED_DIRECTORIES = "SeaweedFS"
"""Servers of this name list a common prefix long after the last key below it was deleted."""
_NO_BATCH_DELETE = {"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "MalformedXML"}


class S3Store(S3Uploads):
    """One bucket and prefix. Methods as in ObjectStore."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> S3Store:
        """From the plain values of section `store`."""
        return cls(S3Options.from_settings(settings), settings.get("capabilities"))

    def list(
        self,
        prefix: str,
        *,
        delimiter: str | None = None,
        token: str | None = None,
        limit: int = LIST_PAGE,
    ) -> Listing:
        """See ObjectStore.list."""
        extra: dict[str, Any] = {"Delimiter": delimiter} if delimiter else {}
        if token is not None:
            extra["ContinuationToken"] = token
        with self._request("LIST", prefix) as s3:
            reply = s3.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=limit, **extra)
            prefixes = tuple(self._prefixes_in_use(s3, reply))
        objects = tuple(
            ObjectInfo(
                item["Key"],
                item["Size"],
                item.get("ETag", "").strip('"'),
                nanoseconds(item.get("LastModified")),
            )
            for item in reply.get("Contents", [])
        )
        more = reply.get("NextContinuationToken") if reply.get("IsTruncated") else None
        return Listing(objects, prefixes, more)

    def _prefixes_in_use(self, s3: Any, reply: Any) -> Iterator[str]:
        """The common prefixes of a reply that have a key: elsewhere than in SeaweedFS, all."""
        server = reply["ResponseMetadata"].get("HTTPHeaders", {}).get("server", "")
        for item in reply.get("CommonPrefixes", []):
            prefix = item["Prefix"]
            if not server.startswith(_KEEPS_EMPTIED_DIRECTORIES) or s3.list_objects_v2(
                Bucket=self._bucket, Prefix=prefix, MaxKeys=1
            ).get("KeyCount"):
                yield prefix

    def get_bytes(
        self, key: str, start: int = 0, end: int | None = None, *, if_match: str | None = None
    ) -> bytes:
        """See ObjectStore.get_bytes."""
        if end is not None and end <= start:
            return b""
        with self._request("GET", key) as s3:
            reply = self._get(s3, key, start, end, if_match)
            if reply is None:
                return b""
            with reply["Body"] as stream:
                data: bytes = stream.read(reply["ContentLength"])
        if len(data) != reply["ContentLength"]:
            raise Transient(f"GET {key}: {len(data)} of {reply['ContentLength']} bytes came")
        return data

    def get_into(
        self,
        key: str,
        path: str,
        start: int,
        end: int,
        *,
        at: int | None = None,
        if_match: str | None = None,
    ) -> Received:
        """See ObjectStore.get_into."""
        if end <= start:
            return NOTHING
        with self._request("GET", key) as s3:
            reply = self._get(s3, key, start, end, if_match)
            if reply is None:
                return NOTHING
            size = int(reply["ContentLength"])
            with reply["Body"] as stream:
                got = receive(ReplyBody(stream), path, start if at is None else at, size)
        if got.size != size:
            raise Transient(f"GET {key}: {got.size} of {size} bytes came")
        return got

    def put(
        self,
        key: str,
        body: Body,
        *,
        metadata: Mapping[str, str] | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
        crc64: int | None = None,
    ) -> ObjectInfo:
        """See ObjectStore.put."""
        body, tags = in_memory_if_small(body), dict(metadata or {})
        value, checksum = self._integrity(body, crc64)
        condition = Condition(if_none_match, if_match)
        try:
            guard = self._guard(key, condition, self.probe().conditional_put)
            with opened(body) as stream, self._request("PUT", key) as s3:
                reply = s3.put_object(
                    Bucket=self._bucket, Key=key, Body=stream, Metadata=tags, **checksum, **guard
                )
        except PreconditionFailed as error:
            intent = Intent(size_of(body), value, lambda: md5_of(body).hex(), tags)
            undecided = Contradiction(str(error))
            return settle(self._head_or_none(key), intent, condition, error, undecided)
        check_echo(reply, value, key)
        return ObjectInfo(key, size_of(body), etag_of(reply, key), metadata=tags, crc64=value)

    def copy(
        self,
        src: str,
        dst: str,
        *,
        metadata: Mapping[str, str] | None = None,
        if_source_match: str | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        """See ObjectStore.copy."""
        source = self.head(src)
        Condition(if_match=if_source_match).check(source, src)
        condition = Condition(if_none_match, if_match)
        tags = dict(source.metadata if metadata is None else metadata)
        try:
            if source.size > COPY_LIMIT:
                return self._copy_by_parts(source, dst, tags, condition)
            guard = self._guard(dst, condition, self.probe().conditional_copy)
            return self._copy_whole(source, dst, tags, metadata is not None, guard)
        except PreconditionFailed as error:
            intent = Intent(source.size, source.crc64, lambda: source.etag, tags)
            undecided = Contradiction(str(error))
            return settle(self._head_or_none(dst), intent, condition, error, undecided)

    def delete(self, keys: Iterable[str]) -> Failures:
        """See ObjectStore.delete."""
        wanted = list(dict.fromkeys(keys))
        together = [key for key in wanted if not _NOT_XML.search(key)]
        failures = self._delete_singly([key for key in wanted if _NOT_XML.search(key)])
        for first in range(0, len(together), DELETE_BATCH):
            failures |= self._delete_batch(together[first : first + DELETE_BATCH])
        return failures

    def _get(
        self, s3: Any, key: str, start: int, end: int | None, if_match: str | None
    ) -> Mapping[str, Any] | None:
        """The reply to a ranged GET; None if the range starts beyond the object's end. A whole
        object is asked for without a range, which an empty one would not satisfy."""
        extra: dict[str, Any] = {"IfMatch": quoted(if_match)} if if_match else {}
        if start > 0 or end is not None:
            extra["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        try:
            with self._request("GET", key):
                reply: Mapping[str, Any] = s3.get_object(Bucket=self._bucket, Key=key, **extra)
        except Refused as error:
            if code_of(error) in ("InvalidRange", "416"):
                return None
            raise
        wanted = None if end is None else end - start
        too_much = wanted is not None and reply["ContentLength"] > wanted
        if too_much or (start > 0 and "ContentRange" not in reply):
            raise Refused(f"GET {key}: the store ignores byte ranges")
        return reply

    def _copy_whole(
        self,
        source: ObjectInfo,
        dst: str,
        tags: dict[str, str],
        replace: bool,
        guard: Mapping[str, Any],
    ) -> ObjectInfo:
        extra: dict[str, Any] = {"MetadataDirective": "COPY"}
        if replace:
            extra = {"MetadataDirective": "REPLACE", "Metadata": tags}
        if self.probe().crc64:
            extra["ChecksumAlgorithm"] = "CRC64NVME"
        with self._request("COPY", dst) as s3:
            reply = s3.copy_object(
                Bucket=self._bucket,
                Key=dst,
                CopySource={"Bucket": self._bucket, "Key": source.key},
                CopySourceIfMatch=quoted(source.etag),
                **extra,
                **guard,
            )
        result = reply["CopyObjectResult"]
        check_echo(result, source.crc64, dst)
        value = crc.decode(result.get("ChecksumCRC64NVME")) or source.crc64
        return ObjectInfo(dst, source.size, etag_of(result, dst), metadata=tags, crc64=value)

    def _copy_by_parts(
        self, source: ObjectInfo, dst: str, tags: dict[str, str], condition: Condition
    ) -> ObjectInfo:
        step = max(COPY_PART, -(-source.size // MAX_PARTS))
        upload_id = self.create_upload(dst, tags)

        def copy_one(start: int) -> PartReceipt:
            end = min(start + step, source.size)
            return self.copy_part(
                dst,
                upload_id,
                start // step + 1,
                source.key,
                start,
                end,
                if_source_match=source.etag,
            )

        try:
            with ThreadPoolExecutor(COPY_THREADS) as pool:
                parts: Sequence[PartReceipt] = [*pool.map(copy_one, range(0, source.size, step))]
            made = self.complete_upload(
                dst,
                upload_id,
                parts,
                if_none_match=condition.if_none_match,
                if_match=condition.if_match,
                crc64=source.crc64,
                size=source.size,
            )
        except StoreError:
            with contextlib.suppress(StoreError):
                self.abort_upload(dst, upload_id)
            raise
        return ObjectInfo(dst, made.size, made.etag, metadata=tags, crc64=made.crc64)

    def _delete_batch(self, keys: Sequence[str]) -> Failures:
        try:
            with self._request("DELETE", keys[0]) as s3:
                reply = s3.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True},
                )
        except Refused as error:
            if code_of(error) in _NO_BATCH_DELETE:
                return self._delete_singly(keys)
            raise
        failures = {
            item["Key"]: from_code(item.get("Code", ""), item.get("Message", ""), "DELETE")
            for item in reply.get("Errors", [])
        }
        return {key: error for key, error in failures.items() if not isinstance(error, NotFound)}

    def _delete_singly(self, keys: Iterable[str]) -> Failures:
        failures: Failures = {}
        for key in keys:
            try:
                with contextlib.suppress(NotFound), self._request("DELETE", key) as s3:
                    s3.delete_object(Bucket=self._bucket, Key=key)
            except StoreError as error:
                failures[key] = error
        return failures
