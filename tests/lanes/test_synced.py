"""A file that its program synced is on the disk when it is closed."""

from __future__ import annotations

import os
from typing import Any

from tests.support.mounts import MountFactory


def test_a_file_that_was_synced_survives_a_reboot_once_closed(
    mounted: MountFactory, dir_store: Any
) -> None:
    later = {"flush.settle": "60s", "flush.settle_max": "60s"}
    mount = mounted(dir_store, cache="disk", options=later)
    for size in (5, 3_000_000):
        path = mount.path / f"model-{size}.bin"
        with open(path, "wb") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
        assert os.getxattr(path, "user.cachefs.survives") == b"reboot"
