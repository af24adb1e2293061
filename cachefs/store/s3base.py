"""What all S3 requests share: the client, error translation, capabilities, checksums, HEAD."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cachefs.errors import (
    CachefsError,
    Corrupt,
    CredentialsError,
    NotFound,
    Refused,
    StoreError,
    Transient,
)
from cachefs.store import crc
from cachefs.store.base import Body, Capabilities, ObjectInfo
from cachefs.store.conditions import Condition
from cachefs.store.s3client import ClientSource, S3Options
from cachefs.store.s3errors import code_of, translate
from cachefs.store.s3probe import Probe
from cachefs.store.transfer import RangeReader, load, pieces, size_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

SMALL_BODY = 1024 * 1024
"""Bodies up to this are read once and sent from memory: one system call, and no wait for the
store's 100-continue, which costs a round trip."""

BUCKET_CHECK_INTERVAL = 30.0
"""Seconds for which a bucket that was seen is believed to exist."""


class S3Base:
    """Shared state and helpers of `S3Store`. Thread-safe: the lock guards the remembered probe
    only."""

    def __init__(self, options: S3Options, capabilities: Capabilities | None = None) -> None:
        self.url = "/".join(filter(None, (f"s3://{options.bucket}", options.prefix)))
        self._options = options
        self._bucket = options.bucket
        self._clients = ClientSource(options)
        self._lock = threading.Lock()
        self._capabilities = capabilities
        self._bucket_seen = -BUCKET_CHECK_INTERVAL

    def probe(self, owner: str = "") -> Capabilities:
        """See ObjectStore.probe. Needs the right to write under the prefix."""
        with self._lock:
            if self._capabilities is None:
                options = self._options
                run = Probe(self._request, self._bucket, options.prefix, options.checksum, owner)
                self._capabilities = run.run()
            return self._capabilities

    def adopt(self, capabilities: Capabilities) -> None:
        """Take over what another process's probe of the same store found."""
        self._capabilities = capabilities

    def reload(self) -> None:
        """Read credentials and profile anew before the next request."""
        self._clients.discard()

    def head(self, key: str) -> ObjectInfo:
        """See ObjectStore.head."""
        try:
            with self._request("HEAD", key) as s3:
                reply = s3.head_object(Bucket=self._bucket, Key=key, **self._checksum_mode())
        except NotFound:
            self._assert_bucket(key)
            raise
        except (Refused, CredentialsError) as error:
            raise self._explained(key, error) from error
        return info_from(key, reply, int(reply["ContentLength"]))

    def _head_or_none(self, key: str) -> ObjectInfo | None:
        try:
            return self.head(key)
        except NotFound:
            return None

    def _explained(self, key: str, error: StoreError) -> StoreError:
        """A reply to HEAD has no body, so 400 and 403 do not say whether credentials expired or a
        right is missing; a GET of one byte does."""
        try:
            with self._request("GET", key) as s3:
                s3.get_object(Bucket=self._bucket, Key=key, Range="bytes=0-0")["Body"].close()
        except NotFound:
            return error
        except StoreError as explanation:
            if code_of(explanation) != "InvalidRange":  # what an empty object answers
                return explanation
        return Transient(str(error))

    def _assert_bucket(self, key: str) -> None:
        """A HEAD cannot tell a missing bucket from a missing object, and "deleted" must not be
        concluded from the former."""
        if time.monotonic() - self._bucket_seen < BUCKET_CHECK_INTERVAL:
            return
        try:
            with self._request("HEAD BUCKET", key) as s3:
                s3.head_bucket(Bucket=self._bucket)
        except NotFound as error:
            raise Refused(
                f"bucket {self._bucket} does not exist",
                hint="create the bucket, or correct the store URL",
            ) from error
        except Refused:
            pass  # no right to ask; a bucket that forbids exists
        self._bucket_seen = time.monotonic()

    @contextlib.contextmanager
    def _request(self, verb: str, key: str) -> Iterator[S3Client]:
        """Yields the client for one request; raises what went wrong as a StoreError."""
        client: S3Client | None = None
        try:
            client = self._clients.get()
            yield client
        except CachefsError:
            raise
        except Exception as error:
            known = translate(error, f"{verb} s3://{self._bucket}/{key}")
            if isinstance(known, CredentialsError) and client is not None:
                self._clients.discard(client)
            if known is error:
                raise
            raise known from error

    def _checksum_mode(self) -> dict[str, Any]:
        refused = self._capabilities is not None and not self._capabilities.crc64
        if refused or self._options.checksum == "none":
            return {}
        return {"ChecksumMode": "ENABLED"}

    def _guard(self, key: str, condition: Condition, native: bool) -> dict[str, Any]:
        """Parameters that make the store check the condition; if it cannot (`native` false), it is
        checked here and now. Raises PreconditionFailed."""
        if not condition:
            return {}
        if not native:
            condition.check(self._head_or_none(key), key)
            return {}
        if condition.if_none_match:
            return {"IfNoneMatch": "*"}
        return {"IfMatch": quoted(condition.if_match or "")}

    def _integrity(self, body: Body, known: int | None) -> tuple[int, dict[str, Any]]:
        """The body's checksum, and the parameters that make the store refuse other bytes. Raises
        Corrupt if the checksum was known to be another."""
        value = crc.crc64_of(body)
        if known is not None and known != value:
            raise Corrupt(f"local bytes have CRC64NVME {value:016x}, expected {known:016x}")
        if self.probe().crc64:
            return value, {"ChecksumCRC64NVME": crc.encode(value)}
        if self._options.checksum == "none":
            return value, {}
        return value, {"ContentMD5": base64.b64encode(md5_of(body)).decode("ascii")}


