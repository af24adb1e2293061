"""A cache of several directories: checked and salvaged in the order of its mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachefs.cache.device import CacheDevice
from cachefs.fsck.check import check
from cachefs.fsck.place import NotCheckable
from cachefs.fsck.report import CLEAN, TROUBLE
from cachefs.fsck.salvage import salvage
from tests.fsck.cache import BODIES, Cache


@pytest.fixture
def second(cache: Cache, tmp_path: Path) -> Path:
    """Another device, which `dirty.bin` is on."""
    directory = tmp_path / "second"
    device = CacheDevice(1, directory)
    device.clone_from(cache.file(1), 1)
    device.close()
    cache.file(1).unlink()
    cache.sql("UPDATE generation SET device=1 WHERE gen=1")
    return directory


def test_both_are_checked(cache: Cache, second: Path) -> None:
    report = check([cache.directory, second])
    assert (report.findings, report.exit_code, report.files) == ([], CLEAN, 3)
    (second / "files" / "01" / "1").unlink()
    report = check([cache.directory, second])
    assert [each.check for each in report.findings] == ["file-missing"]
    assert report.exit_code == TROUBLE


def test_of_a_device_that_is_not_named_nothing_is_said(cache: Cache, second: Path) -> None:
    report = check([cache.directory], repair=True)
    assert (report.findings, report.files) == ([], 2)
    with pytest.raises(NotCheckable, match="another one has"):
        check([second, cache.directory])
    (finding,) = check([second]).findings
    assert finding.check == "database-missing"
    assert "first directory?" in finding.subject


def test_both_are_salvaged(cache: Cache, second: Path, tmp_path: Path) -> None:
    salvage([cache.directory, second], tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in BODIES} == BODIES
