"""The demonstration's proof fails when it should."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachefs.demo import checkpoint as checkpoints
from cachefs.demo.bucket import OrderWatch, list_keys, read_back
from cachefs.demo.checkpoint import MIB, Checkpoint, CheckpointFile
from cachefs.demo.seaweedfs import SeaweedFS
from cachefs.errors import CachefsError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "proof"
PREFIX = "run/"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with SeaweedFS(tmp_path_factory.mktemp("weed")) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def client(store: SeaweedFS) -> Iterator[S3Client]:
    client = store.client()
    yield client
    for key in list_keys(client, BUCKET, ""):
        client.delete_object(Bucket=BUCKET, Key=key)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return checkpoints.build(4 * MIB)


def put(client: S3Client, file: CheckpointFile) -> None:
    client.put_object(Bucket=BUCKET, Key=PREFIX + file.path, Body=b"".join(file.buffers))


def test_equal_objects_pass(client: S3Client, checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        put(client, file)
    client.put_object(Bucket=BUCKET, Key=f"{PREFIX}.cachefs/id", Body=b"the product's own")
    read: list[int] = []
    objects = read_back(client, BUCKET, PREFIX, checkpoint, read.append)
    assert objects == len(checkpoint.files)
    assert sum(read) == checkpoint.size


def test_a_missing_object_is_named(client: S3Client, checkpoint: Checkpoint) -> None:
    for file in checkpoint.files[1:]:
        put(client, file)
    with pytest.raises(CachefsError, match=r"config\.json is in the checkpoint only"):
        read_back(client, BUCKET, PREFIX, checkpoint, lambda _: None)


def test_a_foreign_object_is_named(client: S3Client, checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        put(client, file)
    client.put_object(Bucket=BUCKET, Key=f"{PREFIX}left.tmp", Body=b"")
    with pytest.raises(CachefsError, match=r"left\.tmp is in the bucket only"):
        read_back(client, BUCKET, PREFIX, checkpoint, lambda _: None)


def test_one_changed_byte_is_found(client: S3Client, checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        put(client, file)
    victim = checkpoint.files[3]
    changed = bytearray(b"".join(victim.buffers))
    changed[-1] ^= 1
    client.put_object(Bucket=BUCKET, Key=PREFIX + victim.path, Body=bytes(changed))
    with pytest.raises(CachefsError, match=victim.path):
        read_back(client, BUCKET, PREFIX, checkpoint, lambda _: None)


def watch_uploads(
    client: S3Client, checkpoint: Checkpoint, order: list[CheckpointFile]
) -> OrderWatch:
    with OrderWatch(client, BUCKET, PREFIX, checkpoint, 0.001) as watch:
        for file in order:
            put(client, file)
            looks, limit = watch.looks, time.monotonic() + 10
            while watch.looks < looks + 2 and time.monotonic() < limit:
                time.sleep(0.001)
    assert watch.error is None
    assert watch.looks >= 2 * len(order)
    return watch


def test_markers_that_come_last_are_in_order(client: S3Client, checkpoint: Checkpoint) -> None:
    watch_uploads(client, checkpoint, list(checkpoint.files)).check()


@pytest.mark.parametrize("marker", checkpoints.MARKERS)
def test_a_marker_ahead_of_its_data_is_seen(
    client: S3Client, checkpoint: Checkpoint, marker: str
) -> None:
    early = [file for file in checkpoint.files if file.path.endswith(marker)]
    rest = [file for file in checkpoint.files if file not in early]
    watch = watch_uploads(client, checkpoint, early + rest)
    assert watch.torn > 0
    with pytest.raises(CachefsError, match="torn checkpoint"):
        watch.check()


def test_the_watch_tells_why_it_ended(tmp_path: Path, store: SeaweedFS) -> None:
    checkpoint = Checkpoint("none", ())
    with OrderWatch(store.client(), "no-such-bucket", PREFIX, checkpoint, 0.001) as watch:
        limit = time.monotonic() + 10
        while watch.error is None and time.monotonic() < limit:
            time.sleep(0.01)
    with pytest.raises(Exception, match="NoSuchBucket"):
        watch.check()
