"""Programs that write on although their mount has ended: the kernel goes on without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lanes.place import in_lane
from tests.support.actor import pattern
from tests.support.client import Client
from tests.support.mounts import Failed, MountFactory, poll

PART = 100_000


@pytest.mark.parametrize("lane", [in_lane("passthrough")], indirect=True)
def test_what_somebody_still_writes_to_is_held(
    mounted: MountFactory, dir_store: Any, client: Client
) -> None:
    """Status, attributes and `wait` name the process; nobody waits for it; nothing of it is shown
    before it has ended and somebody said that it is whole."""
    mount = mounted(dir_store, allow=("a process that outlived", "held"))
    actor = client.actor(mount.path)
    actor("open", 0, "shard.bin", "WRONLY|CREAT")
    actor("write", 0, 1, PART)
    mount.crash()
    mount.start()
    actor("write", 0, 2, PART)
    why = f"a process that outlived its mount still writes to it (pid {actor.pid})"
    assert (mount.xattr("state", "shard.bin"), mount.xattr("error", "shard.bin")) == ("held", why)
    assert why in mount.cli("status", mount.path).stdout
    with pytest.raises(Failed, match="outlived its mount") as caught:
        mount.wait(mount.path / "shard.bin")
    assert caught.value.exit_code == 5
    refused = mount.cli("resolve", mount.path / "shard.bin", "--keep")
    assert refused.returncode == 1
    assert why in refused.stderr
    (mount.path / "latest").write_text("1")
    mount.wait(mount.path / "latest")
    assert dir_store.keys() == ["latest"]
    actor("write", 0, 3, PART)
    actor.kill()
    poll(lambda: "outlived" not in mount.xattr("error", "shard.bin"), 20, what="its end noticed")
    body = pattern(1, PART) + pattern(2, PART) + pattern(3, PART)
    assert mount.xattr("state", "shard.bin") == "held"
    assert (mount.path / "shard.bin").read_bytes() == body
    assert mount.cli("resolve", mount.path / "shard.bin", "--keep").returncode == 0
    mount.wait()
    assert dir_store.get("shard.bin") == body
