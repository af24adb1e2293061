"""Directories of tests go with the run that made them, also if that is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import scratch

_MAKE = """
import os, signal, subprocess, sys
from tests.support import scratch
path = scratch.make("/dev/shm")
(path / "below").mkdir()
if os.geteuid() == 0:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path / "below"], check=True)
(path / "below" / "file").write_bytes(bytes(1 << 20))
print(path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_left_goes_at_the_next() -> None:
    command = [sys.executable, "-c", _MAKE]
    root = Path(__file__).parents[1]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        os.utime(path, (0, 0))
        assert path not in scratch.sweep(), "somebody uses it"
        assert (path / "below" / "file").exists()
        process.kill()
    assert path in scratch.sweep()
    assert not path.exists()


def test_one_that_was_just_made_is_left_alone() -> None:
    """It may not be locked yet."""
    path = scratch.make("/dev/shm")
    os.close(scratch._locks.pop(path))
    assert path not in scratch.sweep()
    os.utime(path, (0, 0))
    assert path in scratch.sweep()


_LEAVES = """
from tests.support import scratch

def test_leaves_something():
    (scratch.make("/dev/shm", "left") / "file").write_bytes(b"x")

def test_leaves_nothing(ram_dir):
    (ram_dir / "file").write_bytes(b"x")
"""


def test_what_a_run_did_not_remove_is_told(tmp_path: Path) -> None:
    """And removed."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(_LEAVES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root}
    told = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True).stdout
    assert "2 passed" in told
    (line,) = (line for line in told.splitlines() if "WARNING: tests left" in line)
    path = Path(line.split()[3])
    assert path.name.startswith("cachefs-test.left-")
    assert not path.exists()
