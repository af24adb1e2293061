"""`cachefs demo` as a person runs it, and everything it leaves behind: nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--size", "16MiB")
LIMIT = 60.0
"""Seconds after which a demonstration of this size has failed."""


@dataclass
class Place:
    """A temporary directory that the demonstration works in, and its processes."""

    tmp: Path

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cachefs", "demo", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(self.tmp), **env},
        )

    def mounts(self) -> list[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in lines if str(self.tmp) in line]

    def processes(self) -> list[str]:
        """Command lines that name the directory."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if str(self.tmp) in words:
                    found.append(words)
        return found

    def is_clean(self) -> bool:
        limit = time.monotonic() + 5  # a child may take a moment to be gone
        while self.processes() and time.monotonic() < limit:
            time.sleep(0.05)
        assert self.mounts() == []
        assert self.processes() == []
        assert list(self.tmp.iterdir()) == []
        return True


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for line in place.mounts():
        subprocess.run(["umount", "--lazy", line.split()[4]], check=False)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Lines up to the one that matches."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if re.search(pattern, line):
            return text
    raise AssertionError(
        f"ended without {pattern!r}:\n{text}{process.stderr and process.stderr.read()}"
    )


def test_demo_succeeds_calmly_and_leaves_nothing(place: Place) -> None:
    out, err = place.start(*SMALL).communicate(timeout=LIMIT)
    assert "\x1b" not in out
    assert "\r" not in out
    assert err == ""
    assert re.search(r"objects read back +13, all checksums \(SHA-256\) equal", out)
    assert re.search(r"pointer ahead of its data +never, in \d+ listings", out)
    assert re.search(r"cachefs_dirty_bytes +0 ", out)
    assert re.search(r"save returned after +\d+\.\d\d s", out)
    assert len(out.splitlines()) < 60
    assert place.is_clean()


@pytest.mark.parametrize(
    "moment, number",
    [
        ("Starting SeaweedFS", signal.SIGTERM),
        ("is mounted at", signal.SIGINT),
        ("save .*100 %", signal.SIGHUP),
    ],
)
def test_a_signal_at_any_moment_cleans_up(place: Place, moment: str, number: int) -> None:
    process = place.start(*SMALL)
    read_until(process, moment)
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert place.is_clean()


def test_impatient_signals_do_not_break_the_clean_up(place: Place) -> None:
    process = place.start(*SMALL)
    read_until(process, "is mounted at")
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    process.communicate()
    assert process.returncode == 130
    assert place.is_clean()


def test_stay_prints_addresses_that_work_until_it_is_stopped(place: Place) -> None:
    process = place.start("--stay", *SMALL)
    text = read_until(process, "Press Ctrl-C")
    told = dict(re.findall(r"^ *(\S[\w ]*?) {2,}(\S+) *$", text, re.MULTILINE))
    mountpoint = Path(told["mountpoint"])
    assert (mountpoint / "latest").read_text() == "checkpoint-1000"
    with urllib.request.urlopen(told["metrics"]) as page:
        assert b"cachefs_dirty_bytes 0.0" in page.read()
    bucket, _, prefix = told["store"].removeprefix("s3://").partition("/")
    client = boto3.client(
        "s3",
        endpoint_url=told["S3 endpoint"],
        aws_access_key_id=told["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=told["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    body = client.get_object(Bucket=bucket, Key=f"{prefix}/latest")["Body"].read()
    assert body == b"checkpoint-1000"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert place.is_clean()


def test_settings_of_the_environment_do_not_lead_it_elsewhere(place: Place) -> None:
    env = {
        "AWS_PROFILE": "production",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "CACHEFS_STORE__ENDPOINT": "http://127.0.0.1:9",
    }
    process = place.start(*SMALL, **env)
    _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, "")


def test_a_store_that_cannot_start_is_one_line(place: Place) -> None:
    process = place.start(*SMALL, CACHEFS_WEED="/bin/false")
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert re.fullmatch(r"cachefs: SeaweedFS did not come up.*\n", err)
    assert place.is_clean()


def test_a_size_that_is_none_is_bad_usage(place: Place) -> None:
    process = place.start("--size", "big")
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert re.fullmatch(r"cachefs: --size: .*\n", err)
    assert place.is_clean()
