"""A disk that fails when a test says so: a shim in the daemon's system calls (see `badcalls.c`)."""

from __future__ import annotations

import mmap
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PLAN = struct.Struct("=16s104siI")
SOURCE = Path(__file__).with_suffix(".c")


class BadCalls:
    """Mount with `env`; then `failing` makes calls fail for a while."""

    def __init__(self, folder: Path) -> None:
        """Build the shim in `folder`."""
        shim, plan = folder / "badcalls.so", folder / "plan"
        subprocess.run(
            ["gcc", "-O1", "-Wall", "-shared", "-fPIC", str(SOURCE), "-o", str(shim), "-ldl"],
            check=True,
        )
        plan.write_bytes(bytes(_PLAN.size))
        self.env = {"LD_PRELOAD": str(shim), "CACHEFS_TEST_BADCALLS": str(plan)}
        with open(plan, "r+b") as file:
            self._plan = mmap.mmap(file.fileno(), _PLAN.size)

    @contextmanager
    def failing(self, call: str, part: str, error: int) -> Iterator[None]:
        """Calls of one kind, on files with `part` in their path, fail with an errno; one at least
        has to."""
        self._plan[1 : _PLAN.size] = _PLAN.pack(call.encode(), part.encode(), error, 0)[1:]
        self._plan[0:1] = call[:1].encode()
        try:
            yield
        finally:
            self._plan[0:1] = b"\0"
        assert self.count, f"{call} of {part} was never called"

    @property
    def count(self) -> int:
        """How often the plan of now, or the last one, made a call fail."""
        return int(_PLAN.unpack(self._plan[:])[3])
