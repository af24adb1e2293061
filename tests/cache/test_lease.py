"""Who has a file open for writing? Other processes do the opening."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.cache.lease import LeaseUnsupported, writer_open

Spawn = Callable[[str, str], "Other"]


class Other:
    """A process that takes the lines of its script one by one, as they are asked for."""

    def __init__(self, setup: str, path: str) -> None:
        script = (
            "import mmap, os, sys\npath = sys.argv[1]\n"
            "for line in sys.stdin:\n    exec(line, globals())\n    print('ok', flush=True)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.do(setup)

    def do(self, line: str) -> None:
        stdin, stdout = self._pipes()
        stdin.write(line + "\n")
        stdin.flush()
        assert stdout.readline() == "ok\n"

    def end(self) -> None:
        for pipe in self._pipes():
            pipe.close()
        self._process.wait(10)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


@pytest.fixture
def file(device: CacheDevice) -> str:
    os.close(device.create(1))
    os.truncate(device.path(1), 4096)
    return device.path(1)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    others: list[Other] = []

    def make(setup: str, path: str) -> Other:
        others.append(Other(setup, path))
        return others[-1]

    yield make
    for other in others:
        other.end()


def test_a_closed_file_has_no_writer(device: CacheDevice, file: str) -> None:
    assert not device.writer_open(1)


def test_readers_are_not_writers(file: str, spawn: Spawn) -> None:
    spawn("fd = os.open(path, os.O_RDONLY)", file)
    assert not writer_open(file)


@pytest.mark.parametrize("flags", ["os.O_WRONLY", "os.O_RDWR", "os.O_WRONLY | os.O_APPEND"])
def test_a_writer_is_seen_until_it_closes(file: str, spawn: Spawn, flags: str) -> None:
    other = spawn(f"fd = os.open(path, {flags})", file)
    assert writer_open(file)
    other.do("os.close(fd)")
    assert not writer_open(file)


def test_a_duplicated_descriptor_keeps_it_open(file: str, spawn: Spawn) -> None:
    other = spawn("fd = os.open(path, os.O_WRONLY); copy = os.dup(fd); os.close(fd)", file)
    assert writer_open(file)
    other.do("os.close(copy)")
    assert not writer_open(file)


def test_a_mapping_keeps_it_open_after_close(file: str, spawn: Spawn) -> None:
    other = spawn(
        "fd = os.open(path, os.O_RDWR); m = mmap.mmap(fd, 4096); os.close(fd); m[0] = 7", file
    )
    assert writer_open(file)
    other.do("m.close()")
    assert not writer_open(file)


def test_a_forked_child_counts(file: str, spawn: Spawn) -> None:
    child = "os.close(w), os.read(r, 1), os._exit(0)"
    other = spawn(
        "fd = os.open(path, os.O_WRONLY); r, w = os.pipe();"
        f" pid = os.fork(); pid or ({child}); os.close(fd)",
        file,
    )
    assert writer_open(file)
    other.do("os.close(w); os.waitpid(pid, 0)")
    assert not writer_open(file)


def test_an_unlinked_path_is_an_error(device: CacheDevice) -> None:
    with pytest.raises(FileNotFoundError):
        device.writer_open(99)


def test_a_writer_that_comes_while_asking_ends_nothing(file: str, spawn: Spawn) -> None:
    """Breaking a lease signals its holder: the default signal would end the asking process."""
    prober = spawn("from cachefs.cache.lease import writer_open", file)
    end = time.monotonic() + 1.0
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys, time\nend = time.monotonic() + 0.8\n"
            "while time.monotonic() < end:\n"
            "    os.close(os.open(sys.argv[1], os.O_WRONLY))\n",
            file,
        ]
    )
    while time.monotonic() < end:
        prober.do("seen = [writer_open(path) for _ in range(500)]")
    assert writer.wait(10) == 0
    prober.do("assert True")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
def test_filesystems_without_leases_say_so(
    file: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> object:
        if command == fcntl.F_SETLEASE:
            raise OSError(number, os.strerror(number))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(LeaseUnsupported) as caught:
        writer_open(file)
    assert caught.value.errno == number


def test_no_descriptor_is_left_behind(device: CacheDevice, file: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = device.open(1, os.O_WRONLY)
    for _ in range(20):
        assert device.writer_open(1)
    os.close(fd)
    for _ in range(20):
        assert not device.writer_open(1)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_another_filesystem_type_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(b"abc")
    assert not writer_open(path)
