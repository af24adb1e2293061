"""A proxy before an S3 store that does what a test asks: slow, throttled, broken, lying.

with FaultProxy(seaweed.endpoint) as proxy:
    proxy.set(Rule(Fault.LOST_REPLY, ops=("complete_upload",), count=1))
    ... use proxy.endpoint ...
    assert proxy.used() == [1]
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.faults import Rule


class FaultProxy:
    """A proxy in a process of its own, which ends with the test's. See `faults` for the rules."""

    def __init__(self, upstream: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faultserver", upstream],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self._process.stdout is not None
        port, control = map(int, self._process.stdout.readline().split())
        self.endpoint = f"http://127.0.0.1:{port}"
        """What clients use instead of the store's own endpoint."""
        self._control = socket.create_connection(("127.0.0.1", control)).makefile("rw")

    def set(self, *rules: Rule, seed: int = 0) -> None:
        """From now on these rules, and no others."""
        self._ask("rules", rules=[asdict(rule) for rule in rules], seed=seed)

    def clear(self) -> None:
        """From now on pass everything on."""
        self.set()

    def forget(self) -> None:
        """Empty the log and the counters."""
        self._ask("forget")

    def used(self) -> list[int]:
        """How often each of the rules applied."""
        return list(self._ask("used"))

    def counts(self) -> dict[str, int]:
        """`OP STATUS` (or `OP dropped`) -> requests; also bytes_in, bytes_out (of bodies) and
        most_at_once."""
        return dict(self._ask("counts"))

    def log(self) -> list[dict[str, Any]]:
        """Every request since `forget`: time, op, key, status (0: none was given), fault, sent and
        received bytes of bodies."""
        return list(self._ask("log"))

    def close(self) -> None:
        """End the process."""
        self._control.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: str, **arguments: Any) -> Any:
        self._control.write(json.dumps({"do": what, **arguments}) + "\n")
        self._control.flush()
        return json.loads(self._control.readline())
