"""Bodies of replies as they come over a connection: in pieces, late, cut short, one by one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3

from cachefs.store import crc
from cachefs.store.receiving import BUFFER, receive
from cachefs.store.s3body import Body

DATA = os.urandom(3 * BUFFER + 17)
Get = Callable[[str], Any]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        super().setup()
        type(self).connections += 1

    def do_GET(self) -> None:
        """The data, as the path says."""
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (DATA[:100], DATA[100:], b""):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            return
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        self.wfile.write(DATA[: 2 * BUFFER])
        if self.path == "/late":
            self.server.shut.wait(60)  # type: ignore[attr-defined]
        if self.path == "/whole":
            self.wfile.write(DATA[2 * BUFFER :])
        else:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def get() -> Iterator[Get]:
    """Asks a server for a path; one connection, half a second of patience."""
    _Handler.connections = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.shut = threading.Event()  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    host, port = str(server.server_address[0]), server.server_port
    pool = urllib3.HTTPConnectionPool(host, port, maxsize=1, timeout=0.5)
    yield lambda path: pool.request("GET", path, preload_content=False, retries=False)
    pool.close()
    server.shut.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An empty file."""
    path = tmp_path / "target"
    path.touch()
    return path


@pytest.mark.parametrize("size", [7, BUFFER - 1, len(DATA)])
def test_a_connection_serves_one_reply_after_another(get: Get, target: Path, size: int) -> None:
    for _ in range(3):
        reply = get("/whole")
        body = Body(reply)
        got = bytearray()
        buffer = memoryview(bytearray(size))
        while count := body.readinto(buffer):
            got += buffer[:count]
        assert got == DATA
        reply.close()
    assert _Handler.connections == 1
    assert get("/whole").read() == DATA, "what reads otherwise finds it as it was"
    assert _Handler.connections == 1


@pytest.mark.parametrize("path", ["/whole", "/chunked"])
def test_what_comes_is_written(get: Get, target: Path, path: str) -> None:
    assert receive(Body(get(path)), str(target), 0, len(DATA)) == (len(DATA), crc.crc64_of(DATA))
    assert target.read_bytes() == DATA


def test_what_does_not_come_in_time(get: Get, target: Path) -> None:
    reply = get("/late")
    with pytest.raises(urllib3.exceptions.ReadTimeoutError):
        receive(Body(reply), str(target), 0, len(DATA))
    assert target.read_bytes() == DATA[: 2 * BUFFER], "what came before is kept"


def test_what_is_cut_short(get: Get, target: Path) -> None:
    assert receive(Body(get("/short")), str(target), 0, len(DATA)).size == 2 * BUFFER
    assert get("/whole").read() == DATA, "on another connection"
