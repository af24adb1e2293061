"""Brings content to the warm tier under hidden names, and reads what signs say."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Sequence

import trio

from cachefs.cache.device import BLOCK_UNIT, CacheDevice
from cachefs.cache.warmdir import Attributes, WarmDirectory, first_bytes
from cachefs.errors import NO_SPACE
from cachefs.meta import Meta
from cachefs.meta.warm import WantedRow
from cachefs.model import checkpoints, indexes
from cachefs.tiers.complete import Sign
from cachefs.tiers.plan import Copy, shown

_AT_ONCE = 4
"""Files that are staged at a time."""
_INDEX_MAX = 64 << 20


class Stager:
    """Stages copies; they are named by their dentries."""

    def __init__(
        self, meta: Meta, devices: Sequence[CacheDevice], directory: WarmDirectory
    ) -> None:
        self._meta = meta
        self._devices = devices
        self._directory = directory
        self.on_staged: Callable[[], None] = lambda: None
        """Called after each file, as a sign of life."""
        self.no_room: OSError | None = None
        self.left: list[Copy] = []
        """Both until `begin`."""

    def begin(self) -> None:
        """A round begins."""
        self.no_room, self.left = None, []

    async def stage_all(self, copies: Sequence[Copy]) -> set[int]:
        """The names whose content is staged, and still is what it was in the plan.

        After an error nothing more is begun, and it is raised; but where it says that there is no
        room, it is kept in `no_room`, and what found none, or was not begun, in `left`.
        """
        staged: set[int] = set()
        errors: list[OSError] = []
        left: list[Copy] = []
        waiting = iter(copies)

        async def work() -> None:
            for copy in waiting:
                if errors:
                    left.append(copy)
                    continue
                try:
                    if await self._stage(copy):
                        staged.add(copy.dentry)
                    self.on_staged()
                except OSError as error:
                    errors.append(error)
                    left.append(copy)

        async with trio.open_nursery() as nursery:
            for _ in range(min(_AT_ONCE, len(copies))):
                nursery.start_soon(work)
        for error in errors:
            if error.errno not in NO_SPACE:
                raise error
        if errors:
            self.no_room = errors[0]
            self.left += [each for each in copies if each in left]
        return staged

    async def _stage(self, copy: Copy) -> bool:
        wanted = copy.wanted
        name = str(copy.dentry)
        if wanted.target is not None:
            await trio.to_thread.run_sync(self._directory.stage_link, name, wanted.target)
            return True
        if copy.moved:
            return await trio.to_thread.run_sync(self._stage_moved, copy)
        if await self._stage_file(wanted):
            return True
        await trio.to_thread.run_sync(self._directory.drop, name)
        return False

    def _stage_moved(self, copy: Copy) -> bool:
        """In a thread. It may have been shown by a daemon that had no time to say so."""
        assert copy.old is not None
        name, old = str(copy.dentry), shown(copy.old)
        there = type(old)(copy.path, old.size, old.mtime_ns)
        return any(self._directory.stage_again(name, place) for place in (old, there))

    async def _stage_file(self, wanted: WantedRow) -> bool:
        inode = self._meta.inodes.get(wanted.ino)
        if inode is None or not self._is_current(wanted):
            return False
        attributes = Attributes(
            stat.S_IMODE(inode.mode), inode.uid, inode.gid, inode.atime_ns, inode.mtime_ns
        )
        name, source = str(wanted.dentry), self._source(wanted)
        stage = self._directory.stage
        try:
            await trio.to_thread.run_sync(stage, name, source, wanted.size, attributes)
        except OSError:
            if self._is_current(wanted):
                raise  # Not because the cache file went away meanwhile.
        return self._is_current(wanted)

    def allocated(self, copies: Iterable[Copy]) -> int:
        """In a thread: bytes that these take on a disk."""
        found = 0
        for copy in copies:
            if copy.wanted.target is None and not copy.moved:
                with contextlib.suppress(OSError):
                    found += os.stat(self._source(copy.wanted)).st_blocks * BLOCK_UNIT
        return found

    def _source(self, wanted: WantedRow) -> str:
        return self._devices[wanted.device].path(wanted.file)

    def _is_current(self, wanted: WantedRow) -> bool:
        """Whether the content of the plan still is the name's, in the same cache file."""
        gen = self._meta.generations.current(wanted.ino)
        entry = self._meta.dentries.by_id(wanted.dentry)
        if gen is None or entry is None or entry.ino != wanted.ino:
            return False
        as_planned = (gen.gen, gen.file, gen.device) == (wanted.gen, wanted.file, wanted.device)
        return as_planned and not self.is_rewritten(wanted)

    def is_rewritten(self, wanted: WantedRow) -> bool:
        """Whether the generation of the plan has been written to since: it may be the same one with
        other bytes."""
        gen = self._meta.generations.get(wanted.gen)
        return gen is not None and (gen.sealed_ns or 0) != wanted.ended_ns

    # -- signs --------------------------------------------------------------------------------

    def read(self, copy: Copy) -> Sign:
        """In a thread: what a sign tells of."""
        limit = _INDEX_MAX if indexes.is_index(copy.path) else checkpoints.POINTER_MAX
        text = self._text_of(copy, limit)
        shards: frozenset[str] = frozenset()
        if copy.wanted.target is None and indexes.is_index(copy.path):
            named = indexes.named_in(copy.path, text)
            shards = frozenset(posixpath.normpath(path) for path in named)
        beginning = text[: checkpoints.POINTER_MAX].decode("utf-8", "replace")
        return Sign(copy.dentry, copy.path, copy.wanted.gen, beginning, shards)

    def _text_of(self, copy: Copy, limit: int) -> bytes:
        if copy.wanted.target is not None:
            return copy.wanted.target
        if copy.moved:
            return self._directory.staged_text_of(str(copy.dentry), limit)
        return first_bytes(os.fsencode(self._source(copy.wanted)), limit)
