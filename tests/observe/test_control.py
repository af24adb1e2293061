"""The control socket: what peers may do wrong, and what they get."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.errors import CacheFull, UsageError
from cachefs.observe.client import ControlClient, NoAnswer
from cachefs.observe.control import Progress
from cachefs.observe.protocol import REQUEST_LIMIT, ControlError
from tests.observe.service import serving


class Script:
    """Handlers, and what happened to them."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.handlers = {
            "echo": self.echo,
            "count": self.count,
            "hang": self.hang,
            "flood": self.flood,
            "stalled": self.stalled,
            "full": self.full,
            "grouped": self.grouped,
            "bug": self.bug,
            "unprintable": self.unprintable,
        }

    async def echo(self, args: dict[str, Any], progress: Progress) -> Any:
        return args

    async def count(self, args: dict[str, Any], progress: Progress) -> Any:
        for number in range(args["to"]):
            await progress({"at": number})
        return "counted"

    async def hang(self, args: dict[str, Any], progress: Progress) -> Any:
        self.started.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()

    async def flood(self, args: dict[str, Any], progress: Progress) -> Any:
        self.started.set()
        try:
            while True:
                await progress({"filler": "x" * 10_000})
        finally:
            self.cancelled.set()

    async def stalled(self, args: dict[str, Any], progress: Progress) -> Any:
        raise ControlError("/m/f is stalled: 403", exit_code=5, hint="grant s3:PutObject")

    async def full(self, args: dict[str, Any], progress: Progress) -> Any:
        raise CacheFull("no room")

    async def grouped(self, args: dict[str, Any], progress: Progress) -> Any:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.stalled, args, progress)

    async def bug(self, args: dict[str, Any], progress: Progress) -> Any:
        raise ZeroDivisionError("oops")

    async def unprintable(self, args: dict[str, Any], progress: Progress) -> Any:
        return object()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def script(path: Path) -> Iterator[Script]:
    script = Script()
    with serving(path, script.handlers):
        yield script


@pytest.fixture
def client(path: Path, script: Script) -> Iterator[ControlClient]:
    with ControlClient(path) as client:
        yield client


def _raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(path))
    return sock


def _lines(sock: socket.socket) -> list[dict[str, Any]]:
    with sock.makefile("rb") as file:
        return [json.loads(line) for line in file]


# ---- conversations -----------------------------------------------------------------------------


def test_requests_follow_one_another_on_a_connection(client: ControlClient) -> None:
    assert client.call("echo", {"a": 1}) == {"a": 1}
    assert client.call("echo") == {}


def test_names_that_are_not_utf8_survive(client: ControlClient) -> None:
    name = os.fsdecode(b"/m/\xff\n\xc3\xa9")
    assert client.call("echo", {"path": name}) == {"path": name}


def test_progress_arrives_in_order_before_the_result(client: ControlClient) -> None:
    seen: list[Any] = []
    assert client.call("count", {"to": 100}, on_progress=seen.append) == "counted"
    assert seen == [{"at": number} for number in range(100)]
    assert client.call("count", {"to": 3}) == "counted"


def test_large_answers(client: ControlClient) -> None:
    names = ["n" * 200] * 4000
    assert client.call("echo", {"entries": names}) == {"entries": names}


def test_many_clients_at_once(path: Path, script: Script) -> None:
    hanging = [_raw(path) for _ in range(20)]
    for sock in hanging:
        sock.sendall(b'{"op": "hang"}\n')
    with ControlClient(path) as client:
        assert client.call("echo", {"x": 1}, timeout=5) == {"x": 1}
    for sock in hanging:
        sock.close()


# ---- errors ------------------------------------------------------------------------------------


def test_errors_carry_message_exit_code_and_hint(client: ControlClient) -> None:
    with pytest.raises(ControlError) as caught:
        client.call("stalled")
    assert str(caught.value) == "/m/f is stalled: 403"
    assert caught.value.exit_code == 5
    assert caught.value.hint == "grant s3:PutObject"


def test_any_error_of_ours_is_an_answer(client: ControlClient) -> None:
    with pytest.raises(ControlError, match="no room"):
        client.call("full")


def test_an_error_out_of_a_nursery_is_the_same_error(client: ControlClient) -> None:
    with pytest.raises(ControlError, match="stalled: 403") as caught:
        client.call("grouped")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("op", ["bug", "unprintable"])
def test_a_bug_in_a_handler_is_an_answer_and_the_server_lives(
    client: ControlClient, op: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ControlError, match=r"internal error: (ZeroDivision|Type)Error"):
        client.call(op)
    assert "control operation failed" in caplog.text
    assert client.call("echo") == {}


MALFORMED = [
    b"\n",
    b"hello\n",
    b"\xff\xfe\x00\n",
    b"[1, 2]\n",
    b'"op"\n',
    b"{}\n",
    b'{"op": 7}\n',
    b'{"op": "echo", "args": [1]}\n',
    b'{"op": "echo", "args": null}\n',
    b'{"op": "nonsense"}\n',
    b"[" * 100_000 + b"\n",
]  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_get_an_error_and_the_connection_stays(
    path: Path, script: Script, line: bytes
) -> None:
    with _raw(path) as sock, sock.makefile("rb") as file:
        sock.sendall(line)
        answer = json.loads(file.readline())
        assert answer["error"]["exit_code"] == 2
        assert answer["error"]["message"]
        sock.sendall(b'{"op": "echo"}\n')
        assert json.loads(file.readline()) == {"result": {}}


