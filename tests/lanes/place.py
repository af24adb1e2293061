"""A fresh directory on a mount, its part of the store, and a count of the kernel's requests."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import lanes
from tests.support.bucket import DirectoryStore
from tests.support.client import Actor, Client
from tests.support.mounts import Mount

DATA = ("READ", "WRITE")


@dataclass(slots=True)
class Place:
    """Where one test works. `lane` is what the mount gives to new files."""

    mount: Mount
    path: Path
    store: DirectoryStore
    """What the store shows of this directory."""
    client: Client
    local: Path
    """An empty directory of the filesystem that the cache is on."""

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def lane(self) -> str:
        return self.mount.lane

    def actor(self) -> Actor:
        """A client process that works here."""
        return self.client.actor(self.path)

    def twin(self) -> Actor:
        """A client process that does the same in the local directory."""
        return self.client.actor(self.local)

    def lane_of(self, name: str) -> str:
        """`user.cachefs.lane`."""
        return os.getxattr(self.path / name, "user.cachefs.lane").decode()

    def state_of(self, name: str) -> str:
        return os.getxattr(self.path / name, "user.cachefs.state").decode()

    def watch(self) -> Watch:
        """Count the kernel's requests from now on."""
        return Watch(self.mount)

    def durable(self) -> None:
        """Wait until everything closed here is in the store."""
        self.mount.wait(self.path)


class Watch:
    """Requests that reached the daemon since it was made (or `restart`ed)."""

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._before = self._now()

    def restart(self) -> None:
        self._before = self._now()

    def seen(self) -> dict[str, int]:
        """Name -> requests, of those that came at all."""
        return dict(self._now() - self._before)

    def data(self) -> dict[str, int]:
        """READ and WRITE requests among them."""
        return {name: count for name, count in self.seen().items() if name in DATA}

    def _now(self) -> Counter[str]:
        return Counter(self._mount.status()["requests"])


def require_passthrough(mount: Mount) -> None:
    """Where the kernel has the lane, the mount must."""
    told = mount.status()["lanes"]
    assert told["passthrough"], f"no passthrough on this kernel: {told['reason']}"


def kernel_lacks_it() -> bool:
    """The only reason to skip: a kernel before 6.9, or not root."""
    return not lanes.kernel_has_passthrough()


def in_lane(lane: str, *values: Any) -> Any:
    """A set of parameters, the lane first, to be given with `indirect=["lane"]`."""
    missing = lane == "passthrough" and kernel_lacks_it()
    return pytest.param(
        lane, *values, marks=pytest.mark.skipif(missing, reason="this kernel has no passthrough")
    )


def without(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    """An answer that differs from file to file, without these of its parts."""
    value = answer.get("ok")
    if isinstance(value, dict):
        return {"ok": {k: v for k, v in value.items() if k not in names}}
    return answer
