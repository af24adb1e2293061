"""What a user finds in the bucket with a plain S3 client (never the product's own store code)."""

from __future__ import annotations

import hashlib
import itertools
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

RESERVED = ".cachefs/"


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes kept as object metadata, in the form that s3fs and rclone use."""

    mode: int
    uid: int
    gid: int
    mtime: float

    @property
    def permissions(self) -> int:
        return stat.S_IMODE(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


def plain_client(endpoint: str, access_key: str, secret_key: str) -> Any:
    """A boto3 client with nothing of the product in it."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            retries={"max_attempts": 3},
            connect_timeout=5,
            read_timeout=30,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


class Bucket:
    """One bucket (or one prefix of it) as a plain client sees it."""

    def __init__(self, client: Any, name: str, prefix: str = "", env: dict[str, str] | None = None):
        self.client = client
        self.name = name
        self.prefix = prefix
        self.env = env or {}

    @property
    def url(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")

    def below(self, prefix: str) -> Bucket:
        """The view of a prefix inside this one."""
        return Bucket(self.client, self.name, f"{self.prefix}{prefix.rstrip('/')}/", self.env)

    def sizes(self, *, reserved: bool = False) -> dict[str, int]:
        """Key (without the prefix) -> size in bytes; the product's own keys only on demand.

        Without the marker of the prefix itself.
        """
        found: dict[str, int] = {}
        pages = self.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self.name, Prefix=self.prefix):
            for entry in page.get("Contents", []):
                key = entry["Key"][len(self.prefix) :]
                if key and (reserved or not key.startswith(RESERVED)):
                    found[key] = entry["Size"]
        return found

    def keys(self, *, reserved: bool = False) -> list[str]:
        """Sorted keys without the prefix, and without markers of directories that hold something:
        those may stay from a time when the directory was empty.
        """
        keys = sorted(self.sizes(reserved=reserved))
        full = {key for key, after in itertools.pairwise(keys) if after.startswith(key)}
        return [key for key in keys if not (key.endswith("/") and key in full)]

    def exists(self, key: str) -> bool:
        """Whether the key is there, by HEAD."""
        try:
            self.client.head_object(Bucket=self.name, Key=self.prefix + key)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return False
            raise
        return True

    def get(self, key: str) -> bytes:
        """The whole object."""
        reply = self.client.get_object(Bucket=self.name, Key=self.prefix + key)
        return bytes(reply["Body"].read())

    def sha256(self, key: str) -> str:
        """Digest of an object of any size, streamed."""
        reply = self.client.get_object(Bucket=self.name, Key=self.prefix + key)
        whole = hashlib.sha256()
        for block in reply["Body"].iter_chunks(1 << 20):
            whole.update(block)
        return whole.hexdigest()

    def put(self, key: str, body: bytes, metadata: dict[str, str] | None = None) -> str:
        """Store an object as another program would; returns its etag."""
        reply = self.client.put_object(
            Bucket=self.name, Key=self.prefix + key, Body=body, Metadata=metadata or {}
        )
        return str(reply["ETag"])

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=self.prefix + key)

    def metadata(self, key: str) -> dict[str, str]:
        """User metadata as the store gives it (lower-case names)."""
        reply = self.client.head_object(Bucket=self.name, Key=self.prefix + key)
        return {k.lower(): v for k, v in reply["Metadata"].items()}

    def attributes(self, key: str) -> Attributes:
        """Mode, owner and time of an object; KeyError if one is missing."""
        told = self.metadata(key)
        return Attributes(
            int(told["mode"], 8 if told["mode"].startswith("0") else 10),
            int(told["uid"]),
            int(told["gid"]),
            float(told["mtime"]),
        )

    def uploads(self) -> list[tuple[str, str]]:
        """Unfinished multipart uploads: (key, upload id)."""
        reply = self.client.list_multipart_uploads(Bucket=self.name, Prefix=self.prefix)
        return [(u["Key"], u["UploadId"]) for u in reply.get("Uploads", [])]


class DirectoryStore:
    """A `file:///dir` store, seen through the filesystem."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def keys(self) -> list[str]:
        """Sorted keys of published objects."""
        found = []
        for entry in self.path.rglob("*"):
            key = str(entry.relative_to(self.path))
            if entry.is_file() and not key.startswith(RESERVED):
                found.append(key)
        return sorted(found)

    def get(self, key: str) -> bytes:
        return (self.path / key).read_bytes()
