"""The command line without starting Python for every command.

Most of a mount's processor time is the import of libraries, and the tests mount hundreds of times.
So a process that has imported them forks for each command, and what the command starts (supervisor,
daemon, movers) is forked as well (`tests.support.forking`); what runs is the same code, in a
process of its own with its own environment, session and descriptors. Starting the real thing is
tested in tests/cli, tests/demo and tests/lifecycle, in long runs and where speed is measured; with
CACHEFS_TEST_STARTS=real everywhere.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from tests.support import forking

_PRELOADED = ("launch", "mount", "output", "resolve", "status", "upgrade", "wait")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Server:
    """The process that forks, started when it is first needed."""

    def __init__(self) -> None:
        self._name = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def connect(self, env: dict[str, str]) -> socket.socket:
        """A connection for one command."""
        if self._process is None or self._owner != os.getpid():
            self._start(env)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(_address(self._name))
        return link

    def _start(self, env: dict[str, str]) -> None:
        self._owner = os.getpid()
        env = {name: value for name, value in env.items() if name not in forking.early(env)}
        self._name = f"cachefs-commands-{self._owner}-{secrets.token_hex(8)}"
        command = [sys.executable, "-m", "tests.support.commands", self._name, forking.PADDING]
        self._process = subprocess.Popen(
            command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        atexit.register(self.close)

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            self._process = None


def _address(name: str) -> str:
    """Abstract: it goes with the process, however that ends."""
    return f"\0{name}"


_server = Server()


def run(
    words: Sequence[str], env: dict[str, str], out: IO[bytes], err: IO[bytes], timeout: float
) -> int:
    """Run `cachefs WORDS`; returns the exit code (negative: the signal), -9 after `timeout`."""
    with _server.connect(env) as link:
        request = json.dumps({"words": list(words), "env": env}).encode()
        socket.send_fds(link, [len(request).to_bytes(4, "big")], [out.fileno(), err.fileno()])
        link.sendall(request)
        pid = int.from_bytes(_exactly(link, 4), "big")
        link.settimeout(timeout)
        try:
            return int.from_bytes(_exactly(link, 4), "big", signed=True)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return -signal.SIGKILL


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        block = link.recv(count - len(data))
        if not block:
            raise ConnectionResetError("the process that runs commands hung up")
        data += block
    return data


# ---- in the server -------------------------------------------------------------------------------


def serve(name: str) -> None:
    """Fork for each connection, for ever."""
    import ctypes
    import importlib

    for module in _PRELOADED:
        importlib.import_module(f"cachefs.cli.{module}")
    forking.preload()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(_address(name))
        listener.listen(64)
        os.write(1, b"ready\n")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
        while True:
            link, _ = listener.accept()
            with link:
                if os.fork() == 0:
                    listener.close()
                    _attend(link)


def _attend(link: socket.socket) -> None:
    """One connection: a command, whose end is waited for. Does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        length, fds, _, _ = socket.recv_fds(link, 4, 2)
        told = json.loads(_exactly(link, int.from_bytes(length, "big")))
        pid = os.fork()
        if pid == 0:
            link.close()
            _become(told, fds)
        link.sendall(pid.to_bytes(4, "big"))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        link.sendall(code.to_bytes(4, "big", signed=True))
    except OSError:
        pass  # The test gave up.
    finally:
        os._exit(0)


def _become(told: dict[str, Any], fds: Sequence[int]) -> None:
    """Be the command. Does not return."""

    def main() -> int:
        os.setsid()
        for number, fd in enumerate(fds, start=1):
            os.dup2(fd, number)
            os.close(fd)
        forking.take_environment(told["env"])
        sys.argv = ["cachefs", *told["words"]]
        from cachefs.cli import main as command

        if os.environ.get("CACHEFS_TEST_STARTS") != "real":
            forking.install()
        return command()

    forking.end_as(main)


if __name__ == "__main__":
    serve(sys.argv[1])