def in_memory_if_small(body: Body) -> Body:
    """Small bodies as bytes, so that what is checked and what is sent are one reading."""
    return load(body) if size_of(body) <= SMALL_BODY else body


@contextlib.contextmanager
def opened(body: Body) -> Iterator[Any]:
    """What boto3 takes as `Body`."""
    if isinstance(body, bytes):
        yield body
    else:
        with RangeReader(body) as reader:
            yield reader


def md5_of(body: Body) -> bytes:
    """MD5 digest of a body: the checksum that every store knows."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces(body):
        digest.update(piece)
    return digest.digest()


def check_echo(reply: Mapping[str, Any], expected: int | None, what: str) -> None:
    """Raise Corrupt if the store says it holds content with another checksum."""
    echo = crc.decode(reply.get("ChecksumCRC64NVME"))
    if None not in (echo, expected) and echo != expected:
        raise Corrupt(f"{what}: the store holds CRC64NVME {echo:016x}, expected {expected:016x}")


def etag_of(reply: Mapping[str, Any], what: str) -> str:
    """The etag without quotes. Raises Transient when there is none: the reply is garbled."""
    etag = str(reply.get("ETag", "")).strip('"')
    if not etag:
        raise Transient(f"{what}: the reply has no etag")
    return etag


def quoted(etag: str) -> str:
    """The etag as headers want it."""
    return f'"{etag}"'


def info_from(key: str, reply: Mapping[str, Any], size: int) -> ObjectInfo:
    """An object as the reply to HEAD or GET describes it."""
    metadata = {name.lower(): value for name, value in reply.get("Metadata", {}).items()}
    return ObjectInfo(
        key=key,
        size=size,
        etag=etag_of(reply, key),
        mtime_ns=nanoseconds(reply.get("LastModified")),
        metadata=metadata,
        crc64=crc.decode(reply.get("ChecksumCRC64NVME")),
    )


def nanoseconds(moment: datetime | None) -> int:
    """Nanoseconds since the epoch; 0 if not told."""
    if moment is None:
        return 0
    return int(moment.timestamp()) * 10**9 + moment.microsecond * 1000
