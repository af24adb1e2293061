"""A mount and a local directory with client processes in both, ready to run programs."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.differential.engine import Difference, Engine, has_fine_clock
from tests.differential.programs import Program, as_text, shrink
from tests.support import compare, postmortem
from tests.support.client import Actor, ActorError
from tests.support.mounts import Mount, poll

USER = (12345, 12345, [12345, 4])
"""The second actor is not root: uid, gid, supplementary groups."""


DURABLE_WITHIN = 20.0
"""Seconds after which what a program left must be in the bucket."""


class Pair:
    """Runs programs; replaces mount and clients when a program broke them."""

    def __init__(
        self, start: Callable[[], Mount], local: Path, bucket: Any, *, check_bucket: bool = False
    ) -> None:
        self._start = start
        self._local = local
        self._bucket = bucket
        self._check_bucket = check_bucket
        self._serial = itertools.count()
        self._killed = 0
        self.done: Counter[str] = Counter()
        """Programs, steps and special steps that were run."""
        self.mount: Mount | None = None
        self.engine: Engine | None = None
        local.chmod(0o755)

    # ---- life ----------------------------------------------------------------------------------

    def _prepare(self) -> tuple[Mount, Engine]:
        if self.mount is None:
            self.mount = self._start()
        if self.engine is None:
            local, mount = self._actors(self._local), self._actors(self.mount.path)
            fine = has_fine_clock(self._local)
            self.engine = Engine(local, mount, self._special, fine_clock=fine)
        return self.mount, self.engine

    def started(self) -> Mount:
        """The mount, running."""
        return self._prepare()[0]

    @staticmethod
    def _actors(root: Path) -> list[Actor]:
        made = [Actor(root), Actor(root)]
        made[1]("become", *USER)
        return made

    def _close_actors(self) -> None:
        if self.engine is not None:
            for side in (self.engine.local, self.engine.mount):
                for actor in side.actors:
                    actor.close()
            self.engine = None

    def _broken(self) -> None:
        """A client hung or died: end everything by force; the next program starts anew."""
        if self.mount is not None:
            self.mount.keep_log()
            self.mount.destroy()
            self.mount = None
            self._killed = 0
        self._close_actors()

    def close(self) -> None:
        """End of the test; complains about an unclean end or an unexpected log line."""
        self._close_actors()
        self._settle_in()
        if self.mount is not None:
            mount, self.mount = self.mount, None
            mount.tear_down()

    # ---- running -------------------------------------------------------------------------------

    def run(self, program: Program) -> None:
        """Run one program in fresh directories. Raises Difference."""
        mount, engine = self._prepare()
        name = f"p{next(self._serial)}"
        roots = (self._local / name, mount.path / name)
        for root in roots:
            root.mkdir()
            root.chmod(0o777)
        try:
            engine.run(program, *roots)
            self.done.update(programs=1, steps=len(program))
            if self._check_bucket:
                self._compare_bucket(name, program)
        except ActorError as error:
            told = postmortem.report(mount, *(actor.pid for actor in engine.mount.actors))
            self._broken()
            raise Difference(f"{error}\nprogram = {program}\n{told}") from None
        finally:
            shutil.rmtree(roots[0], ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(roots[1])

    def _compare_bucket(self, name: str, program: Program) -> None:
        mount, engine = self._prepare()
        self._settle_in()
        try:
            poll(lambda: mount.status()["dirty_files"] == 0, DURABLE_WITHIN, what="nothing dirty")
        except AssertionError:
            listed, log = mount.ask("ls", {"path": str(mount.path / name)}), mount.log[-2000:]
            self._broken()
            text = f"not durable: {listed}\nlog: {log}\nprogram = {as_text(program)}"
            raise Difference(text) from None
        tree = engine.mount.actors[0]("tree")
        wrong = compare.differences(tree, self._bucket.below(name))
        self.done["buckets"] += 1
        if wrong:
            text = "\n".join(wrong)
            raise Difference(f"the bucket is not the tree:\n{text}\nprogram = {as_text(program)}")

    def fails(self, program: Program) -> str:
        """Why the program fails; empty if it does not."""
        try:
            self.run(program)
        except Difference as error:
            return str(error)
        return ""

    def shrunk(self, program: Program, first: str, seconds: float) -> str:
        """The message of the shortest program found within `seconds` that still fails."""
        deadline = time.monotonic() + seconds
        messages = {"last": first}

        def fails(candidate: Program) -> bool:
            told = self.fails(candidate)
            messages["last"] = told or messages["last"]
            return bool(told)

        calm = [step for step in program if not str(step[1]).startswith("!")]
        if len(calm) < len(program) and fails(calm):  # specials are slow: try without
            program = calm
        shrink(program, fails, lambda: time.monotonic() < deadline)
        return messages["last"]

    # ---- special steps -------------------------------------------------------------------------

    def _settle_in(self) -> None:
        """Until the daemon that follows the killed one serves."""
        if self._killed and self.mount is not None:
            self.mount.took_over(self._killed)
            self._killed = 0

    def _special(self, op: str) -> None:
        assert self.mount is not None
        mount = self.mount
        self.done[op] += 1
        if op != "!kill":
            self._settle_in()
        if op == "!pause":
            time.sleep(0.05)
        elif op == "!durable":
            mount.ask("flush", {"paths": [str(mount.path)]})
        elif op == "!remount":
            mount.remount()
        elif op == "!crash":
            mount.crash()
            mount.start()
        elif op == "!kill":
            self._settle_in()
            self._killed = mount.kill_daemon(wait=False)
        else:
            raise ValueError(op)
