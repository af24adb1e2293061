"""What S3 stores do wrong, and what comes of it: one error class each, and no call that lies."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cachefs.demo.seaweedfs import SeaweedFS
from cachefs.errors import (
    Corrupt,
    CredentialsError,
    NoSuchUpload,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
    StoreUnreachable,
    Throttled,
    Transient,
)
from cachefs.store.base import FileRange, ObjectStore, open_store
from cachefs.store.transfer import Abandoned, abandon_when
from tests.store.conftest import BUCKET
from tests.support.faultproxy import FaultProxy
from tests.support.faults import Fault, Rule, expired_token, slow_down

BIG = b"0123456789abcdef" * 200_000  # 3.2 MB: streamed, not sent from memory


@pytest.fixture
def store(proxied: ObjectStore, proxy: FaultProxy) -> Iterator[ObjectStore]:
    """The store behind the proxy; rules end with the test."""
    proxy.forget()
    yield proxied
    proxy.clear()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of this test's own."""
    name = re.sub(r"\W+", "-", request.node.name)
    return f"faults/{name}-{time.time_ns()}"


@pytest.fixture
def body(tmp_path: Path) -> FileRange:
    """A body that is streamed from a file."""
    path = tmp_path / "body"
    path.write_bytes(BIG)
    return FileRange(str(path), 0, len(BIG))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", Throttled), (503, "ServiceUnavailable", Throttled),
        (429, "TooManyRequests", Throttled), (400, "RequestLimitExceeded", Throttled),
        (500, "InternalError", Transient), (502, "BadGateway", Transient),
        (504, "GatewayTimeout", Transient), (400, "RequestTimeout", Transient),
        (403, "RequestTimeTooSkewed", Transient), (409, "OperationAborted", Transient),
        (400, "ExpiredToken", CredentialsError), (403, "InvalidAccessKeyId", CredentialsError),
        (403, "SignatureDoesNotMatch", CredentialsError), (403, "AccessDenied", Refused),
        (403, "QuotaExceeded", Refused), (507, "InsufficientStorage", Refused),
        (404, "NoSuchBucket", Refused), (400, "InvalidRequest", Refused),
        (400, "BadDigest", Corrupt), (400, "XAmzContentSHA256Mismatch", Corrupt),
    ],
)  # fmt: skip
def test_each_error_has_its_class(
    store: ObjectStore,
    proxy: FaultProxy,
    key: str,
    status: int,
    code: str,
    expected: type[StoreError],
) -> None:
    store.put(key, b"x")
    proxy.set(Rule(Fault.ERROR, status=status, code=code, key=key))
    calls: list[Callable[[], Any]] = [
        lambda: store.put(key, b"y"),
        lambda: store.get_bytes(key),
        lambda: store.head(key),
        lambda: store.copy(key, key, metadata={}),
        lambda: store.create_upload(key),
        lambda: store.upload_part(key, "id", 1, b"z"),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        if call not in calls[2:4]:  # these begin with HEAD, whose reply has no body
            assert type(caught.value) is expected
        assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ExpiredToken", 400, CredentialsError),
        ("InvalidAccessKeyId", 403, CredentialsError),
        ("AccessDenied", 403, Refused),
        ("SlowDown", 503, Throttled),
    ],
)
def test_head_says_why(
    store: ObjectStore,
    proxy: FaultProxy,
    key: str,
    code: str,
    status: int,
    expected: type[StoreError],
) -> None:
    store.put(key, b"x")
    proxy.set(Rule(Fault.ERROR, ops=("head", "get"), status=status, code=code))
    with pytest.raises(StoreError) as caught:
        store.head(key)
    assert type(caught.value) is expected


def test_retry_after_is_passed_on(store: ObjectStore, proxy: FaultProxy, key: str) -> None:
    proxy.set(Rule(Fault.ERROR, status=503, code="SlowDown", retry_after=7.5, count=1))
    with pytest.raises(Throttled) as caught:
        store.put(key, b"x")
    assert caught.value.retry_after == 7.5
    assert store.put(key, b"x").size == 1


def test_nothing_is_retried_inside(store: ObjectStore, proxy: FaultProxy, key: str) -> None:
    proxy.set(Rule(Fault.ERROR, status=500))
    for call in (lambda: store.put(key, b"x"), lambda: store.get_bytes(key)):
        with pytest.raises(Transient):
            call()
    assert [entry["op"] for entry in proxy.log()] == ["put", "get"]


