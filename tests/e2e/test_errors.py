"""What can be wrong at the start: each has its message and exit code, and leaves nothing."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fusectl
from tests.support.mounts import CHECKOUT, Mount, MountFactory, cachefs, processes, run_file

pytestmark = pytest.mark.either_lane

SECRET = "Wr0ngS3cretWr0ngS3cretWr0ngS3cret"


@pytest.fixture
def refused(make_mount: Any, after_mounts: Any) -> Iterator[Any]:
    """Try to mount; check that it fails in one line with that code, and that nothing is left."""

    made: list[Mount] = []

    def attempt(mount: Mount, code: int, *patterns: str) -> str:
        made.append(mount)
        before, old = processes(mount), fusectl.entry_of(mount.path)
        done = mount.cli(*mount.command(), timeout=40)
        told = done.stderr.strip()
        assert done.returncode == code, (done.returncode, done.stdout, told)
        assert "\n" not in told, f"not one line:\n{told}"
        assert "Traceback" not in done.stdout + told
        for pattern in patterns:
            assert re.search(pattern, told, re.IGNORECASE), f"{pattern!r} not in {told!r}"
        assert fusectl.entry_of(mount.path) == old, "something was mounted"
        assert processes(mount) == before, "processes are left behind"
        return told

    yield attempt
    for mount in made:
        if _answers(mount):  # it was not refused, as it should have been
            mount.destroy()


def _prepared(make_mount: Any, store: Any, **kinds: Any) -> Mount:
    mount, _ = make_mount(store, lane="tracked", **kinds)
    mount.path.mkdir(parents=True)
    return mount  # type: ignore[no-any-return]


def test_store_down_with_an_empty_cache(
    refused: Any, make_mount: Any, bucket: Any, dir_store: Any, mounted: MountFactory
) -> None:
    """Nobody listens at the endpoint: exit 1; with store.require=false it comes up, and what is
    written then goes to that store and to no other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"http://127.0.0.1:{listener.getsockname()[1]}"
    mount = _prepared(make_mount, bucket, endpoint=nowhere)
    refused(mount, 1, r"127\.0\.0\.1", r"reach|connect|refused")
    anyway = mounted(
        bucket, endpoint=nowhere, options={"store.require": "false"}, allow=("store|reach|degr",)
    )
    (anyway.path / "f").write_bytes(b"kept")
    assert anyway.status()["degraded"]
    assert anyway.status()["dirty_files"] == 1
    assert anyway.unmount(drain_timeout=0.5) == 3
    anyway.wait_gone()
    other = _prepared(make_mount, dir_store, cache_dirs=anyway.cache_dirs)
    refused(other, 1, rf"belongs to {re.escape(bucket.url)}, not to {re.escape(dir_store.url)}")
    anyway.arguments = ["--endpoint-url", bucket.endpoint]
    anyway.start()
    anyway.wait()
    assert bucket.get("f") == b"kept"


def test_wrong_credentials(refused: Any, make_mount: Any, bucket: Any) -> None:
    """Access denied: exit 1, says so, never prints a secret."""
    wrong = {"AWS_ACCESS_KEY_ID": "AKIAWRONGWRONG", "AWS_SECRET_ACCESS_KEY": SECRET}
    told = refused(_prepared(make_mount, bucket, env=wrong), 1, r"credential|denied|access|key")
    assert SECRET not in told


def test_no_credentials(refused: Any, make_mount: Any, bucket: Any) -> None:
    mount = _prepared(make_mount, bucket)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        mount.env.pop(name)
    refused(mount, 1, r"credential")


def test_missing_bucket(refused: Any, make_mount: Any, bucket: Any) -> None:
    mount = _prepared(make_mount, bucket)
    mount.store = "s3://no-such-bucket-here/runs"
    refused(mount, 1, r"no-such-bucket-here", r"bucket")


def test_missing_store_directory(refused: Any, make_mount: Any, ram_dir: Path) -> None:
    refused(_prepared(make_mount, f"file://{ram_dir}/missing"), 1, r"missing", r"no such|exist")


@pytest.mark.parametrize("where", ["/proc/cachefs-cache", "/dev/null/cache", "/sys/kernel/c"])
def test_cache_directory_not_writable(
    refused: Any, make_mount: Any, dir_store: Any, where: str
) -> None:
    mount = _prepared(make_mount, dir_store, cache_dirs=[Path(where)])
    refused(mount, 1, re.escape(where))


def test_cache_directory_in_use(
    refused: Any, make_mount: Any, mounted: MountFactory, dir_store: Any, ram_dir: Path
) -> None:
    """A second daemon on the same cache directory is refused and told who has it."""
    first = mounted(dir_store)
    (first.path / "f").write_bytes(b"x")
    other = ram_dir / "other"
    other.mkdir()
    second = _prepared(make_mount, f"file://{other}", cache_dirs=first.cache_dirs)
    refused(second, 1, str(first.daemon_pid), re.escape(str(first.cache_dirs[0])))
    assert first.status()["pid"] == first.daemon_pid
    assert (first.path / "f").read_bytes() == b"x"


