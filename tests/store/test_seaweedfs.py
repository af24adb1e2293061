"""The embedded store: free ports, content that survives, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachefs.demo.seaweedfs import SeaweedFS
from cachefs.errors import CachefsError


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_content_and_port_survive_a_crash_and_a_restart(ram_dir: Path) -> None:
    with SeaweedFS(ram_dir).start("ckpt") as store:
        store.client().put_object(Bucket="ckpt", Key="k", Body=b"content")
        endpoint, pid = store.endpoint, store.pid
        store.stop(grace=False)
        assert gone(pid)
        store.start("ckpt")
        assert store.endpoint == endpoint
        found = store.client().get_object(Bucket="ckpt", Key="k")["Body"].read()
        assert found == b"content"
        pid = store.pid
    assert gone(pid)
    assert left_behind(*store.ports.values()) == []


def left_behind(*ports: int) -> list[Path]:
    """Socket files of a server with these ports."""
    return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_owner(ram_dir: Path, number: signal.Signals) -> None:
    code = (
        "import sys, time; from cachefs.demo.seaweedfs import SeaweedFS\n"
        "store = SeaweedFS(sys.argv[1]).start()\n"
        "print(store.pid, *store.ports.values(), flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(ram_dir)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, *ports = map(int, owner.stdout.readline().split())
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    assert gone(pid)
    deadline = time.monotonic() + 2
    while left_behind(*ports) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind(*ports) == []


def test_a_missing_program_is_said_to_be_missing(
    ram_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CachefsError, match="not installed") as caught:
        SeaweedFS(ram_dir).start()
    assert "pip install" in caught.value.hint


def test_a_missing_bucket_is_an_error_as_everywhere_else(ram_dir: Path) -> None:
    with SeaweedFS(ram_dir).start() as store:
        client = store.client()
        with pytest.raises(client.exceptions.NoSuchBucket):
            client.put_object(Bucket="missing", Key="k", Body=b"")
