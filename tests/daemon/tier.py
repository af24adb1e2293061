"""A lab with a warm tier, looked at round by round."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from cachefs.tiers.warm import WarmTier
from tests.daemon.lab import ME, Lab, lab

Test = Callable[..., Awaitable[None]]


class Warm:
    """A lab and its warm directory."""

    def __init__(self, made: Lab, directory: Path) -> None:
        assert made.parts.tiering is not None
        self.lab = made
        self.directory = directory
        self.tiering = made.parts.tiering
        self.tier: WarmTier = self.tiering.tier
        self.kicks = 0
        kick = self.tier.on_change

        def count() -> None:
            self.kicks += 1
            kick()

        self.tier.on_change = count

    async def round(self) -> bool:
        await self.tier.look()
        async with self.tier.lock:
            return await self.tier.round()

    async def settle(self) -> None:
        """Rounds, as long as they change anything."""
        while await self.round():
            pass

    def shown(self) -> dict[str, str]:
        """Path -> content, of a symlink where it leads."""
        found = {}
        for path in self.directory.rglob("*"):
            name = str(path.relative_to(self.directory))
            if path.is_symlink():
                found[name] = os.readlink(path)
            elif path.is_file() and not name.startswith(".cachefs"):
                found[name] = path.read_text()
        return found

    async def write(self, path: str, text: str = "x") -> None:
        await self.lab.write(path, text.encode())

    async def link(self, path: str, to: str) -> None:
        folder, _, name = path.rpartition("/")
        parent = await self.lab.folder(folder)
        await self.lab.services.namespace.symlink(parent, name.encode(), to.encode(), ME)

    async def only_in_store(self, path: str, text: str = "x") -> None:
        """A file that had to leave the cache while the tier was away."""
        problem, self.tier.problem = self.tier.problem, "away"
        await self.write(path, text)
        await self.lab.wait(path)
        assert (await self.lab.ask("evict", paths=[path]))["files"] == 1
        self.tier.problem = problem

    async def read(self, path: str) -> bytes:
        fh = await self.lab.open(path, os.O_RDONLY)
        ino = self.lab.services.meta.inodes.lookup(
            await self.lab.folder(path.rpartition("/")[0]), path.rpartition("/")[2].encode()
        )
        assert ino is not None
        data = bytes(await self.lab.services.files.read(fh, 0, ino.size))
        self.lab.close(fh)
        return data

    def row_of(self, path: str) -> Any:
        return next((r for r in self.lab.services.meta.warm.all() if r.path == path), None)


def in_tier(*options: str, flusher: bool = True) -> Callable[[Test], Any]:
    def wrap(test: Test) -> Any:
        @functools.wraps(test)
        def run(tmp_path: Path, **values: Any) -> None:
            async def main() -> None:
                folder = tmp_path / "warm"
                folder.mkdir()
                more = (f"tiers.warm={folder}", *options)
                async with lab(tmp_path, *more, flusher=flusher) as made:
                    await test(Warm(made, folder), **values)

            trio.run(main)

        run.__signature__ = _with_tmp_path(test)  # type: ignore[attr-defined]
        del run.__wrapped__
        return run

    return wrap


def _with_tmp_path(test: Test) -> Any:
    signature = inspect.signature(test)
    first, *others = signature.parameters.values()
    return signature.replace(parameters=[first.replace(name="tmp_path"), *others])


async def save(warm: Warm, step: int) -> None:
    await warm.write(f"step-{step}/a.bin", f"a{step}")
    await warm.write(f"step-{step}/_SUCCESS")
