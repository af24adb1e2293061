"""Client processes: the programs that use the mount, never the test's own process.

`Client.run` runs one self-contained function (or a piece of source) in a fresh process with a time
limit. `Actor` drives a long-lived process that holds descriptors (see `actor.py`).
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ACTOR = Path(__file__).with_name("actor.py")

_PRELUDE = """
from __future__ import annotations
import base64, ctypes, errno, fcntl, hashlib, json, mmap, os, random, shutil, signal, stat
import struct, subprocess, sys, tempfile, threading, time
from pathlib import Path

def _plain(value):
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"__bytes__": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value
"""

_RUNNER = """
def _main():
    target = os.fdopen({fd}, "w")
    try:
        reply = {{"ok": _plain({call})}}
    except OSError as error:
        reply = {{"errno": error.errno, "text": str(error)}}
    except BaseException as error:
        import traceback
        reply = {{"error": "".join(traceback.format_exception(error))}}
    target.write(json.dumps(reply))
    target.close()

_main()
"""


class ClientError(AssertionError):
    """The client's code failed in a way that is not an errno."""


class ClientTimeout(AssertionError):
    """The client did not finish in time; it was killed."""


def _unplain(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__bytes__"}:
            import base64

            return base64.b64decode(value["__bytes__"])
        return {k: _unplain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unplain(v) for v in value]
    return value


def source_of(function: Callable[..., Any]) -> str:
    """The text of a function, at the left margin."""
    return textwrap.dedent(inspect.getsource(function))


class Running:
    """A client that was started and not yet waited for."""

    def __init__(self, process: subprocess.Popen[bytes], results: int, what: str) -> None:
        self.process = process
        self.pid = process.pid
        self._results = results
        self._what = what

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal and reap it."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(10)
        self._close()

    def _close(self) -> None:
        if self._results >= 0:
            os.close(self._results)
            self._results = -1

    def result(self, timeout: float = 30.0) -> Any:
        """What the function returned; its OSError is raised here."""
        deadline = time.monotonic() + timeout
        text = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._results], [], [], left)[0]:
                self.process.kill()
                self._close()
                raise ClientTimeout(f"{self._what}: no answer within {timeout} s")
            block = os.read(self._results, 1 << 16)
            if not block:
                break
            text += block
        self._close()
        self.process.wait(10)
        if not text:
            raise ClientError(f"{self._what}: ended with {self.process.returncode}, no answer")
        reply = json.loads(text)
        if "ok" in reply:
            return _unplain(reply["ok"])
        if "errno" in reply:
            raise OSError(reply["errno"], f"{reply['text']} (in a client process)")
        raise ClientError(f"{self._what}: {reply['error']}")


class Client:
    """Starts client processes and ends those that are left at the end of the test."""

    def __init__(self, python: str = sys.executable, env: dict[str, str] | None = None) -> None:
        self.python = python
        self._env = env
        self._actors: list[Actor] = []
        self._running: list[Running] = []

    def start(
        self, code: Callable[..., Any] | str, *args: Any, helpers: Sequence[Callable[..., Any]] = ()
    ) -> Running:
        """Start a function (or source that sets `result`) in a process of its own."""
        read_end, write_end = os.pipe()
        program = self._program(code, args, helpers, write_end)
        name = code if isinstance(code, str) else code.__name__
        process = subprocess.Popen(
            [self.python, "-"],
            pass_fds=[write_end],
            stdin=subprocess.PIPE,
            env=self._env,
            cwd="/",
        )
        os.close(write_end)
        assert process.stdin is not None
        process.stdin.write(program.encode())
        process.stdin.close()
        running = Running(process, read_end, name[:60])
        self._running.append(running)
        return running

    def run(
        self,
        code: Callable[..., Any] | str,
        *args: Any,
        timeout: float = 30.0,
        helpers: Sequence[Callable[..., Any]] = (),
    ) -> Any:
        """Run it and give back what it returned; raises its OSError, ClientError, ClientTimeout."""
        return self.start(code, *args, helpers=helpers).result(timeout)

    def actor(self, root: os.PathLike[str] | str) -> Actor:
        """A process that carries out single operations below `root`."""
        actor = Actor(root, python=self.python)
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        """End everything that was started here."""
        for actor in self._actors:
            actor.close()
        for running in self._running:
            running.kill()

    @staticmethod
    def _program(
        code: Callable[..., Any] | str,
        args: tuple[Any, ...],
        helpers: Sequence[Callable[..., Any]],
        fd: int,
    ) -> str:
        shown = ", ".join(repr(str(a) if isinstance(a, Path) else a) for a in args)
        parts = [_PRELUDE, *(source_of(h) for h in helpers)]
        if isinstance(code, str):
            body = textwrap.indent(textwrap.dedent(code), "    ")
            parts.append(f"def _snippet():\n    result = None\n{body}\n    return result\n")
            call = "_snippet()"
        else:
            parts.append(source_of(code))
            call = f"{code.__name__}({shown})"
        parts.append(_RUNNER.format(fd=fd, call=call))
        return "\n".join(parts)


class ActorError(AssertionError):
    """The actor died, hung, or was told nonsense."""


class Actor:
    """One client process; `actor("open", 0, "name", "RDWR|CREAT")` returns or raises OSError."""

    def __init__(
        self, root: os.PathLike[str] | str, *, python: str = sys.executable, timeout: float = 30.0
    ) -> None:
        self._timeout = timeout
        self._buffer = b""
        self._process = subprocess.Popen(
            [python, "-S", str(ACTOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        )
        self.pid = self._process.pid
        self("reset", str(root))

    def send(self, *command: Any) -> None:
        """Send a command without waiting for its answer (see `receive`)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ActorError(f"actor died before {command}") from None

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The raw answer to the oldest unanswered command."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        deadline = time.monotonic() + (timeout or self._timeout)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise ActorError(f"actor {self.pid} gave no answer")
            block = os.read(stream, 1 << 16)
            if not block:
                raise ActorError(f"actor died ({self._process.wait(5)})")
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "bug" in reply:
            raise ActorError(reply["bug"])
        return reply

    def ask(self, *command: Any, timeout: float | None = None) -> dict[str, Any]:
        """One command and its raw answer."""
        self.send(*command)
        return self.receive(timeout)

    def __call__(self, *command: Any) -> Any:
        reply = self.ask(*command)
        if "errno" in reply:
            number = getattr(errno, reply["errno"])
            raise OSError(number, f"{os.strerror(number)}: {command}")
        return reply["ok"]

    def kill(self) -> None:
        """SIGKILL: its locks and descriptors go with it."""
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        """End it the ordinary way (it closes what it has open), or by force."""
        if self._process.stdin and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout:
            self._process.stdout.close()


def program(*words: os.PathLike[str] | str, timeout: float = 50.0, **options: Any) -> str:
    """Run a real program; its output. AssertionError with all it said when it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        text=True,
        errors="replace",
        check=False,
        **{"cwd": "/", **options},
    )
    shown = " ".join(map(str, words))
    assert done.returncode == 0, f"{shown}: exit code {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout
