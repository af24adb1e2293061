"""What every framework's test looks at in the end."""

from __future__ import annotations

from typing import Any

from tests.support import compare
from tests.support.client import Client
from tests.support.mounts import Mount


def assert_mirrored(mount: Mount, bucket: Any, client: Client) -> None:
    """Once the mount is durable the bucket holds its tree, the whole tree, and nothing else."""
    mount.wait()
    assert compare.differences(client.actor(mount.path)("tree"), bucket) == []
    assert bucket.uploads() == []


def first_names(bucket: Any) -> list[str]:
    """What a listing of the prefix shows at its top."""
    return sorted({key.split("/")[0] for key in bucket.keys()})  # noqa: SIM118
