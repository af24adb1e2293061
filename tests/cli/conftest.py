"""Fixtures: pretended mounts, and the command line run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cachefs.cli import main, status
from cachefs.observe import runfiles
from tests.cli.fake import FakeMounts


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMounts:
    """An empty mount table, and run directories of the test's own."""
    mounts = FakeMounts(tmp_path)
    monkeypatch.setattr(runfiles, "MOUNTINFO", str(mounts.table))
    monkeypatch.setattr(runfiles, "_ROOT_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(runfiles, "_USERS_DIR", str(tmp_path / "users"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(status, "memory_dirs", lambda: (tmp_path / "run", tmp_path / "memory"))
    return mounts


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `cachefs ARGS` here; nothing is a terminal."""
    monkeypatch.delenv("CACHEFS_DEBUG", raising=False)

    def run(*args: str) -> Ran:
        capfd.readouterr()
        code = main(args)
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
