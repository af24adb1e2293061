"""The real store of the tests: one SeaweedFS for the session, a fresh bucket for each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cachefs.demo.seaweedfs import SeaweedFS
from tests.support.bucket import Bucket, plain_client


class StoredBucket(Bucket):
    """A bucket that says how a mount reaches it."""

    endpoint: str = ""

    def below(self, prefix: str) -> StoredBucket:
        made = StoredBucket(self.client, self.name, f"{self.prefix}{prefix.rstrip('/')}/", self.env)
        made.endpoint = self.endpoint
        return made


class Seaweed:
    """SeaweedFS with its data in one directory."""

    def __init__(self, data: Path) -> None:
        # Each of several processes has a store, and a memory of 24 GiB room for few buckets of 7.
        self.server = SeaweedFS(data, volumes=2)
        self.client: Any = None
        self._made = 0

    def start(self) -> None:
        self.server.start()
        self.client = plain_client(
            self.server.endpoint, self.server.access_key, self.server.secret_key
        )

    def stop(self) -> None:
        self.server.stop()

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def env(self) -> dict[str, str]:
        """Credentials for whoever uses this store."""
        return self.server.environment()

    def fresh_bucket(self, name: str = "") -> StoredBucket:
        """A new, empty bucket."""
        self._made += 1
        name = name or f"ckpt-{self._made}"
        self.server.create_bucket(name)
        made = StoredBucket(self.client, name, "", self.env)
        made.endpoint = self.endpoint
        return made

    def remove_bucket(self, bucket: Bucket) -> None:
        """Delete a bucket with its content."""
        whole = Bucket(bucket.client, bucket.name)
        keys = whole.keys(reserved=True)
        for start in range(0, len(keys), 1000):
            objects = [{"Key": key} for key in keys[start : start + 1000]]
            self.client.delete_objects(Bucket=bucket.name, Delete={"Objects": objects})
        self.client.delete_bucket(Bucket=bucket.name)