def test_a_repeated_put_sends_the_whole_body_again(
    store: ObjectStore, proxy: FaultProxy, key: str, body: FileRange
) -> None:
    proxy.set(
        Rule(Fault.RESET_REQUEST, after=1_000_000, count=1),
        Rule(Fault.ERROR, status=503, code="SlowDown", count=1),
    )
    for _ in range(2):
        with pytest.raises((Transient, Throttled)):
            store.put(key, body)
    store.put(key, body)
    assert store.get_bytes(key) == BIG
    sent = [entry["sent"] for entry in proxy.log() if entry["op"] == "put"]
    assert sent[0] >= 1_000_000
    assert sent[-1] == len(BIG)


@pytest.mark.parametrize("condition", ["always", "new", "match"])
@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.RESET_REPLY])
def test_a_put_whose_reply_was_lost_succeeds_when_repeated(
    store: ObjectStore, proxy: FaultProxy, key: str, fault: Fault, condition: str
) -> None:
    options: dict[str, Any] = {}
    if condition == "match":
        options = {"if_match": store.put(key, b"old").etag}
    elif condition == "new":
        options = {"if_none_match": True}
    proxy.set(Rule(fault, ops=("put",), count=1))
    with pytest.raises(Transient):
        store.put(key, b"new", metadata={"mtime": "1"}, **options)
    receipt = store.put(key, b"new", metadata={"mtime": "1"}, **options)
    assert receipt.etag == store.head(key).etag
    assert store.get_bytes(key) == b"new"


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault.LOST_REPLY, Fault.RESET_REPLY, Fault.COMMITTED_ERROR_BODY, Fault.ERROR_BODY]
)
def test_a_complete_whose_reply_was_lost_or_an_error_succeeds_when_repeated(
    store: ObjectStore, proxy: FaultProxy, key: str, fault: Fault, conditional: bool
) -> None:
    upload_id = store.create_upload(key)
    parts = [store.upload_part(key, upload_id, 1, b"content")]
    proxy.set(Rule(fault, ops=("complete_upload",), count=1))
    with pytest.raises(Transient):
        store.complete_upload(key, upload_id, parts, if_none_match=conditional)
    made = store.complete_upload(key, upload_id, parts, if_none_match=conditional)
    assert proxy.used() == [1]
    assert (made.size, made.etag) == (7, store.head(key).etag)
    assert store.get_bytes(key) == b"content"


@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.COMMITTED_ERROR_BODY, Fault.ERROR_BODY])
def test_a_copy_whose_reply_was_lost_or_an_error_succeeds_when_repeated(
    store: ObjectStore, proxy: FaultProxy, key: str, fault: Fault
) -> None:
    store.put(key, b"content", metadata={"a": "1"})
    proxy.set(Rule(fault, ops=("copy",), count=1))
    with pytest.raises(Transient):
        store.copy(key, key + "-copy", if_none_match=True)
    assert store.copy(key, key + "-copy", if_none_match=True).size == 7
    assert dict(store.head(key + "-copy").metadata) == {"a": "1"}


def test_another_writers_object_is_not_taken_for_ours(
    store: ObjectStore, proxy: FaultProxy, key: str
) -> None:
    upload_id = store.create_upload(key)
    parts = [store.upload_part(key, upload_id, 1, b"content")]
    proxy.set(Rule(Fault.LOST_REPLY, ops=("complete_upload",), count=1))
    with pytest.raises(Transient):
        store.complete_upload(key, upload_id, parts, if_none_match=True)
    store.put(key, b"CONTENT")  # somebody overwrites it before we look
    with pytest.raises((PreconditionFailed, NoSuchUpload)):
        store.complete_upload(key, upload_id, parts, if_none_match=True)
    assert store.get_bytes(key) == b"CONTENT"


def test_a_conflict_at_the_same_moment_means_upload_again(
    store: ObjectStore, proxy: FaultProxy, key: str
) -> None:
    upload_id = store.create_upload(key)
    parts = [store.upload_part(key, upload_id, 1, b"content")]
    conflict = Rule(Fault.ERROR, status=409, code="ConditionalRequestConflict", count=1)
    proxy.set(conflict)
    with pytest.raises(NoSuchUpload):
        store.complete_upload(key, upload_id, parts, if_none_match=True)
    proxy.set(conflict)
    with pytest.raises(Transient):
        store.put(key, b"content", if_none_match=True)


