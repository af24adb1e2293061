"""Checkpoints as wholes: manifests, and markers that wait for other nodes.

Once nothing of a checkpoint is left to upload here, this node's manifest of it is written. When
several nodes save a checkpoint together (`checkpoint.nodes`), a marker must not show before all of
their data does. No clock is trusted for that: a node whose marker is otherwise free to go puts a
question into the bucket, and each node answers it in its manifest, after having seen it, as soon as
all that was closed there at that moment is in the store. Frameworks write the marker after every
node has returned from saving, so what was closed by then is all there is.

What a marker stands for: the checkpoint that it lies in; outside of any, those beside it or below
that this node has saved since the last such marker, and the one that its own text names.

Invariants: on the trio thread; nothing here holds up anything but markers; a question outlives
neither its marker nor, but for the object, its daemon (the next one asks anew).
"""

from __future__ import annotations

import functools
import json
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import trio

from cachefs.errors import NotFound, StoreError
from cachefs.flush.client import StoreClient
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow
from cachefs.model import checkpoints
from cachefs.model.effects import EffectClass, EffectKind
from cachefs.model.manifests import (
    ASKS,
    CHECKPOINTS,
    Ask,
    Manifest,
    Part,
    Unreadable,
    ask_key,
    decode_ask,
    decode_manifest,
    encode,
    is_whole,
    manifest_key,
)
from cachefs.model.names import is_temp
from cachefs.store.base import Listing, ObjectInfo

log = structlog.get_logger("cachefs.flush")

_PAUSE = 0.2
"""Seconds between looks at a queue that changes all the time."""
_POLL, _POLL_IDLE = 0.5, 4.0
"""Seconds between looks for questions and answers, soon after a save here, and else."""
_RETRY = 5.0
_AT_A_TIME = 64
_REST = 5.0
"""Rest after a look, as a multiple of what it cost."""
_ACTIVE = 600.0
_REMEMBERED = 10_000
_ANSWERS = 16
_UNSHOWN = 64
"""Checkpoints that the next marker beside them stands for: the last ones."""
_SETTING = "unshown_checkpoints"


@dataclass(slots=True)
class _Waiting:
    """A marker that waits for other nodes."""

    ask: Ask
    sent: bool = False
    lacking: dict[str, int] = field(default_factory=dict)
    """Checkpoint -> nodes that have not answered."""
    passed: bool = False
    is_outside: bool = False
    """It lies in none of the checkpoints that it stands for."""


