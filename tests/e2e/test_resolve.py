"""Deciding about files that are held, conflicted or refused: every way out, and nothing lost."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.support.actor import pattern
from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory

pytestmark = pytest.mark.either_lane

HOLD = {"flush.settle": "1s", "flush.settle_max": "1s"}
DIED = "no takeover|died|killed|exit|signal|gone|abort|ended|restart|crash|recover|orphan"


@pytest.fixture
def conflicted(mounted: MountFactory, bucket: Any) -> Mount:
    """`f` says "original + ours" here and "theirs" in the bucket; `new` was made by both."""
    bucket.put("f", b"original")
    mount = mounted(bucket, options=HOLD, allow=("conflict",))
    with open(mount.path / "f", "ab") as file:
        file.write(b" + ours")
    (mount.path / "new").write_bytes(b"our new one")
    bucket.put("f", b"theirs")
    bucket.put("new", b"their new one")
    assert mount.cli("wait", mount.path, "--timeout", "30").returncode == 5
    return mount


def resolve(mount: Mount, name: str, *options: str) -> list[dict[str, str]]:
    """What the command says in JSON."""
    done = mount.cli("resolve", mount.path / name, "--json", *options)
    assert done.returncode == 0, done.stderr
    files: list[dict[str, str]] = json.loads(done.stdout)["files"]
    return files


def test_without_a_decision_it_only_tells(conflicted: Mount, bucket: Any) -> None:
    files = resolve(conflicted, ".")
    assert {os.path.basename(each["path"]): each["state"] for each in files} == {
        "f": "conflicted", "new": "conflicted",
    }  # fmt: skip
    assert all("another writer" in each["reason"] for each in files)
    text = conflicted.cli("resolve", conflicted.path / "f").stdout
    assert "conflicted" in text and "--discard" in text
    assert bucket.get("f") == b"theirs"
    assert conflicted.xattr("state", "f") == "conflicted"


def test_ours_is_kept(conflicted: Mount, bucket: Any) -> None:
    """Both keys hold our versions then; the copies beside them stay."""
    resolve(conflicted, ".", "--keep")
    conflicted.wait()
    assert bucket.get("f") == b"original + ours"
    assert bucket.get("new") == b"our new one"
    assert conflicted.xattr("state", "f") == "durable"
    assert len([key for key in bucket.keys() if ".conflict-" in key]) == 2  # noqa: SIM118


def test_a_version_that_nobody_saw_is_not_overwritten(conflicted: Mount, bucket: Any) -> None:
    """The key changes once more after the decision was made: that is another conflict."""
    resolve(conflicted, "f", "--keep")
    bucket.put("f", b"theirs again")
    done = conflicted.cli("wait", conflicted.path / "f", "--timeout", "30")
    if done.returncode == 0:  # ours was faster than theirs
        assert bucket.get("f") == b"theirs again"
        return
    assert done.returncode == 5
    assert bucket.get("f") == b"theirs again"
    assert (conflicted.path / "f").read_bytes() == b"original + ours"


def test_theirs_is_taken(conflicted: Mount, bucket: Any) -> None:
    """What the kernel remembered of our version is forgotten as well."""
    assert (conflicted.path / "f").read_bytes() == b"original + ours"
    resolve(conflicted, ".", "--discard")
    assert os.stat(conflicted.path / "f").st_size == len(b"theirs")
    assert (conflicted.path / "f").read_bytes() == b"theirs"
    assert (conflicted.path / "new").read_bytes() == b"their new one"
    conflicted.wait()
    assert bucket.get("f") == b"theirs"
    (conflicted.path / "f").write_bytes(b"edited")
    conflicted.wait()
    assert bucket.get("f") == b"edited"


def test_ours_gets_another_name(conflicted: Mount, bucket: Any) -> None:
    """Theirs appears under the old one, untouched."""
    resolve(conflicted, "f", "--publish-as", "f.ours")
    assert sorted(os.listdir(conflicted.path))[:2] == ["f", "f.ours"]
    conflicted.wait(conflicted.path / "f.ours")
    assert bucket.get("f.ours") == b"original + ours"
    assert bucket.get("f") == b"theirs"
    assert (conflicted.path / "f").read_bytes() == b"theirs"


def test_nothing_of_theirs_is_left(conflicted: Mount, bucket: Any) -> None:
    """They have deleted it meanwhile: keeping brings it back, discarding removes the name."""
    bucket.delete("f")
    bucket.delete("new")
    resolve(conflicted, "new", "--discard")
    assert not (conflicted.path / "new").exists()
    resolve(conflicted, "f", "--keep")
    conflicted.wait()
    assert bucket.get("f") == b"original + ours"
    assert not bucket.exists("new")


def test_a_held_file(mounted: MountFactory, bucket: Any, client: Client) -> None:
    """It was being written when all of it died: some are kept, one is given up. One of them was
    edited before its first version was shown."""
    options = {"mount.takeover": "off", "flush.settle": "1min", "flush.settle_max": "1min"}
    mount = mounted(bucket, options=options, allow=(DIED,))
    (mount.path / "gone").write_bytes(b"first version")
    mount.wait()
    (mount.path / "edited").write_bytes(b"first version")

    actor = client.actor(mount.path)
    for slot, name in enumerate(("kept", "gone")):
        actor("open", slot, name, "WRONLY|CREAT|TRUNC")
        actor("write", slot, slot, 1000)
    actor("open", 2, "edited", "RDWR")
    actor("write", 2, 2, 5)
    mount.kill_daemon()
    mount.wait_gone()
    actor.close()
    mount.start()
    told = {os.path.basename(each["path"]): each for each in resolve(mount, ".")}
    assert told.keys() == {"kept", "gone", "edited"}
    assert all(each["state"] == "held" and each["reason"] for each in told.values()), told
    resolve(mount, "kept", "--keep")
    resolve(mount, "edited", "--keep")
    resolve(mount, "gone", "--discard")
    mount.wait()
    assert bucket.get("kept") == pattern(0, 1000)
    assert bucket.get("edited") == pattern(2, 5) + b" version"
    assert (mount.path / "gone").read_bytes() == b"first version"
    assert bucket.get("gone") == b"first version"


def test_bad_usage(conflicted: Mount) -> None:
    assert conflicted.cli("resolve", conflicted.path / "f", "--keep", "--discard").returncode == 2
    taken = conflicted.cli("resolve", conflicted.path / "f", "--publish-as", "new")
    assert taken.returncode == 2
    assert "exists" in taken.stderr
    assert conflicted.cli("resolve", conflicted.path / "missing").returncode == 1
    with open(conflicted.path / "f", "rb"):
        done = conflicted.cli("resolve", conflicted.path / "f", "--discard")
    assert done.returncode == 2
    assert "open" in done.stderr
