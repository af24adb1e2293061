"""Keys that another service hands out: a role by web identity, as in Kubernetes."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore import credentials, loaders, tokens

from cachefs.store import s3client
from cachefs.store.s3client import ClientSource, S3Options

_ROLE = """<AssumeRoleWithWebIdentityResponse
xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>KEYOFTHEROLE</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>
<SessionToken>token</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


class _Services(BaseHTTPRequestHandler):
    """AWS's token service, and a store that accepts every key."""

    signed_with: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(_ROLE.encode())

    def do_GET(self) -> None:
        self.signed_with.append(self.headers["Authorization"])
        self._reply(b"bytes")

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def services() -> Iterator[tuple[str, list[str]]]:
    """Its address, and what its store has been asked with."""
    signed_with: list[str] = []
    handler = type("Handler", (_Services,), {"signed_with": signed_with})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", signed_with
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_role_by_web_identity(
    services: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the environment says so, as on a Kubernetes node."""
    address, signed_with = services
    token = tmp_path / "token"
    token.write_text("a token of the cluster's")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/training")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", address)
    client = ClientSource(S3Options("bucket", endpoint=address)).get()
    reply = client.get_object(Bucket="bucket", Key="key")
    assert reply["Body"].read() == b"bytes"
    assert ["Credential=KEYOFTHEROLE/" in each for each in signed_with] == [True]


def test_every_service_that_hands_out_keys_is_known() -> None:
    """Whatever botocore makes clients of to get credentials."""
    asked = set()
    for module in (credentials, tokens):
        source = inspect.getsource(module)
        asked |= set(re.findall(r"""client(?:_creator)?\(\s*['"]([a-z-]+)['"]""", source))
    assert {"sts", "sso"} <= asked
    known = s3client._FewServices().list_available_services("service-2")
    there = loaders.Loader().list_available_services("service-2")
    assert asked <= set(known)
    assert set(known) - {"signin"} <= set(there)  # newer than the oldest botocore that will do
