"""Mounts for the tests of lanes: shared where nothing is killed, on a directory as store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lanes.place import Place, kernel_lacks_it, require_passthrough
from tests.support import logs, scratch
from tests.support.bucket import DirectoryStore
from tests.support.client import Client
from tests.support.mounts import Mount, Watchdog

Shares = Callable[[str], tuple[Mount, DirectoryStore]]


@pytest.fixture(scope="session")
def _shares(make_mount: Callable[..., Any], _watchdog: Watchdog) -> Iterator[Shares]:
    """One mount for each lane, made when it is first asked for and anew if a test broke it."""
    made: dict[str, tuple[Mount, DirectoryStore]] = {}
    folders: list[Path] = []

    def share(lane: str) -> tuple[Mount, DirectoryStore]:
        if lane in made and not _serves(made[lane][0]):
            made.pop(lane)[0].destroy()
        if lane not in made:
            folder = scratch.make("/dev/shm", "lanes")
            folders.append(folder)
            store = DirectoryStore(folder / "store")
            store.path.mkdir()
            mount, _ = make_mount(store, lane=lane, cache_dirs=[folder / "cache"])
            _watchdog.watch(mount)
            made[lane] = mount.start(), store
        return made[lane]

    yield share
    try:
        for mount, _ in made.values():
            mount.allowed_log.append(".*")  # each test has looked at its own lines
            mount.tear_down()
    finally:
        for mount, _ in made.values():
            mount.destroy()
            _watchdog.forget(mount)
        for folder in folders:
            scratch.remove(folder)


def _serves(mount: Mount) -> bool:
    try:
        return bool(mount.status())
    except (OSError, AssertionError, ValueError):
        return False


_serial = itertools.count()


@pytest.fixture
def place(lane: str, _shares: Shares, client: Client, ram_dir: Path) -> Iterator[Place]:
    """A fresh directory on the shared mount of the lane."""
    mount, store = _shares(lane)
    yield from _place(mount, store, client, ram_dir)


@pytest.fixture
def fast_place(_shares: Shares, client: Client, ram_dir: Path) -> Iterator[Place]:
    """The same, in the passthrough lane only."""
    if kernel_lacks_it():
        pytest.skip("this kernel has no passthrough (or we are not root)")
    mount, store = _shares("passthrough")
    require_passthrough(mount)
    yield from _place(mount, store, client, ram_dir)


def _place(mount: Mount, store: DirectoryStore, client: Client, ram_dir: Path) -> Iterator[Place]:
    name = f"t{next(_serial)}"
    (mount.path / name).mkdir()
    local = ram_dir / "local"
    local.mkdir()
    seen = len(mount.log)
    yield Place(mount, mount.path / name, DirectoryStore(store.path / name), client, local)
    client.close()
    found = logs.unexpected(mount.log[seen:])
    if not _serves(mount):
        found.append(f"the daemon does not answer any more\n{mount.log[-3000:]}")
    assert not found, "\n".join(found[:20])