def test_bytes_that_change_on_the_way_are_refused(
    store: ObjectStore, proxy: FaultProxy, key: str, body: FileRange
) -> None:
    upload_id = store.create_upload(key)
    for content in (b"small", body):
        proxy.set(Rule(Fault.CORRUPT_REQUEST, ops=("put", "upload_part"), count=2))
        with pytest.raises(Corrupt):
            store.put(key, content)
        with pytest.raises(Corrupt):
            store.upload_part(key, upload_id, 1, content)
    with pytest.raises(NotFound):
        store.head(key)
    assert store.list_parts(key, upload_id) == []


def test_bytes_that_change_on_the_way_are_refused_by_md5_too(
    s3_settings: dict[str, Any], proxy: FaultProxy, key: str
) -> None:
    from tests.store.conftest import NOTHING_NATIVE

    plain = {**s3_settings, "endpoint": proxy.endpoint, "capabilities": NOTHING_NATIVE}
    store = open_store(plain)
    proxy.set(Rule(Fault.CORRUPT_REQUEST, ops=("put",), count=1))
    with pytest.raises(Corrupt):
        store.put(key, b"content")
    assert store.put(key, b"content").size == 7


def test_a_store_that_confirms_another_checksum_is_not_believed(
    store: ObjectStore, proxy: FaultProxy, key: str
) -> None:
    upload_id = store.create_upload(key)
    proxy.set(Rule(Fault.WRONG_CHECKSUM, count=2))
    with pytest.raises(Corrupt):
        store.put(key, b"content")
    with pytest.raises(Corrupt):
        store.upload_part(key, upload_id, 1, b"content")
    parts = [store.upload_part(key, upload_id, 1, b"content")]
    proxy.set(Rule(Fault.WRONG_CHECKSUM, ops=("complete_upload",), count=1))
    with pytest.raises(Corrupt):
        store.complete_upload(key, upload_id, parts)


@pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.RESET_REPLY])
@pytest.mark.parametrize("after", [0, 1, 100_000])
def test_short_replies_are_not_taken_for_the_whole(
    store: ObjectStore,
    proxy: FaultProxy,
    key: str,
    body: FileRange,
    tmp_path: Path,
    fault: Fault,
    after: int,
) -> None:
    store.put(key, body)
    target = tmp_path / "target"
    target.touch()
    proxy.set(Rule(fault, ops=("get", "list"), after=after, count=3 if after < 100_000 else 2))
    with pytest.raises(Transient):
        store.get_bytes(key)
    with pytest.raises(Transient):
        store.get_into(key, str(target), 0, len(BIG))
    if after < 100_000:
        with pytest.raises(Transient):
            store.list(key)
    assert store.get_into(key, str(target), 0, len(BIG)).size == len(BIG)
    assert target.read_bytes() == BIG


def test_a_silent_store_ends_in_a_timeout(
    proxy: FaultProxy, s3_settings: dict[str, Any], key: str
) -> None:
    settings = {**s3_settings, "endpoint": proxy.endpoint, "read_timeout": 0.5}
    store = open_store(settings)
    store.probe()
    proxy.set(Rule(Fault.HANG, seconds=5, count=1))
    with pytest.raises(Transient):
        store.put(key, b"x")
    proxy.clear()


