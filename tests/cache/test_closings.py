"""The table of closings: slots, and what the next daemon finds in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachefs.cache import closings
from cachefs.cache.closings import Closed, Closings, open_table
from tests.cache.conftest import SMALL
from tests.support import scratch

FILES = st.integers(1, 40)
CLOSED = st.builds(Closed, st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 62))


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch.directory("/dev/shm") as directory:
        yield directory / "device.closed"


def test_what_is_noted_outlives_its_writer(path: Path) -> None:
    times = Closings(path)
    times.claim(7)
    times.claim(8)
    times.note(7, Closed(12345, 6))
    times.close()
    again = Closings(path)
    assert (again.of(7), again.of(8), again.of(9)) == (Closed(12345, 6), None, None)
    again.keep_only([8])
    assert again.of(7) is None
    again.drop(8)
    again.close()
    assert not path.exists(), "there is nothing to be remembered"


FILL_ALL = """
import sys
from pathlib import Path
from cachefs.cache.closings import SLOTS, Closings
table = Closings(Path(sys.argv[1]))
for file in range(1, SLOTS + 1):
    table.claim(file)
"""


def test_memory_that_is_full(small_fs: Path) -> None:
    """It is refused then; a table without room would be the death of whoever notes something."""
    (small_fs / "all").write_bytes(bytes(SMALL - (16 << 10)))
    command = [sys.executable, "-c", FILL_ALL, str(small_fs / "device.closed")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert open_table("device", [small_fs]) is None
    (small_fs / "all").unlink()
    subprocess.run(command, timeout=20, check=True)


def test_a_slot_begins_without_a_close(path: Path) -> None:
    times = Closings(path)
    times.note(7, Closed(12345, 6))
    times.drop(7)
    times.claim(7)
    assert times.of(7) is None


def test_no_slot_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closings, "SLOTS", 2)
    times = Closings(path)
    assert sorted([times.claim(1), times.claim(2)]) == [0, 1]  # type: ignore[type-var]
    assert times.claim(3) is None
    assert not times.note(3, Closed(5, 0))
    times.drop(1)
    assert times.note(3, Closed(5, 0))


def test_only_in_memory() -> None:
    """A store to a file of a disk may wait for the disk."""
    with (
        scratch.directory("/var/tmp") as directory,
        pytest.raises(OSError, match="not in memory"),
    ):
        Closings(directory / "device.closed")


class Table(RuleBasedStateMachine):
    """Against a dictionary, with the daemon killed and begun anew at any time."""

    path: Path

    def __init__(self) -> None:
        super().__init__()
        self.path.unlink(missing_ok=True)
        self.times = Closings(self.path)
        self.model: dict[int, Closed | None] = {}

    @rule(file=FILES)
    def claim(self, file: int) -> None:
        self.times.claim(file)
        self.model.setdefault(file, None)

    @rule(file=FILES, closed=CLOSED)
    def note(self, file: int, closed: Closed) -> None:
        assert self.times.note(file, closed)
        self.model[file] = closed

    @rule(file=FILES)
    def drop(self, file: int) -> None:
        self.times.drop(file)
        self.model.pop(file, None)

    @rule(files=st.sets(FILES))
    def keep_only(self, files: set[int]) -> None:
        self.times.keep_only(files)
        self.model = {file: at for file, at in self.model.items() if file in files}

    @rule()
    def killed(self) -> None:
        self.times = Closings(self.path)

    @invariant()
    def same(self) -> None:
        assert {file: self.times.of(file) for file in self.model} == self.model
        slots = [self.times.claim(file) for file in self.model]
        assert len(set(slots)) == len(slots)


def test_table(path: Path) -> None:
    class Here(Table):
        pass

    Here.path = path
    Here.TestCase().runTest()