def test_mountpoint_missing(refused: Any, make_mount: Any, dir_store: Any) -> None:
    mount, _ = make_mount(dir_store, lane="tracked")
    refused(mount, 1, re.escape(str(mount.path)), r"exist|no such")


def test_mountpoint_is_a_file(refused: Any, make_mount: Any, dir_store: Any) -> None:
    mount, _ = make_mount(dir_store, lane="tracked")
    mount.path.parent.mkdir(parents=True, exist_ok=True)
    mount.path.touch()
    refused(mount, 1, re.escape(str(mount.path)), r"directory")


def test_mountpoint_busy(
    refused: Any, make_mount: Any, mounted: MountFactory, dir_store: Any, ram_dir: Path
) -> None:
    """Something is mounted there already; it is left alone."""
    first = mounted(dir_store)
    other = ram_dir / "other"
    other.mkdir()
    second, _ = make_mount(f"file://{other}", lane="tracked")
    second.path = first.path
    refused(second, 1, re.escape(str(first.path)), r"mounted|busy|use")
    assert first.status()["pid"] == first.daemon_pid
    assert len([e for e in fusectl.entries() if e.mountpoint == str(first.path)]) == 1


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["-o", "flush.setle=1s"], r"flush\.settle"),
        (["-o", "flsh.settle=1s"], r"flush"),
        (["-o", "flush.settle=soon"], r"flush\.settle.*soon"),
        (["-o", "flush.settle"], r"="),
        (["-o", "cache.size=lots"], r"cache\.size"),
        (["-o", "mount.passthrough=maybe"], r"auto.*off"),
        (["-o", "flush.settle=20s"], r"settle_max"),
        (["--config", "/no/such/file.toml"], r"/no/such/file\.toml"),
        (["--endpoint-url", "not a url"], r"endpoint"),
        (["--no-such-flag"], r"no-such-flag"),
    ],
)
def test_bad_usage(
    refused: Any, make_mount: Any, dir_store: Any, arguments: list[str], pattern: str
) -> None:
    """Wrong options and files: exit 2, and the nearest right name."""
    refused(_prepared(make_mount, dir_store, arguments=arguments), 2, pattern)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[flush]\nsetle = '1s'\n", r"flush\.settle"),
        ("[flush\n", r"config\.toml"),
        ("[flush]\ntemp_hold = true\n", r"temp_hold"),
        ("flush = 3\n", r"flush"),
    ],
)
def test_bad_config_file(
    refused: Any, make_mount: Any, dir_store: Any, ram_dir: Path, text: str, pattern: str
) -> None:
    file = ram_dir / "config.toml"
    file.write_text(text)
    mount = _prepared(make_mount, dir_store, arguments=["--config", str(file)])
    del mount.options["mount.passthrough"]
    refused(mount, 2, pattern)


@pytest.mark.parametrize(
    "store", ["bucket/prefix", "s3://", "ftp://x/y", "file://relative/dir", ""]
)
def test_bad_store_url(refused: Any, make_mount: Any, dir_store: Any, store: str) -> None:
    mount = _prepared(make_mount, dir_store)
    mount.store = store
    refused(mount, 2, r"s3://|store\.url")