def test_a_store_that_is_not_there(s3_settings: dict[str, Any]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        store = open_store({**s3_settings, "endpoint": endpoint, "connect_timeout": 1})
        for call in (store.probe, lambda: store.head("k"), lambda: store.list("")):
            with pytest.raises(StoreUnreachable) as caught:
                call()
            assert caught.value.hint


def test_a_bucket_that_is_not_there(s3_settings: dict[str, Any]) -> None:
    store = open_store({**s3_settings, "url": "s3://no-such-bucket/prefix"})
    for call in (
        store.probe,
        lambda: store.head("prefix/k"),
        lambda: store.get_bytes("prefix/k"),
        lambda: store.put("prefix/k", b""),
    ):
        with pytest.raises(Refused) as caught:
            call()
        assert "create the bucket" in caught.value.hint


def test_wrong_and_missing_credentials(
    s3_settings: dict[str, Any], s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-but-secret")
    store = open_store(s3_settings)
    for call in (store.probe, lambda: store.head("k"), lambda: store.get_bytes("k")):
        with pytest.raises(CredentialsError) as caught:
            call()
        shown = caught.value.message + caught.value.hint
        assert "wrong-but-secret" not in shown
        assert s3_server.secret_key not in shown
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(CredentialsError, match="credentials"):
        open_store(s3_settings).probe()
    with pytest.raises(CredentialsError, match="no-such-profile"):
        open_store({**s3_settings, "profile": "no-such-profile"}).probe()


def test_a_changed_credentials_file_is_read_again(
    s3_settings: dict[str, Any],
    s3_server: SeaweedFS,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    key: str,
) -> None:
    def credentials(secret: str) -> None:
        lines = ["[default]", f"aws_access_key_id={s3_server.access_key}"]
        file.write_text("\n".join([*lines, f"aws_secret_access_key={secret}"]))

    file = tmp_path / "credentials"
    credentials("out of date")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    store = open_store(s3_settings)
    with pytest.raises(CredentialsError):
        store.put(key, b"x")
    credentials(s3_server.secret_key)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            store.put(key, b"x")
            break
        except CredentialsError:
            time.sleep(0.1)
    assert store.get_bytes(key) == b"x"
    credentials("out of date again")
    store.reload()
    with pytest.raises(CredentialsError):
        store.get_bytes(key)


def test_an_abandoned_transfer_stops_and_leaves_a_working_store(
    store: ObjectStore,
    proxy: FaultProxy,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 256 * 1024**2)

    class AfterSome(threading.Event):
        """Set once a part of the bytes is on its way, however long that takes."""

        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks > 20

    event = AfterSome()
    with monkeypatch.context() as patch, abandon_when(event), pytest.raises(Abandoned):
        patch.setattr("cachefs.store.crc.crc64_of", lambda _: 0)  # go straight to sending
        store.put(key, FileRange(str(path), 0, 256 * 1024**2))
    assert store.put(key, b"x").size == 1
    (large, _) = (entry for entry in proxy.log() if entry["op"] == "put")
    assert 0 < large["sent"] < 256 * 1024**2


def test_an_expired_token_costs_one_request(
    store: ObjectStore, proxy: FaultProxy, key: str
) -> None:
    proxy.set(expired_token(count=1))
    with pytest.raises(CredentialsError):
        store.put(key, b"x")
    assert store.put(key, b"x").size == 1


def test_more_threads_than_connections(s3_settings: dict[str, Any], key: str) -> None:
    store = open_store({**s3_settings, "max_connections": 2})
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda number: store.put(f"{key}/{number}", b"x"), range(96)))
    assert len(store.list(key + "/").objects) == 96


def test_a_probe_that_met_trouble_is_not_remembered(
    s3_settings: dict[str, Any], proxy: FaultProxy, s3_stores: dict[str, ObjectStore]
) -> None:
    store = open_store({**s3_settings, "endpoint": proxy.endpoint})
    expected = s3_stores["s3"].probe()
    for skip in range(12):
        proxy.set(Rule(Fault.ERROR, ops=("put", "copy", "complete_upload"), skip=skip, count=1))
        try:
            assert store.probe() == expected
            break
        except Transient:
            pass
    else:
        pytest.fail("never succeeded")
    proxy.clear()
    assert skip > 3
    assert store.list(".cachefs/probe-").objects == ()
    assert store.list_uploads(".cachefs/probe-") == []


def test_a_budget_is_kept(store: ObjectStore, proxy: FaultProxy, key: str) -> None:
    proxy.set(slow_down(5))
    throttled = 0
    started = time.monotonic()
    while time.monotonic() - started < 1.0:
        try:
            store.put(key, b"x")
        except Throttled:
            throttled += 1
    seconds, done = time.monotonic() - started, proxy.counts()["put 200"]
    assert throttled == proxy.counts()["put 503"] > 0
    assert 5 <= done <= 5 * seconds + 7
    # A request of an earlier test that gets no answer may end only now.
    assert {entry["key"] for entry in proxy.log() if entry["status"]} == {key}
    assert BUCKET not in key
