"""What cachefs says about a path: its state, what it survives, where it is in the bucket.

Shown as extended attributes ``user.cachefs.*`` on every path, never listed, so that tools which
copy attributes leave them alone; and used by status and ls.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachefs.cache.device import CacheDevice
from cachefs.flush.queue import BLOCKED, CONFLICTED, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow, GenerationRow, InodeRow, ObjectRow
from cachefs.model.states import GenState
from cachefs.model.survival import Level
from cachefs.vfs.opened import OpenTable

PREFIX = b"user.cachefs."

_STATES = {
    GenState.OPEN: "open",
    GenState.SEALED: "dirty",
    GenState.UPLOADING: "uploading",
    GenState.HELD: "held",
    GenState.STALLED: "stalled",
    GenState.CONFLICTED: "conflicted",
    GenState.SUPERSEDED: "superseded",
}


@dataclass(frozen=True, slots=True)
class PathInfo:
    """What is known of one path. `survives` is a level's name; sizes in bytes."""

    state: str
    survives: str
    lane: str
    url: str
    etag: str
    error: str
    dirty_bytes: int


class Inspector:
    """Answers about single paths, from the database and the queue, without a request."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        table: OpenTable,
        devices: Sequence[CacheDevice],
        store_url: str,
    ) -> None:
        """`store_url` with the prefix: the base of every object's URL."""
        self._meta = meta
        self._queue = queue
        self._table = table
        self._devices = devices
        self._base = store_url.rstrip("/")
        self.home = devices[0]
        """Where the database is: without it no cache file is anybody's."""
        self.in_warm_tier: Callable[[int], bool] = lambda gen: False
        """Whether a generation has copies on a filesystem that outlives this machine."""

    def xattr(self, row: InodeRow, name: bytes) -> bytes | None:
        """Value of a virtual attribute (full name), None if there is none of that name."""
        field = name[len(PREFIX) :].decode("ascii", "replace")
        if field not in ("state", "survives", "lane", "url", "etag", "error"):
            return None
        return str(getattr(self.describe(row), field)).encode()

    def describe(self, row: InodeRow) -> PathInfo:
        """Everything about one inode."""
        self._table.settle()
        if stat.S_ISDIR(row.mode):
            return self._describe_directory(row)
        gen = self._meta.generations.get(row.gen) if row.gen is not None else None
        effects = self._effects(row)
        objects = self._meta.objects.of_inode(row.ino)
        current = next((each for each in objects if not each.stale), None)
        opened = self._table.inodes.get(row.ino)
        state = self._state(gen, effects, current, opened is not None and opened.writing)
        dirty = row.size if state not in ("durable", "remote") else 0
        if opened is not None and opened.writing:
            opened.refresh()
            dirty = opened.size
        return PathInfo(
            state=state,
            survives=self.survives(gen, state).name.lower(),
            lane=opened.lane if opened is not None else (gen.lane if gen is not None else "none"),
            url=self._url(row, current),
            etag=current.etag if current is not None else "",
            error=self._failed_device(gen, state) or _error(gen, effects),
            dirty_bytes=dirty,
        )

    def _effects(self, row: InodeRow) -> list[EffectRow]:
        names = self._meta.dentries.of_inode(row.ino)
        return [effect for name in names for effect in self._queue.of_dentry(name.id)]

    def _state(
        self,
        gen: GenerationRow | None,
        effects: list[EffectRow],
        current: ObjectRow | None,
        writing: bool,
    ) -> str:
        if writing:
            return "open"
        if gen is not None and gen.state == GenState.HELD:
            return "held"  # whatever else is the matter with its effects
        if any(effect.state == CONFLICTED for effect in effects):
            return "conflicted"
        if any(effect.state == BLOCKED for effect in effects):
            return "stalled"
        state = GenState(gen.state) if gen is not None else GenState.DURABLE
        if state in _STATES:
            held = any(self._queue.is_held(effect.id) for effect in effects)
            return "held" if held and state is GenState.SEALED else _STATES[state]
        if effects:
            return "dirty"
        ours = current is not None and current.gen is None and current.meta is not None
        return "durable" if gen is not None or current is None or ours else "remote"

    def survives(self, gen: GenerationRow | None, state: str) -> Level:
        """What the file's bytes survive now: the best of their copies."""
        if state in ("durable", "remote"):
            return Level.SITE
        if gen is None:
            return Level.REBOOT if state == "dirty" else Level.PROCESS
        if self.in_warm_tier(gen.gen):
            return Level.INSTANCE
        if not gen.synced:  # Bytes on a disk are in memory as well as those on a RAM disk.
            return min(self._devices[gen.device].survives, Level.PROCESS)
        levels = [self._devices[gen.device].survives]
        if gen.copy_device is not None and gen.copy_size is not None:
            levels.append(self._devices[gen.copy_device].survives)
        return min(max(levels), self.home.survives)

    def _failed_device(self, gen: GenerationRow | None, state: str) -> str:
        """What is the matter with the device that alone has the file's bytes; empty: nothing."""
        if gen is None or state in ("durable", "remote") or gen.copy_size is not None:
            return ""
        device = self._devices[gen.device]
        if device.healthy:
            return ""
        return f"its cache device {device.directory} has failed: {device.failure}"

    def _describe_directory(self, row: InodeRow) -> PathInfo:
        path = self._meta.dentries.directory_path(row.ino).decode()
        dirty = any(self._queue.of_dentry(each) for each in self._meta.dentries.below(row.ino))
        pending = dirty or bool(self._effects(row))
        url = f"{self._base}/{path}/" if path else f"{self._base}/"
        level = Level.PROCESS if pending else Level.SITE
        return PathInfo(
            "dirty" if pending else "durable", level.name.lower(), "none", url, "", "", 0
        )

    def _url(self, row: InodeRow, current: ObjectRow | None) -> str:
        if current is not None:
            return f"{self._base}/{current.key}"
        names = self._meta.dentries.of_inode(row.ino)
        if not names:
            return ""
        path = self._meta.dentries.path(names[0].parent, names[0].name).decode()
        return f"{self._base}/{path}"


def _error(gen: GenerationRow | None, effects: list[EffectRow]) -> str:
    if gen is not None and gen.error:
        return gen.error
    return next((effect.error for effect in effects if effect.error), "")
