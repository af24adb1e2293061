"""The product's failpoints, from the test's side: what stops where, and whether it got there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.mounts import Mount, poll


class Failpoints:
    """The file that a daemon started with `env` looks into at each request."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def env(self) -> dict[str, str]:
        """To be given to the mount."""
        return {"CACHEFS_FAILPOINTS": str(self._path)}

    def arm(self, action: str, point: str, *ops: str, target: str | None = None) -> None:
        """From now on these operations do this there, and all others nothing."""
        chosen = {} if target is None else {"target": target}
        plans = [{"point": point, "op": op, "action": action, **chosen} for op in ops]
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(plans))
        os.replace(fresh, self._path)

    def disarm(self) -> None:
        self._path.unlink(missing_ok=True)

    @staticmethod
    def reached(mount: Mount, since: int, *ops: str) -> None:
        """Wait until each of these has stopped, as told by the log from `since` on."""

        def all_there() -> bool:
            lines = [line for line in mount.log[since:].splitlines() if "event=failpoint" in line]
            return all(any(f"op={op} " in f"{line} " for line in lines) for op in ops)

        poll(all_there, what=f"failpoints at {ops}")
