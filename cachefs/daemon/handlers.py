"""The operations of the control socket. See `observe.protocol` for how they travel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import trio

from cachefs.daemon.adopting import Adoption
from cachefs.daemon.draining import Remaining, drain
from cachefs.daemon.holding import Holding
from cachefs.daemon.latest import Latest
from cachefs.daemon.paths import Spot, absolute, inside, locate
from cachefs.daemon.resolving import Decision
from cachefs.daemon.retain import Retaining
from cachefs.daemon.services import Services
from cachefs.daemon.snapshots import refresh_snapshot
from cachefs.daemon.status import StatusReport
from cachefs.daemon.trouble import Troubles
from cachefs.daemon.waiting import wait_until_safe
from cachefs.errors import MountError, UsageError
from cachefs.fuse.smallfiles import NoSmallFiles
from cachefs.meta.rows import DentryRow
from cachefs.model.survival import Level
from cachefs.observe.control import Handler, Progress

__all__ = ["Remaining", "drain", "gathered", "make_handlers", "refresh_snapshot"]

_TO_ANSWER = 0.05
"""Seconds between the end of a request that ends the daemon and that end: the answer goes first."""


def make_handlers(services: Services, shutdown: Callable[[str], None]) -> dict[str, Handler]:
    """Operation -> handler. `shutdown(reason)` is called with `unmount` or `upgrade`."""
    handlers = _Handlers(services, shutdown)
    return {
        "status": handlers.status,
        "ls": handlers.ls,
        "wait": handlers.wait,
        "flush": handlers.flush,
        "resolve": handlers.resolve,
        "warm": handlers.holding.warm,
        "evict": handlers.holding.evict,
        "pin": handlers.holding.pin,
        "unpin": handlers.holding.unpin,
        "latest": Latest(services).latest,
        "adopt": Adoption(services).adopt,
        "retain": Retaining(services).retain,
        "unmount": handlers.unmount,
        "upgrade": handlers.upgrade,
    }


class _Handlers:
    def __init__(self, services: Services, shutdown: Callable[[str], None]) -> None:
        self._services = services
        self._shutdown = shutdown
        self._troubles = Troubles(services.meta, services.queue)
        self._report = StatusReport(services, self._troubles)
        self.holding = Holding(services)

    async def status(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Of the mount, or with `path` of one path in it."""
        if args.get("path") is None:
            return await self._report.mount()
        return self._report.path(await locate(self._services, args["path"]))

    async def ls(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Entries of the directory `path`; directories in it are not counted through."""
        spot = await locate(self._services, args.get("path"))
        return {"entries": await self._report.listing(spot)}

    async def wait(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Until `paths` survive the level `survives`, `timeout` seconds at most."""
        try:
            level = Level.parse(str(args.get("survives", Level.SITE)))
        except ValueError as err:
            raise UsageError(str(err)) from None
        timeout = _seconds(args, "timeout")
        return await self._wait(args, level, timeout, progress)

    async def flush(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Upload `paths` now; returns when the store has them, within `timeout` seconds."""
        return await self._wait(args, Level.SITE, _seconds(args, "timeout"), progress)

    async def resolve(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Files in trouble at or below `path`, and what `decision` (none: nothing) made of them.

        `show`: a path whose object in the store is to appear afterwards.
        """
        word = args.get("decision")
        try:
            decision = Decision(word) if word is not None else None
        except ValueError:
            raise UsageError(f"malformed request: no such decision: {word!r}") from None
        resolver = self._services.resolver
        spot = await locate(self._services, args.get("path"))
        found = [(e, t) for e in self._entries(spot) if (t := resolver.trouble(e)) is not None]
        if decision is not None:
            for entry, _ in found:
                await resolver.decide(entry, decision)
        if args.get("show") is not None:
            await self._show(args["show"])
        files = [
            {"path": absolute(self._services, t.key), "state": t.state, "reason": t.reason}
            for _, t in found
        ]
        return {"files": files}

    def _entries(self, spot: Spot) -> list[DentryRow]:
        dentries = self._services.meta.dentries
        numbers = [*([spot.dentry] if spot.dentry else []), *dentries.below(spot.row.ino)]
        return [entry for each in numbers if (entry := dentries.by_id(each)) is not None]

    async def _show(self, path: object) -> None:
        key = inside(self._services, path)
        folder = await locate(self._services, os.path.dirname(str(path)))
        await self._services.resolver.show(folder.row.ino, key)

    async def _wait(
        self, args: dict[str, Any], level: Level, timeout: float | None, progress: Progress
    ) -> dict[str, Any]:
        paths = args.get("paths")
        if not isinstance(paths, list) or not paths:
            raise UsageError("malformed request: `paths` must be a list of paths")
        return await wait_until_safe(
            self._services, self._troubles, paths, level, timeout, progress
        )

    async def unmount(self, args: dict[str, Any], progress: Progress) -> dict[str, int]:
        """Drain for `drain_timeout` seconds at most (as configured), then end the daemon."""
        timeout = _seconds(args, "drain_timeout")
        if timeout is None:
            timeout = self._services.settings.flush.drain_timeout

        async def tell(left: Remaining) -> None:
            await progress(_left(left))

        left = await drain(self._services, timeout, tell)
        self._end("unmount")
        return _left(left)

    async def upgrade(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """End the daemon so that its supervisor starts the code that is installed now."""
        if not self._services.can_upgrade():
            raise MountError(
                "this mount cannot be handed on: takeover is off, or kernel or libfuse lack it",
                hint="unmount and mount again",
            )
        if args.get("rehearse", True):
            await self._rehearse()
        self._end("upgrade")
        return {}

    async def _rehearse(self) -> None:
        if why := await self._services.objection():
            raise MountError(
                f"the code that is installed now cannot take this mount over: {why}",
                hint="nothing has changed; once that is mended try again, or unmount and mount",
            )
        if os.getppid() != self._services.parent:  # It was killed meanwhile: that took seconds.
            raise MountError(
                "its supervisor has just ended, so nobody would start the new daemon",
                hint="it serves on; `cachefs mount` with the same store and cache replaces it",
            )

    def _end(self, reason: str) -> None:
        async def soon() -> None:
            await trio.sleep(_TO_ANSWER)
            self._shutdown(reason)

        trio.lowlevel.spawn_system_task(soon)


def gathered(handlers: dict[str, Handler], small: NoSmallFiles) -> dict[str, Handler]:
    """The same, each beginning with what the tap did by itself in the namespace; none of that comes
    in between while a decision changes names."""

    def beginning(handler: Handler) -> Handler:
        async def call(args: dict[str, Any], progress: Progress) -> Any:
            small.gather()
            return await handler(args, progress)

        return call

    async def resolve(args: dict[str, Any], progress: Progress) -> Any:
        with small.withheld():
            return await handlers["resolve"](args, progress)

    return {op: beginning(handler) for op, handler in handlers.items()} | {"resolve": resolve}


def _left(remaining: Remaining) -> dict[str, int]:
    return {"files_left": remaining.files, "bytes_left": remaining.bytes}


def _seconds(args: dict[str, Any], name: str) -> float | None:
    value = args.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise UsageError(f"malformed request: `{name}` must be a number of seconds")
    return float(value)
