"""The stores that the contract suite runs against, each as a `Place`: store and fresh prefix."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from cachefs.demo.seaweedfs import SeaweedFS
from cachefs.errors import Retry, StoreError
from cachefs.store.base import Capabilities, Failures, FileRange, ObjectStore, open_store
from tests.support.faultproxy import FaultProxy
from tests.support.faults import Fault, Rule, weather

BUCKET = "contract"
TRIES = 30
NOTHING_NATIVE = Capabilities(
    conditional_put=False, conditional_complete=False, crc64=False, copy_part=True
)
"""What the plainest S3 store can do: everything else must be stood in for."""

KINDS = ("s3", "s3-plain", "s3-weather", "directory", "directory-beside")
"""`s3-weather`: through a proxy that breaks requests in every way, with a caller who tries
again."""


class Patient:
    """A store whose every call is tried again through passing trouble, as the flusher does."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def patiently(*args: Any, **kwargs: Any) -> Any:
            for _ in range(TRIES):
                try:
                    return method(*args, **kwargs)
                except StoreError as error:
                    if error.retry in (Retry.NEVER, Retry.SLOWLY):
                        raise
            return method(*args, **kwargs)

        return patiently

    def delete(self, keys: list[str]) -> Failures:
        """Goes on with those that failed."""
        failures: Failures = self.__getattr__("delete")(keys)
        for _ in range(TRIES):
            failures = failures and self.__getattr__("delete")(list(failures))
        return failures


@dataclass
class Place:
    """A store under test, and names and files for one test."""

    kind: str
    store: ObjectStore
    prefix: str
    tmp: Path

    def key(self, name: str) -> str:
        """The full key of a name."""
        return self.prefix + name

    def file(self, content: bytes, *, name: str = "body") -> str:
        """A local file with this content."""
        path = self.tmp / name
        path.write_bytes(content)
        return str(path)

    def range(self, content: bytes, *, before: int = 3, after: int = 5) -> FileRange:
        """The content as the middle of a larger file."""
        path = self.file(b"<" * before + content + b">" * after, name=secrets.token_hex(4))
        return FileRange(path, before, before + len(content))

    def names(self, **options: Any) -> list[str]:
        """All names below the prefix, with all pages of the listing."""
        found: list[str] = []
        token = None
        while True:
            page = self.store.list(self.prefix, token=token, **options)
            found += [info.key.removeprefix(self.prefix) for info in page.objects]
            found += [name.removeprefix(self.prefix) for name in page.prefixes]
            token = page.next_token
            if token is None:
                return found


@pytest.fixture(scope="session")
def s3_server(seaweed: Any) -> SeaweedFS:
    """The session's SeaweedFS, with a bucket for these tests."""
    server: SeaweedFS = seaweed.server
    server.create_bucket(BUCKET)
    return server


@pytest.fixture(scope="session")
def s3_settings(s3_server: SeaweedFS) -> Iterator[dict[str, Any]]:
    """Settings of a store in that bucket; its credentials are in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        yield {"url": f"s3://{BUCKET}", "endpoint": s3_server.endpoint, "max_connections": 16}


@pytest.fixture(scope="session")
def s3_stores(s3_settings: dict[str, Any]) -> dict[str, ObjectStore]:
    """One S3 store of each kind: building a boto3 client takes longer than most tests."""
    plain = {**s3_settings, "capabilities": NOTHING_NATIVE}
    return {"s3": open_store(s3_settings), "s3-plain": open_store(plain)}


@pytest.fixture(scope="session")
def proxy(s3_server: SeaweedFS) -> Iterator[FaultProxy]:
    """A proxy before the S3 server; whoever uses it sets and clears the rules."""
    with FaultProxy(s3_server.endpoint) as made:
        yield made


@pytest.fixture(scope="session")
def proxied(proxy: FaultProxy, s3_settings: dict[str, Any]) -> ObjectStore:
    """An S3 store behind the proxy, probed while that was quiet."""
    store = open_store({**s3_settings, "endpoint": proxy.endpoint, "read_timeout": 5})
    store.probe()
    return store


def _weather(test: str) -> list[Rule]:
    """Bad weather that is the same in each run of a test. An upload whose creation was answered by
    silence stays behind; the tests look at what there is, so that does not happen here."""
    rules = weather(zlib.crc32(test.encode()), rules=12)
    for rule in rules:
        if rule.fault is not Fault.ERROR:
            rule.ops = tuple(op for op in rule.ops if op != "create_upload") or ("put",)
    return rules


def _open(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if kind.startswith("s3"):
        stores: dict[str, ObjectStore] = request.getfixturevalue("s3_stores")
        return stores[kind]
    root = tmp_path / "root"
    root.mkdir()
    store = open_store({"url": root.as_uri()})
    store.probe()
    if kind == "directory-beside":
        store._layout.attributes = False  # type: ignore[attr-defined]
    return store


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each kind of store, with a prefix of its own."""
    kind = str(request.param)
    work = tmp_path / "work"
    work.mkdir()
    prefix = f"t{secrets.token_hex(5)}/"
    if kind != "s3-weather":
        yield Place(kind, _open(kind, request, tmp_path), prefix, work)
        return
    store, proxy = request.getfixturevalue("proxied"), request.getfixturevalue("proxy")
    proxy.set(*_weather(request.node.name))
    yield Place(kind, cast(ObjectStore, Patient(store)), prefix, work)
    proxy.clear()