class Commits:
    """See the module docstring."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        client: StoreClient,
        *,
        node: str,
        nodes: int,
        patterns: Sequence[str],
        markers: Sequence[str],
        temps: Sequence[str],
        open_keys: Callable[[], Collection[str]],
        text_of: Callable[[EffectRow], bytes],
    ) -> None:
        """`open_keys`: paths of files that are being written; `text_of`: the first bytes of what an
        effect publishes."""
        self._meta = meta
        self._queue = queue
        self._client = client
        self._node = node
        self._nodes = nodes
        self._markers = tuple(markers)
        self._temps = tuple(temps)
        self._open_keys = open_keys
        self._text_of = text_of
        self._noted: dict[str, None] = {}
        """Keys that are still to be looked at."""
        self._changed: set[str] = set()
        """Checkpoints whose manifest is not what it should be."""
        self._unshown: dict[str, None] = dict.fromkeys(json.loads(meta.setting(_SETTING) or "[]"))
        self._waiting: dict[int, _Waiting] = {}
        self._asked: dict[str, tuple[Ask, int]] = {}
        """Others' questions by key, each with the number of the first effect after it was seen."""
        self._answered: dict[str, set[str]] = {}
        """Key of a question -> checkpoints for which it is answered."""
        self._answers: dict[str, list[str]] = {}
        """Checkpoint -> numbers of questions that its manifest is to name."""
        self._manifests: dict[str, tuple[str, Manifest]] = {}
        """Key -> etag and content, as last read."""
        self._active_until = -math.inf

        @functools.lru_cache(_REMEMBERED)
        def find(key: str) -> str | None:
            return checkpoints.checkpoint_root(key, patterns)

        self._find = find
        queue.on_standing = self._note
        for row in queue.effects.values():
            self._note(row, queue.standing(row.id).key)

    # -- what is going on here ----------------------------------------------------------------

    def _note(self, row: EffectRow, key: str) -> None:
        """An effect stands in line, under that key now."""
        if self._nodes < 2:
            self._noted[key.rstrip("/")] = None  # Looked at later: this is in everybody's way.
            return
        root = self._root(key.rstrip("/"))
        if root is None:
            return
        self._changed.add(root)
        self._active_until = time.monotonic() + _ACTIVE
        if root not in self._unshown and row.kind != EffectKind.UNPUBLISH:
            self._unshown[root] = None
            while len(self._unshown) > _UNSHOWN:
                del self._unshown[next(iter(self._unshown))]
            self._remember()

    def _root(self, key: str) -> str | None:
        """The checkpoint of a key. Most are known by their directory."""
        folder = key.rpartition("/")[0]
        return (self._find(folder) if folder else None) or self._find(key)

    def _remember(self) -> None:
        self._meta.set_setting(_SETTING, json.dumps(list(self._unshown)))

    def _is_marker(self, key: str) -> bool:
        return checkpoints.is_marker(key.rstrip("/").rpartition("/")[2], self._markers)

    def may_pass(self, row: EffectRow) -> bool:
        """Whether a barrier that is free to go here need not wait for other nodes (any more)."""
        if self._nodes < 2:
            return True
        waiting = self._waiting.get(row.id)
        if waiting is not None:
            return waiting.passed
        key = self._queue.standing(row.id).key
        roots = self._stands_for(row, key) if self._is_marker(key) else ()
        if not roots:
            return True
        ask = Ask(uuid.uuid4().hex, self._node, tuple(roots))
        lacking = dict.fromkeys(roots, self._nodes - 1)
        outside = self._find(key) is None
        self._waiting[row.id] = _Waiting(ask, lacking=lacking, is_outside=outside)
        self._queue.kick()
        return False

    def _stands_for(self, row: EffectRow, key: str) -> list[str]:
        inside = self._find(key)
        if inside is not None:
            return [inside]
        folder = key.rpartition("/")[0]
        below = folder + "/" if folder else ""
        found = {root for root in self._unshown if root.startswith(below)}
        named = self._text_of(row).decode("utf-8", "replace").strip()
        for path in (named, below + named, below + named.rpartition("/")[2]):
            if named and len(named) < 256 and self._find(path) == path:
                found.add(path)
        return sorted(found)

    def lacks(self, row: EffectRow) -> int:
        """How many nodes a marker waits for."""
        waiting = self._waiting.get(row.id)
        if waiting is None or waiting.passed:
            return 0
        return max(waiting.lacking.values(), default=0)

    # -- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Write manifests, ask and answer, until cancelled."""
        next_poll = -math.inf
        while True:
            idle = next_poll - time.monotonic() if self._nodes > 1 else _RETRY
            with trio.move_on_after(
                max(0.0, idle) if self._nodes > 1 or self._changed else math.inf
            ):
                await self._queue.changed()
            await trio.sleep(_PAUSE)
            try:
                began = time.thread_time()
                await self.write_due()
                await trio.sleep(_REST * (time.thread_time() - began))
                if self._nodes > 1 and (self._waiting or time.monotonic() >= next_poll):
                    await self._confer()
            except StoreError as error:
                log.info("checkpoints are not settled with other nodes", reason=str(error))
            is_active = self._waiting or time.monotonic() < self._active_until
            next_poll = time.monotonic() + (_POLL if is_active else _POLL_IDLE)

    async def write_due(self) -> None:
        """Bring the manifests of checkpoints of which nothing is left here to the bucket."""
        noted, self._noted = self._noted, {}
        for count, key in enumerate(noted):
            if (root := self._root(key)) is not None:
                self._changed.add(root)
            if count % _AT_A_TIME == 0:
                await trio.lowlevel.checkpoint()
        due = set(sorted(self._changed)[:_AT_A_TIME])
        for root in sorted(due - (self._busy_roots(math.inf, due) if due else set())):
            await self._write(root)

    def _busy_roots(self, number: float, among: Collection[str]) -> set[str]:
        """Those of some checkpoints of which something that ended before `number`, or is being
        written, is left. Markers that wait for other nodes do not count, nor what waits for them.
        """
        beginnings = tuple(among)
        gates = [
            self._queue.standing(each).end
            for each, waiting in self._waiting.items()
            if each in self._queue.effects and not waiting.passed
        ]
        gate = min(gates, default=math.inf)
        busy = {self._root(key) for key in self._open_keys() if not is_temp(self._temps, key)}
        for row in self._queue.effects.values():
            standing = self._queue.standing(row.id)
            if not standing.key.startswith(beginnings):
                continue  # Almost all of a long queue: they cost no more than this.
            if standing.end >= number or standing.held:
                continue
            if standing.end >= gate and standing.klass == EffectClass.BARRIER:
                continue
            busy.add(self._root(standing.key.rstrip("/")))
        return {root for root in busy if root is not None}

    async def _write(self, root: str) -> None:
        key = manifest_key(root, self._node)
        self._changed.discard(root)
        parts = self._parts(root)
        try:
            if parts or self._answers.get(root):
                answers = tuple(self._answers.get(root, ())[-_ANSWERS:])
                manifest = Manifest(root, self._node, self._nodes, time.time(), parts, answers)
                await self._client.patiently("put", key=key, body=encode(manifest), metadata={})
            else:
                await self._client.call("delete", keys=[key])
        except StoreError:
            self._changed.add(root)
            raise

    def _parts(self, root: str) -> tuple[Part, ...]:
        own = self._meta.objects.get(root)
        rows = [*([own] if own is not None else []), *self._meta.objects.below(root)]
        return tuple(
            Part(row.key, row.size, row.etag)
            for row in {row.key: row for row in rows}.values()
            if row.dentry is not None
            and row.etag
            and not row.key.endswith("/")
            and self._root(row.key) == root
            # Of several nodes each lists what it wrote itself.
            and (self._nodes == 1 or row.meta is not None)
        )

    # -- among nodes --------------------------------------------------------------------------

    async def _confer(self) -> None:
        await self._forget_done()
        for waiting in list(self._waiting.values()):
            if not waiting.passed:
                await self._pursue(waiting)
        await self._read_asks()
        await self._answer()

    async def _forget_done(self) -> None:
        """Questions whose markers have gone, one way or the other."""
        for row_id in [each for each in self._waiting if each not in self._queue.effects]:
            waiting = self._waiting.pop(row_id)
            if waiting.passed and waiting.is_outside:
                self._shown(waiting)
            elif waiting.sent and not waiting.passed:
                await self._client.call("delete", keys=[ask_key(waiting.ask)])

    def _shown(self, waiting: _Waiting) -> None:
        """The next marker beside them need not stand for them again."""
        left = [root for root in self._unshown if root not in waiting.ask.paths]
        if len(left) != len(self._unshown):
            self._unshown = dict.fromkeys(left)
            self._remember()

    async def _pursue(self, waiting: _Waiting) -> None:
        if not waiting.sent:
            for root in waiting.ask.paths:
                await self._write(root)
            body = encode(waiting.ask)
            await self._client.call("put", key=ask_key(waiting.ask), body=body, metadata={})
            waiting.sent = True
        for root in waiting.ask.paths:
            found = await self._read_manifests(root)
            done = {each.node for each in found if waiting.ask.number in each.answers}
            waiting.lacking[root] = max(0, self._nodes - len(done | {self._node}))
        if not any(waiting.lacking.values()):
            waiting.passed = True
            self._queue.kick()
            await self._client.call("delete", keys=[ask_key(waiting.ask)])

    def is_pending(self, root: str) -> bool:
        """Whether anything of a checkpoint is still to be uploaded here, or being written."""
        keys = [self._queue.standing(row.id).key for row in self._queue.effects.values()]
        near = (key for key in (*keys, *self._open_keys()) if key.startswith(root))
        return any(self._root(key.rstrip("/")) == root for key in near)

    async def held(self, root: str) -> dict[str, ObjectInfo]:
        """What the bucket holds of a checkpoint, by key. Raises StoreError."""
        found = {self._client.relative(item.key): item for item in await self._list(root)}
        return {
            key: item
            for key, item in found.items()
            if not key.endswith("/") and self._root(key) == root
        }

    async def read(self, key: str, limit: int) -> bytes:
        """The first bytes of an object. Raises StoreError."""
        body: bytes = await self._client.call("get_bytes", key=key, start=0, end=limit)
        return body

    async def elsewhere(self, root: str) -> list[Part] | None:
        """What other nodes have said to have saved of a checkpoint; None before all have spoken.

        Raises StoreError.
        """
        found = {each.node: each for each in await self._read_manifests(root)}
        if len(found.keys() | {self._node}) < self._nodes:
            return None
        return [part for node, each in found.items() if node != self._node for part in each.files]

    async def verdict(self, root: str, held: Mapping[str, ObjectInfo]) -> bool | None:
        """Whether that is all of it by the manifests; None without any. Raises StoreError."""
        found = await self._read_manifests(root)
        if not found:
            return None
        return is_whole(found, {key: item.etag for key, item in held.items()})

    async def _read_manifests(self, root: str) -> list[Manifest]:
        found = []
        for item in await self._list(f"{CHECKPOINTS}{root}/"):
            key = self._client.relative(item.key)
            known = self._manifests.get(key)
            if known is None or known[0] != item.etag:
                try:
                    body = await self._client.call("get_bytes", key=key)
                    known = item.etag, decode_manifest(body)
                except (NotFound, Unreadable):
                    continue
                self._manifests[key] = known
                if len(self._manifests) > _REMEMBERED:
                    self._manifests.clear()
            if known[1].path == root:
                found.append(known[1])
        return found

    async def _read_asks(self) -> None:
        keys = {self._client.relative(item.key) for item in await self._list(ASKS)}
        for gone in self._asked.keys() - keys:
            del self._asked[gone]
            self._answered.pop(gone, None)
        for key in keys - self._asked.keys():
            number = self._queue.next_number
            try:
                ask = decode_ask(await self._client.call("get_bytes", key=key))
            except (NotFound, Unreadable):
                continue
            if ask.node != self._node:
                # What ended while the question was read is waited for as well.
                self._asked[key] = ask, max(number, self._queue.next_number)
            elif all(ask.number != each.ask.number for each in self._waiting.values()):
                await self._client.call("delete", keys=[key])  # of a daemon before this one

    async def _answer(self) -> None:
        for key, (ask, number) in list(self._asked.items()):
            done = self._answered.setdefault(key, set())
            due = set(ask.paths) - done
            for root in sorted(due - (self._busy_roots(number, due) if due else set())):
                self._answers.setdefault(root, []).append(ask.number)
                await self._write(root)
                done.add(root)

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        items: list[ObjectInfo] = []
        token: str | None = None
        while True:
            page: Listing = await self._client.call(
                "list", prefix=prefix, delimiter=None, token=token
            )
            items += page.objects
            token = page.next_token
            if token is None:
                return items
