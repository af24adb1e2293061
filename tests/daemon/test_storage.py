"""Which cache directory is which device, and what is refused before anything is changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachefs import config
from cachefs.cache.absent import AbsentDevice
from cachefs.daemon.storage import Storage, open_storage
from cachefs.errors import CacheError
from cachefs.meta.rows import GenerationRow

OPTIONS = ["cache.size=64MiB", "cache.meta_reserve=0"]


def opened(*paths: Path) -> Storage:
    flags = {"store.url": "file:///nowhere", "cache.dirs": [str(path) for path in paths]}
    return open_storage(config.load(None, OPTIONS, flags=flags))


def put(storage: Storage, device: int, file: int, state: str = "sealed") -> None:
    """A cache file and its row."""
    os.close(storage.devices[device].create(file))
    row = GenerationRow(0, 9, device, file, state, "tracked", 0, None, None, None, None, 0, None, 0)
    storage.meta.generations.add(row)


def paths_of(storage: Storage) -> list[str]:
    return [each.directory.name for each in storage.devices]


def test_numbers_stay_whatever_the_order(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    storage = opened(a, b)
    assert paths_of(storage) == ["a", "b"]
    storage.close()
    storage = opened(c, b, a)
    assert paths_of(storage) == ["a", "b", "c"]
    assert [each.index for each in storage.devices] == [0, 1, 2]
    assert storage.home is storage.devices[0]
    assert storage.warnings() == []
    storage.close()


def test_one_that_is_not_given_is_missed_only_if_it_is_needed(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    storage = opened(a, b)
    put(storage, 1, 5, "durable")
    storage.close()
    storage = opened(a)
    absent = storage.devices[1]
    assert isinstance(absent, AbsentDevice)
    assert absent.retired
    assert storage.warnings() == []
    storage.close()
    storage = opened(a, b)
    put(storage, 1, 6)
    storage.close()
    storage = opened(a)
    (warning,) = storage.warnings()
    assert "not among the cache directories" in warning
    assert "1 files of it are not in the store" in warning
    with pytest.raises(OSError, match="missing"):
        storage.devices[1].create(7)
    storage.close()


def test_directories_of_two_caches_are_refused(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    opened(a).close()
    storage = opened(b, c)
    put(storage, 1, 3)
    storage.close()
    with pytest.raises(CacheError, match="each has a database"):
        opened(a, b)
    with pytest.raises(CacheError, match="belongs to another cache"):
        opened(a, c)
    storage = opened(b, c)
    assert storage.devices[1].exists(3)
    storage.close()


def test_a_device_without_its_database_is_refused(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    opened(a, b).close()
    with pytest.raises(CacheError, match="whose database is not here"):
        opened(b)