def test_metrics_port_in_use(refused: Any, make_mount: Any, dir_store: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = {"metrics.listen": f"127.0.0.1:{port}"}
        refused(_prepared(make_mount, dir_store, options=options), 1, str(port), r"metrics")


def test_another_store_for_the_same_cache(
    refused: Any, make_mount: Any, mounted: MountFactory, dir_store: Any, ram_dir: Path
) -> None:
    """A cache belongs to one store; its data never goes to another by accident."""
    first = mounted(dir_store)
    (first.path / "f").write_bytes(b"x")
    assert first.unmount() == 0
    first.wait_gone()
    other = ram_dir / "other"
    other.mkdir()
    mount = _prepared(make_mount, f"file://{other}", cache_dirs=first.cache_dirs)
    refused(mount, 1, r"store|belongs")
    assert sorted(p.name for p in other.rglob("*") if p.is_file() and p.name == "f") == []


def test_the_store_was_replaced(
    refused: Any, mounted: MountFactory, dir_store: Any, make_mount: Any
) -> None:
    """The same URL, but another store behind it: refused, as its identity tells."""
    import shutil

    first = mounted(dir_store, allow=("is not the store this cache belongs to",))
    (first.path / "f").write_bytes(b"x")
    assert first.unmount() == 0
    first.wait_gone()
    shutil.rmtree(dir_store.path)
    dir_store.path.mkdir()
    again = _prepared(make_mount, dir_store)
    assert again.cli(*again.command()).returncode == 0  # another cache makes it a store of its own
    again.reread()
    again.ask("unmount", {"drain_timeout": 5})
    again.wait_gone()
    first.path.mkdir(exist_ok=True)
    refused(first, 1, r"store")


def test_verbs_without_a_mount(home: Path, ram_dir: Path) -> None:
    """status, ls, wait, flush and unmount of a path that is in no mount: exit 1 or 2, one line."""
    from tests.support.mounts import clean_environment

    env = clean_environment(home)
    for words in (
        ("status", str(ram_dir)),
        ("ls", str(ram_dir)),
        ("wait", str(ram_dir)),
        ("flush", str(ram_dir)),
        ("unmount", str(ram_dir)),
    ):
        done = cachefs(*words, env=env)
        assert done.returncode in (1, 2), words
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert str(ram_dir) in done.stderr


def test_unmount_of_a_busy_mount(mounted: MountFactory, dir_store: Any) -> None:
    """Someone has a file open: told so, still mounted; afterwards it works."""
    mount = mounted(dir_store)
    fd = os.open(mount.path / "f", os.O_WRONLY | os.O_CREAT)
    try:
        done = mount.cli("unmount", mount.path, "--drain-timeout", "1", timeout=30)
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert re.search("busy|use|open", done.stderr, re.IGNORECASE)
        os.write(fd, b"still works")
    finally:
        os.close(fd)
    assert mount.unmount() == 0
    assert dir_store.keys() == ["f"]


def test_unmount_tells_what_remains(mounted: MountFactory, bucket: Any, link: Any) -> None:
    """Not everything could be uploaded in time: exit 3, files and bytes, all of it later."""
    mount = mounted(
        bucket, endpoint=link.endpoint, allow=("store|retry|transient|reach|remain|unmount|degr",)
    )
    link.cut()
    for number in range(3):
        (mount.path / f"f{number}").write_bytes(bytes(1000))
    done = mount.cli("unmount", mount.path, "--drain-timeout", "1")
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert re.search(r"3 files?", done.stdout + done.stderr)
    assert not mount.mounted
    link.mend()
    mount.wait_gone()
    mount.start()
    mount.wait()
    assert bucket.keys() == ["f0", "f1", "f2"]


def test_mount_returns_though_its_output_is_a_pipe(mounted: MountFactory, dir_store: Any) -> None:
    """`$(cachefs mount ...)` ends with the command: no process keeps the pipe open."""
    mount = mounted(dir_store, start=False)
    mount.path.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "cachefs", *mount.command()],
        env=mount.env,
        cwd="/",
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    mount.reread()
    for pid in (mount.daemon_pid, mount.supervisor_pid):
        assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_foreground(mounted: MountFactory, dir_store: Any) -> None:
    """--foreground stays until the unmount; Ctrl-C drains and unmounts."""
    from tests.support.mounts import poll

    for end in ("unmount", "interrupt"):
        mount = mounted(dir_store, start=False, arguments=["--foreground"])
        mount.path.mkdir(parents=True)
        with open("/dev/null", "rb+") as null:
            process = subprocess.Popen(
                [sys.executable, "-m", "cachefs", *mount.command()],
                env=mount.env,
                cwd=CHECKOUT,
                stdin=null,
                stdout=null,
                stderr=subprocess.PIPE,
            )
        poll(lambda m=mount: run_file(m.path).exists() and m.mounted, 20)
        poll(lambda m=mount: _answers(m), 20)
        (mount.path / f"{end}.txt").write_bytes(b"x")
        if end == "unmount":
            assert mount.unmount() == 0
        else:
            process.send_signal(2)
        assert process.wait(30) == 0, process.stderr and process.stderr.read()
        if process.stderr:
            process.stderr.close()
        mount.wait_gone()
    assert dir_store.keys() == ["interrupt.txt", "unmount.txt"]


def _answers(mount: Mount) -> bool:
    try:
        mount.reread()
        return bool(mount.status())
    except (OSError, ValueError, KeyError, AssertionError):
        return False


def test_two_mounts_at_the_same_moment(
    make_mount: Any, dir_store: Any, mounted: MountFactory
) -> None:
    """Two `cachefs mount` race for one mountpoint and cache: one wins, the other says why."""
    first = mounted(dir_store, start=False)
    first.path.mkdir(parents=True)
    done: list[Any] = []
    threads = [
        threading.Thread(target=lambda: done.append(first.cli(*first.command(), timeout=40)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(d.returncode for d in done) == [0, 1], [d.stderr for d in done]
    first.reread()
    assert first.status()["mountpoint"] == str(first.path)
    assert len([e for e in fusectl.entries() if e.mountpoint == str(first.path)]) == 1