def test_a_request_beyond_the_limit_is_refused_without_reading_it_all(
    path: Path, script: Script
) -> None:
    with _raw(path) as sock:
        sent = 0
        try:
            while sent < 100 * REQUEST_LIMIT:
                sent += sock.send(b"x" * 65536)
        except OSError:
            pass
        assert sent < 100 * REQUEST_LIMIT
    with ControlClient(path) as client:
        assert client.call("echo") == {}


def test_a_request_just_beyond_the_limit_is_told_so(path: Path, script: Script) -> None:
    with _raw(path) as sock:
        sock.sendall(b"x" * (REQUEST_LIMIT + 1))
        (answer,) = _lines(sock)
    assert "longer than" in answer["error"]["message"]


def test_the_client_refuses_a_request_beyond_the_limit(client: ControlClient) -> None:
    with pytest.raises(ControlError, match="too many paths"):
        client.call("echo", {"paths": ["p" * 1000] * 2000})


# ---- peers that vanish -------------------------------------------------------------------------


def test_a_peer_that_vanishes_cancels_its_handler(path: Path, script: Script) -> None:
    sock = _raw(path)
    sock.sendall(b'{"op": "hang"}\n')
    assert script.started.wait(5)
    assert not script.cancelled.is_set()
    sock.close()
    assert script.cancelled.wait(5)


def test_a_killed_client_cancels_its_handler(path: Path, script: Script) -> None:
    code = (
        "import sys; from cachefs.observe.client import ControlClient;"
        "ControlClient(sys.argv[1]).call('hang')"
    )
    client = subprocess.Popen([sys.executable, "-c", code, str(path)])
    assert script.started.wait(10)
    client.kill()
    client.wait()
    assert script.cancelled.wait(5)


def test_a_peer_that_vanishes_unread_cancels_progress(path: Path, script: Script) -> None:
    sock = _raw(path)
    sock.sendall(b'{"op": "flood"}\n')
    assert script.started.wait(5)
    time.sleep(0.1)
    sock.close()
    assert script.cancelled.wait(5)


def test_a_peer_that_never_reads_is_given_up(
    path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.observe.control.SEND_TIMEOUT", 0.2)
    with _raw(path) as sock:
        sock.sendall(b'{"op": "flood"}\n')
        assert script.cancelled.wait(5)


def test_half_a_request_and_gone(path: Path, script: Script) -> None:
    for _ in range(50):
        with _raw(path) as sock:
            sock.sendall(b'{"op": "ec')
    with ControlClient(path) as client:
        assert client.call("echo") == {}


def test_a_pipelined_request_is_answered_in_turn(path: Path, script: Script) -> None:
    with _raw(path) as sock, sock.makefile("rb") as file:
        sock.sendall(b'{"op": "count", "args": {"to": 1}}\n{"op": "echo", "args": {"n": 1}}\n')
        answers = [json.loads(file.readline()) for _ in range(3)]
    assert answers == [{"progress": {"at": 0}}, {"result": "counted"}, {"result": {"n": 1}}]


# ---- the client --------------------------------------------------------------------------------


def test_no_socket(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="No such file"):
        ControlClient(tmp_path / "none")


def test_a_dead_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "dead"))
    with pytest.raises(NoAnswer, match="refused"):
        ControlClient(tmp_path / "dead")


def test_a_silent_daemon(client: ControlClient) -> None:
    started = time.monotonic()
    with pytest.raises(NoAnswer, match="no answer in time"):
        client.call("hang", timeout=0.3)
    assert time.monotonic() - started < 5


def _answering(path: Path, answer: bytes) -> Callable[[], None]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        peer, _ = listener.accept()
        peer.recv(1000)
        peer.sendall(answer)
        peer.close()
        listener.close()

    return serve


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "connection was closed"),
        (b'{"resu', "connection was closed"),
        (b"garbage\n", "malformed"),
        (b"[]\n", "malformed"),
        (b'{"error": "plain"}\n', "plain"),
        (b'{"error": {"exit_code": "x"}}\n', "unknown error"),
        (b'{"error": {"message": "m", "exit_code": 0}}\n', "m"),
    ],
)
def test_odd_answers_are_errors(tmp_path: Path, answer: bytes, says: str) -> None:
    path = tmp_path / "odd"
    server = threading.Thread(target=_answering(path, answer))
    server.start()
    with ControlClient(path) as client, pytest.raises(ControlError, match=says) as caught:
        client.call("echo", timeout=5)
    server.join()
    assert caught.value.exit_code == 1


# ---- the socket file ---------------------------------------------------------------------------


def test_the_socket_is_private_and_goes_with_the_server(path: Path) -> None:
    with serving(path, {}):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not path.with_name("control.sock.new").exists()
    assert not path.exists()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    path.with_name("control.sock.new").touch()
    with serving(path, Script().handlers), ControlClient(path) as client:
        assert client.call("echo") == {}


def test_a_server_leaves_the_socket_of_its_successor_alone(path: Path) -> None:
    with serving(path, {}):
        successor = serving(path, Script().handlers)
        successor.__enter__()
    with ControlClient(path) as client:
        assert client.call("echo") == {}
    successor.__exit__(None, None, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_strangers_are_refused(path: Path, script: Script) -> None:
    """Even one that can reach the socket."""
    for directory in (path.parent, *path.parents):
        if directory != Path("/") and directory.owner() == "root" and "pytest" in str(directory):
            directory.chmod(0o755)
    path.chmod(0o666)
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        's.connect(sys.argv[1]); s.sendall(b\'{"op": "echo"}\\n\'); print(s.recv(1000).decode())'
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert "only root may ask" in json.loads(ran.stdout)["error"]["message"]


def test_usage_errors_have_their_exit_code(client: ControlClient) -> None:
    with pytest.raises(ControlError, match="unknown operation") as caught:
        client.call("nonsense")
    assert caught.value.exit_code == UsageError.exit_code
