"""Looking at the bucket as any S3 tool would: what arrived, and in which order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from cachefs.demo.checkpoint import MARKERS, Checkpoint
from cachefs.errors import CachefsError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

READERS = 4
"""Objects that are read back at once."""
_BLOCK = 1 << 20


def list_keys(client: S3Client, bucket: str, prefix: str) -> dict[str, int]:
    """Keys below `prefix` (which is cut off) with their sizes; the product's own are left out."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    found = (item for page in pages for item in page.get("Contents", ()))
    keys = {item["Key"].removeprefix(prefix): item["Size"] for item in found}
    return {key: size for key, size in keys.items() if not key.startswith(".cachefs/")}


def read_back(
    client: S3Client,
    bucket: str,
    prefix: str,
    checkpoint: Checkpoint,
    on_bytes: Callable[[int], object],
) -> int:
    """Read every object of a checkpoint and compare checksums; returns how many there were.

    Raises CachefsError naming the first object that is missing, foreign or different.
    """
    expected = {file.path: file.sha256 for file in checkpoint.files}
    found = list_keys(client, bucket, prefix)
    if found.keys() != expected.keys():
        odd = min(found.keys() ^ expected.keys())
        raise CachefsError(f"{odd} is in {'the bucket' if odd in found else 'the checkpoint'} only")
    with ThreadPoolExecutor(READERS) as pool:
        digests = pool.map(lambda key: _digest(client, bucket, prefix + key, on_bytes), expected)
        _compare(expected, dict(zip(expected, digests, strict=True)))
    return len(expected)


def _compare(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    for key, digest in expected.items():
        if found[key] != digest:
            raise CachefsError(f"{key} in the bucket differs from what was saved")


def _digest(client: S3Client, bucket: str, key: str, on_bytes: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    for block in client.get_object(Bucket=bucket, Key=key)["Body"].iter_chunks(_BLOCK):
        digest.update(block)
        on_bytes(len(block))
    return digest.hexdigest()


class OrderWatch:
    """Lists the bucket again and again while an upload runs, as an impatient reader would.

    A torn checkpoint is a listing that shows a marker (the index, the trainer's state, the pointer)
    without every file that was complete when the marker was.
    """

    def __init__(
        self, client: S3Client, bucket: str, prefix: str, checkpoint: Checkpoint, interval: float
    ) -> None:
        """`interval`: seconds between two listings."""
        self._list = partial(list_keys, client, bucket, prefix)
        paths = [file.path for file in checkpoint.files]
        self._before = {
            path: set(paths[:at]) for at, path in enumerate(paths) if path.endswith(MARKERS)
        }
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.looks = 0
        """Listings so far."""
        self.torn = 0
        """Listings that showed a torn checkpoint."""
        self.error: Exception | None = None
        """What ended the watch early."""

    def __enter__(self) -> OrderWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raises CachefsError when a listing was torn, and what ended the watch early."""
        if self.error:
            raise self.error
        if self.torn:
            raise CachefsError(f"the bucket showed a torn checkpoint in {self.torn} listings")

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                seen = self._list().keys()
                self.looks += 1
                self.torn += any(
                    marker in seen and not before <= seen for marker, before in self._before.items()
                )
        except Exception as error:
            self.error = error
