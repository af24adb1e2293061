"""A file that the cache cannot hold and that may not be streamed: its writer is told, what was
written stays, others go on. For those that may see `test_streaming`."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import MountFactory, poll

MIB = 1 << 20
AWAY = "full|space|room|store|transient|retry|degraded|reach|late"
SMALL = {"cache.size": "64MiB", "cache.meta_reserve": "4MiB"}


def write_until_full(path: str) -> list[int]:
    """[bytes that write(2) took, errno that ended it]; each MiB holds its number."""
    written = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while written < 400 << 20:
            written += os.write(fd, bytes([written >> 20]) * (1 << 20))
    except OSError as error:
        return [written, error.errno or 0]
    finally:
        os.close(fd)
    return [written, 0]


def is_whole(body: bytes, written: int) -> bool:
    """All that a write returned for is there; of the one that failed, perhaps a part."""
    expected = b"".join(bytes([n]) * MIB for n in range(written // MIB + 1))
    return written <= len(body) and body == expected[: len(body)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("full", "name"), [("wait", "logs/huge"), ("enospc", "huge.bin")])
@pytest.mark.parametrize("lane", ["tracked"])
def test_it_does_not_wait_for_ever(
    mounted: MountFactory, bucket: Any, client: Client, full: str, name: str
) -> None:
    """In the tracked lane: nothing but the file itself is in the way, so ENOSPC for a log, and for
    any file where nobody is to wait."""
    mount = mounted(bucket, options={**SMALL, "cache.full": full}, allow=("full|space|room",))
    (mount.path / "logs").mkdir()
    (mount.path / "before.bin").write_bytes(b"b" * 3 * MIB)
    written, number = client.run(write_until_full, mount.path / name, timeout=90)
    assert number == 28
    assert 40 * MIB <= written <= 64 * MIB
    assert mount.status()["cache"]["used_bytes"] <= 65 * MIB
    if full == "enospc":  # Nobody waits for room here, so the test does.
        mount.wait()
    (mount.path / "after.bin").write_bytes(b"a" * MIB)
    mount.wait()
    assert is_whole(bucket.get(name), written)
    assert is_whole((mount.path / name).read_bytes(), written)
    assert bucket.get("before.bin") == b"b" * 3 * MIB
    assert bucket.get("after.bin") == b"a" * MIB


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["tracked"])
def test_a_log_that_is_open_does_not_make_it_wait_for_ever(
    mounted: MountFactory, bucket: Any, client: Client
) -> None:
    """As an event file beside a save: nobody knows when it will be closed."""
    mount = mounted(bucket, options=SMALL, allow=("full|space|room",))
    (mount.path / "logs").mkdir()
    with open(mount.path / "events.log", "wb", buffering=0) as log:
        log.write(b"begun\n")
        written, number = client.run(write_until_full, mount.path / "logs/huge", timeout=90)
        assert number == 28
        log.write(b"ended\n")
    mount.wait()
    assert bucket.get("events.log") == b"begun\nended\n"
    assert is_whole(bucket.get("logs/huge"), written)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("lane", ["tracked"])
def test_a_writer_that_waits(mounted: MountFactory, bucket: Any, link: Any, client: Client) -> None:
    """For a store that is away: it is shown, it can be killed, and it is told in the end."""
    options = {**SMALL, "cache.full_timeout": "15s"}
    mount = mounted(bucket, endpoint=link.endpoint, options=options, allow=(AWAY,))
    assert os.listdir(mount.path) == []
    link.cut()
    (mount.path / "before.bin").write_bytes(b"b" * 40 * MIB)
    arguments = ["if=/dev/zero", f"of={mount.path}/killed.bin", "bs=1M", "count=100"]
    doomed = subprocess.Popen(["dd", *arguments], stderr=subprocess.DEVNULL)
    poll(lambda: mount.status()["cache"]["waiting_writers"] == 1)
    doomed.kill()
    assert doomed.wait(10) == -signal.SIGKILL
    poll(lambda: mount.status()["cache"]["waiting_writers"] == 0)
    assert client.run(write_until_full, mount.path / "told.bin", timeout=60)[1] == 28
    link.mend()
    mount.wait(timeout=60)
    assert bucket.get("before.bin") == b"b" * 40 * MIB
    assert set(bucket.get("killed.bin")) == {0}


@pytest.fixture
def small_disk(tmp_path: Path, after_mounts: ExitStack) -> Path:
    """A filesystem of 128 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128M", "none", place], check=True)
    after_mounts.callback(lambda: subprocess.run(["umount", "-l", place], check=True))
    return place


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["passthrough"])
def test_a_passthrough_writer_that_outgrows_what_it_reserved(
    mounted: MountFactory, bucket: Any, client: Client, small_disk: Path
) -> None:
    """Counted, told, and at the end of the disk ENOSPC; the file holds what was written."""
    mount = mounted(
        bucket,
        cache_dirs=[small_disk / "cache"],
        options={**SMALL, "flush.settle": "3s"},
        allow=("outgrew|full|space|room|recorded|failed|anew",),
    )
    (mount.path / "other.bin").write_bytes(b"o" * 5 * MIB)
    written, number = client.run(write_until_full, mount.path / "huge.bin", timeout=90)
    assert number == 28
    assert written > 64 * MIB
    poll(lambda: mount.metric("cachefs_overruns_total") == 1, 10)
    assert "writer outgrew its reservation" in mount.log
    assert (mount.path / "other.bin").read_bytes() == b"o" * 5 * MIB
    mount.wait()
    assert is_whole(bucket.get("huge.bin"), written)
    poll(lambda: mount.status()["cache"]["used_bytes"] <= 64 * MIB, 20)
    (mount.path / "after.bin").write_bytes(b"a" * MIB)
    mount.wait()
    assert bucket.get("after.bin") == b"a" * MIB
