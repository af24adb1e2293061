"""Asking: status, ls, wait, flush, virtual attributes, metrics."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
import urllib.request
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.mounts import Failed, Mount, MountFactory, poll

pytestmark = pytest.mark.either_lane

PROMISED_METRICS = {
    "cachefs_dirty_bytes",
    "cachefs_dirty_files",
    "cachefs_oldest_dirty_seconds",
    "cachefs_fuse_request_seconds",
    "cachefs_write_bytes_total",
    "cachefs_upload_bytes_total",
    "cachefs_store_requests_total",
    "cachefs_throttled_total",
    "cachefs_pacer_rate",
    "cachefs_cache_used_bytes",
    "cachefs_evicted_bytes_total",
    "cachefs_takeovers_total",
}
HOLD = {"flush.settle": "10s"}


def test_status_of_a_mount(mounted: MountFactory, bucket: Any) -> None:
    """`status --json` has what the contract names; `status` for people mentions the store."""
    mount = mounted(bucket, options=HOLD)
    (mount.path / "f").write_bytes(b"x" * 5000)
    done = mount.cli("status", "--json", mount.path)
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["mountpoint"] == str(mount.path)
    assert told["store"].startswith(bucket.url)
    assert told["pid"] == mount.daemon_pid
    assert told["uptime_seconds"] >= 0
    assert told["lanes"]["passthrough"] is (mount.lane == "passthrough")
    assert told["lanes"]["reason"] or told["lanes"]["passthrough"]
    assert (told["dirty_files"], told["dirty_bytes"]) == (1, 5000)
    assert 0 <= told["oldest_dirty_seconds"] < 30
    assert told["uploading_bytes"] == 0
    assert told["stalled_files"] == 0
    assert told["cache"]["used_bytes"] > 0
    assert told["cache"]["size_bytes"] == 2 << 30
    assert [d["path"] for d in told["cache"]["devices"]] == [str(mount.cache_dirs[0])]
    assert told["takeovers"] == 0
    assert isinstance(told["checkpoints"], list)
    assert isinstance(told["node"], str)
    human = mount.cli("status", mount.path)
    assert human.returncode == 0
    assert bucket.url in human.stdout
    assert "1 file" in human.stdout


def test_status_of_a_path_and_ls(mounted: MountFactory, bucket: Any) -> None:
    mount = mounted(bucket, options=HOLD)
    (mount.path / "d").mkdir()
    (mount.path / "d" / "f").write_bytes(b"x" * 5000)
    told = json.loads(mount.cli("status", "--json", mount.path / "d" / "f").stdout)
    assert told["state"] == "dirty"
    listed = json.loads(mount.cli("ls", "--json", mount.path / "d").stdout)
    assert [entry["name"] for entry in listed["entries"]] == ["f"]
    assert listed["entries"][0]["state"] == "dirty"
    human = mount.cli("ls", mount.path / "d")
    assert re.search(r"dirty.*\bf\b", human.stdout)
    assert mount.cli("ls", mount.path / "missing").returncode == 1


def test_states_as_attributes(mounted: MountFactory, bucket: Any) -> None:
    """user.cachefs.state follows a file from open to durable; not listed; cannot be set."""
    mount = mounted(bucket, options={"flush.settle": "1s"})
    path = mount.path / "f"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"data")
    assert mount.xattr("state", "f") == "open"
    os.close(fd)
    assert mount.xattr("state", "f") == "dirty"
    assert mount.xattr("survives", "f") == "process"
    mount.wait()
    assert mount.xattr("state", "f") == "durable"
    assert mount.xattr("survives", "f") == "site"
    assert mount.xattr("url", "f") == f"{bucket.url}/f"
    head = bucket.client.head_object(Bucket=bucket.name, Key="runs/f")
    assert mount.xattr("etag", "f").strip('"') == head["ETag"].strip('"')
    assert os.listxattr(path) == []
    with pytest.raises(OSError) as caught:
        mount.xattr("nonsense", "f")
    assert caught.value.errno == errno.ENODATA
    with pytest.raises(OSError) as caught:
        os.setxattr(path, "user.cachefs.state", b"durable")
    assert caught.value.errno in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP)


def test_state_of_remote_files(mounted: MountFactory, bucket: Any) -> None:
    bucket.put("r", b"remote")
    mount = mounted(bucket)
    assert mount.xattr("state", "r") == "remote"
    assert (mount.path / "r").read_bytes() == b"remote"
    assert mount.xattr("survives", "r") == "site"


def test_disk_cache_survives_a_reboot(mounted: MountFactory, dir_store: Any) -> None:
    mount = mounted(dir_store, cache="disk", options=HOLD)
    fd = os.open(mount.path / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x")
    os.close(fd)
    assert mount.xattr("survives", "f") == "process"  # the kernel still has it in memory only
    fd = os.open(mount.path / "f", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert mount.xattr("survives", "f") == "reboot"
    assert mount.cli("wait", mount.path, "--survives", "reboot").returncode == 0
    assert mount.xattr("state", "f") == "dirty"


def test_lane_attribute(mounted: MountFactory, dir_store: Any) -> None:
    """Large new files are written in the lane that was asked for."""
    mount = mounted(dir_store)
    fd = os.open(mount.path / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, bytes(1 << 20))
    assert mount.xattr("lane", "f") == mount.lane
    os.close(fd)


def test_wait_for_everything_closed_before(mounted: MountFactory, bucket: Any) -> None:
    """`wait` skips the settle delay, covers trees, several paths and single files."""
    mount = mounted(bucket, options=HOLD)
    (mount.path / "d" / "e").mkdir(parents=True)
    for name in ("d/a", "d/e/b", "c"):
        (mount.path / name).write_bytes(b"x")
    began = time.monotonic()
    assert mount.cli("wait", mount.path / "d", mount.path / "c").returncode == 0
    assert time.monotonic() - began < 8
    assert bucket.keys() == ["c", "d/a", "d/e/b"]
    assert mount.cli("wait", mount.path / "d" / "a").returncode == 0


def test_flush_starts_uploads_now(mounted: MountFactory, bucket: Any) -> None:
    mount = mounted(bucket, options=HOLD)
    (mount.path / "f").write_bytes(b"x")
    assert mount.cli("flush", mount.path / "f").returncode == 0
    poll(lambda: bucket.keys() == ["f"], 8)


def test_wait_for_an_open_file(mounted: MountFactory, bucket: Any) -> None:
    """A file still open for writing is waited for."""
    mount = mounted(bucket)
    fd = os.open(mount.path / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"first")
    assert mount.cli("wait", mount.path / "f", "--timeout", "0.7").returncode == 4
    waited: list[int] = []
    thread = threading.Thread(
        target=lambda: waited.append(mount.cli("wait", mount.path / "f").returncode)
    )
    thread.start()
    time.sleep(1.5)
    assert waited == []
    os.write(fd, b" second")
    os.close(fd)
    thread.join(20)
    assert waited == [0]
    assert bucket.get("f") == b"first second"


def test_wait_exit_codes(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """0 reached, 1 missing, 2 bad usage, 4 timeout, 5 held under a temporary name."""
    mount = mounted(bucket, endpoint=link.endpoint, options=HOLD)
    assert mount.cli("wait", mount.path).returncode == 0
    assert mount.cli("wait", mount.path / "missing").returncode == 1
    assert mount.cli("wait", mount.path, "--survives", "forever").returncode == 2
    assert mount.cli("wait", mount.path, "--timeout", "never").returncode == 2
    link.delay = 5
    (mount.path / "slow").write_bytes(b"x")
    began = time.monotonic()
    assert mount.cli("wait", mount.path / "slow", "--timeout", "1").returncode == 4
    assert time.monotonic() - began < 5
    link.delay = 0
    (mount.path / "model.bin.tmp").write_bytes(b"unfinished")
    done = mount.cli("wait", mount.path / "model.bin.tmp")
    assert done.returncode == 5
    assert "model.bin.tmp" in done.stderr
    mount.wait(mount.path / "slow")
    assert bucket.keys() == ["slow"]
    os.rename(mount.path / "model.bin.tmp", mount.path / "model.bin")
    assert mount.cli("wait", mount.path).returncode == 0
    assert bucket.keys() == ["model.bin", "slow"]


def test_wait_is_told_of_a_conflict(mounted: MountFactory, bucket: Any) -> None:
    """Another client made the same key: both versions are kept, ours is conflicted, wait says 5."""
    mount = mounted(bucket, options=HOLD, allow=("conflict",))
    assert os.listdir(mount.path) == []
    (mount.path / "f").write_bytes(b"ours")
    bucket.put("f", b"theirs")
    done = mount.cli("wait", mount.path / "f", "--timeout", "20")
    assert done.returncode == 5, done.stderr
    assert "f" in done.stderr
    assert bucket.get("f") == b"theirs"
    copies = [key for key in bucket.keys() if key.startswith("f.conflict-")]  # noqa: SIM118
    assert len(copies) == 1
    assert bucket.get(copies[0]) == b"ours"
    assert mount.xattr("state", "f") == "conflicted"
    assert mount.xattr("error", "f")


def test_conflict_of_an_edit(mounted: MountFactory, bucket: Any) -> None:
    """The object changed after we read it and before our edit arrived: If-Match tells."""
    bucket.put("f", b"original")
    mount = mounted(bucket, options=HOLD, allow=("conflict",))
    with open(mount.path / "f", "ab") as file:
        file.write(b" + ours")
    bucket.put("f", b"theirs")
    assert mount.cli("wait", mount.path / "f", "--timeout", "20").returncode == 5
    assert bucket.get("f") == b"theirs"
    copies = [key for key in bucket.keys() if key.startswith("f.conflict-")]  # noqa: SIM118
    assert [bucket.get(key) for key in copies] == [b"original + ours"]


def test_other_files_flow_past_a_conflict(mounted: MountFactory, bucket: Any) -> None:
    mount = mounted(bucket, options=HOLD, allow=("conflict",))
    os.listdir(mount.path)
    (mount.path / "a.bin").write_bytes(b"ours")
    bucket.put("a.bin", b"theirs")
    (mount.path / "b.bin").write_bytes(b"fine")
    mount.wait(mount.path / "b.bin")
    assert bucket.get("b.bin") == b"fine"


def _scrape(mount: Mount) -> dict[str, float]:
    """Samples by name with labels, as Prometheus text gives them."""
    address = mount.status()["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        text = reply.read().decode()
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def test_metrics(mounted: MountFactory, bucket: Any) -> None:
    """Every promised name; gauges rise with dirty data and fall; bytes and requests are counted."""
    mount = mounted(bucket, options=HOLD, cache="disk")  # nothing is synced where all is in RAM
    size = 3 << 20
    (mount.path / "f").write_bytes(bytes(size))
    before = _scrape(mount)
    names = {re.split(r"[{]", name)[0] for name in before}
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert bases >= PROMISED_METRICS, PROMISED_METRICS - bases
    assert all(name.startswith("cachefs_") for name in names)
    assert before["cachefs_dirty_bytes"] == size
    assert before["cachefs_dirty_files"] == 1
    assert before["cachefs_oldest_dirty_seconds"] > 0
    poll(lambda: _sum(_scrape(mount), "cachefs_write_bytes_total") == size, 5)
    assert _scrape(mount)[f'cachefs_write_bytes_total{{lane="{mount.lane}"}}'] == size
    mount.wait()
    after = _scrape(mount)
    assert after["cachefs_dirty_bytes"] == after["cachefs_dirty_files"] == 0
    assert after["cachefs_upload_bytes_total"] >= size
    assert _sum(after, "cachefs_store_requests_total") > 0
    assert _sum(after, "cachefs_cache_used_bytes") >= size
    assert any('op="create"' in name or 'op="open"' in name for name in after)
    assert after["cachefs_fuse_bugs_total"] == 0
    assert after["cachefs_durable_lag_seconds_count"] == 1
    assert 0 < after["cachefs_durable_lag_seconds_sum"] < 60
    assert after['cachefs_db_commit_seconds_count{mode="normal"}'] > 0
    with open(mount.path / "f", "r+b") as file:  # in the tracked lane, whatever the mount's
        os.fsync(file)
        assert file.read(1 << 20) == bytes(1 << 20)
    synced = _scrape(mount)
    assert synced['cachefs_db_commit_seconds_count{mode="full"}'] > 0
    assert synced["cachefs_read_bytes_total"] >= 1 << 20


def _sum(samples: dict[str, float], base: str) -> float:
    return sum(v for name, v in samples.items() if name.split("{")[0] == base)


def test_metrics_off(mounted: MountFactory, dir_store: Any) -> None:
    mount = mounted(dir_store, options={"metrics.listen": "off"})
    assert not mount.status()["metrics"]


def test_failed_requests_are_counted(mounted: MountFactory, dir_store: Any) -> None:
    mount = mounted(dir_store)
    (mount.path / "d").mkdir()
    (mount.path / "d" / "x").touch()
    with pytest.raises(OSError):
        (mount.path / "d").rmdir()
    samples = _scrape(mount)
    assert any("ENOTEMPTY" in name and value for name, value in samples.items())


def test_control_socket_is_private(mounted: MountFactory, dir_store: Any, client: Client) -> None:
    """Another user cannot ask the daemon to unmount."""
    mount = mounted(dir_store)

    def intrude(path: str) -> str:
        import socket

        os.setgid(12345)
        os.setuid(12345)
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(5)
            link.connect(path)
            link.sendall(b'{"op": "unmount", "args": {}}\n')
            return link.recv(1000).decode()

    try:
        told = client.run(intrude, mount.socket)
    except OSError as error:
        assert error.errno in (errno.EACCES, errno.EPERM, errno.ECONNRESET, errno.EPIPE)
    else:
        assert "result" not in told
    assert mount.mounted
    assert mount.status()


def test_unknown_request(mounted: MountFactory, dir_store: Any) -> None:
    mount = mounted(dir_store)
    with pytest.raises(Failed):
        mount.ask("no-such-op")
    assert mount.status()


def test_checkpoints_in_status(mounted: MountFactory, bucket: Any) -> None:
    """A directory with a checkpoint's name shows up with its files."""
    mount = mounted(bucket)
    (mount.path / "checkpoint-10").mkdir()
    (mount.path / "checkpoint-10" / "model.safetensors").write_bytes(bytes(1000))
    mount.wait()
    told = mount.status()["checkpoints"]
    assert [c for c in told if "checkpoint-10" in json.dumps(c)]
