"""The flusher: takes effects from the queue when they are due and has them made visible.

It decides when, the order law (the queue) decides whether, and `Publisher` does it. Each effect in
progress is one task. Large files are sent ahead of their turn: their parts are invisible until
completed. Nothing is ever dropped for an error: passing trouble is tried again with growing,
jittered delays; a refusal stalls the effect, which is shown with its reason and tried again slowly;
a conflict waits for a person.

Invariants
- `queue.begin` before the task, `queue.finish` after it, whatever happens in between.
- A cancelled effect (deleted, superseded) stops only between requests of its own that show
  something: such a request is never abandoned halfway, so what it showed is always recorded.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import structlog
import trio

from cachefs.errors import (
    CachefsError,
    CredentialsError,
    Retry,
    StoreError,
    StoreUnreachable,
)
from cachefs.failpoints import Change
from cachefs.flush.beside import Beside
from cachefs.flush.client import StoreClient, delay
from cachefs.flush.committer import Conflict, Moot
from cachefs.flush.late import LateRequests
from cachefs.flush.publisher import Publisher
from cachefs.flush.queue import BLOCKED, CONFLICTED, PENDING, EffectQueue
from cachefs.meta import Meta
from cachefs.meta.rows import EffectRow, GenerationRow
from cachefs.model.effects import EffectKind
from cachefs.model.names import BARRIER_PATTERNS, matches
from cachefs.model.states import TRANSITIONS, Event, GenState

log = structlog.get_logger("cachefs.flush")

DELETE_BATCH = 1000
_S = 1_000_000_000
_STALL_FIRST, _STALL_MAX = 5.0, 300.0
_RECORD_TRIES, _RECORD_PAUSE = 3, 0.2
"""Tries, and seconds between them, before what the database refuses counts as stalled."""
_REST, _REST_MIN, _REST_MAX = 4.0, 0.005, 0.05
"""Rest between two looks at the queue: a multiple of what the last one cost, and limits in seconds,
so that looking never takes more than a fifth of the event loop."""
_LOOK_PAST = 64
"""Effects that are not settled yet after which the rest is not looked at."""
_SWEEP = 60.0
_OUTAGE_FIRST, _OUTAGE_MAX = 0.2, 5.0
_IDLE = 30.0
"""Seconds after which the queue is looked at even if nobody called."""
_CROWDED = 0.1
"""Seconds between looks at whether commits have room again."""


@dataclass(slots=True)
class _Trouble:
    """What went wrong with an effect so far."""

    attempts: int
    until: float


class Flusher:
    """Runs as one trio task; `run` never returns."""

    def __init__(
        self,
        meta: Meta,
        queue: EffectQueue,
        publisher: Publisher,
        client: StoreClient,
        *,
        tasks: int,
        node: str = "node",
        barriers: tuple[str, ...] = BARRIER_PATTERNS,
        on_conflict: Callable[[EffectRow], None] = lambda effect: None,
        on_retry: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`tasks`: effects in progress at a time; `node`: this node's name in conflict copies;
        `on_retry(reason)` counts tries that failed.
        """
        self._node = node
        self._meta = meta
        self._queue = queue
        self._publisher = publisher
        self._client = client
        self._late = LateRequests(meta, queue, client)
        self._beside = Beside(meta, queue, client, publisher)
        self._tasks = tasks
        self._barriers = barriers
        self._on_conflict = on_conflict
        self._on_retry = on_retry
        self._trouble: dict[int, _Trouble] = {}
        self._active = 0
        self._outage = 0.0
        self._outage_until = float("-inf")
        self._prepared: set[int] = set()
        self.paused = False
        """True while nothing new may be started."""

    async def run(self) -> None:
        """Start effects as they become due."""
        async with trio.open_nursery() as nursery:
            while True:
                began = time.monotonic()
                wait = self._look(nursery)
                cost = time.monotonic() - began
                with trio.move_on_after(wait):
                    await self._queue.changed()
                # Many changes come close together: they are looked at together.
                await trio.sleep(min(_REST_MAX, _REST_MIN + _REST * cost))

    def retry(self, effect: int) -> None:
        """Forget what went wrong with an effect: it is due at once."""
        self._trouble.pop(effect, None)
        self._queue.hurry([effect])

    async def sweep(self) -> None:
        """Now and then abort uploads that were begun for what was deleted or rewritten since."""
        while True:
            await self.sweep_now()
            await trio.sleep(_SWEEP)

    async def sweep_now(self) -> None:
        """Abort uploads of generations that no effect publishes, and delete what came late."""
        await self._publisher.multipart.sweep(lambda gen: bool(gen and self._queue.of_gen(gen)))
        await self._late.sweep()

    def _forget_gone(self) -> None:
        gone = [effect for effect in self._trouble if effect not in self._queue.effects]
        for effect in gone:
            del self._trouble[effect]
        self._prepared &= self._queue.effects.keys()

    # -- what is due --------------------------------------------------------------------------

    def _look(self, nursery: trio.Nursery) -> float:
        """Start what may be; returns seconds until the next look. Nothing is begun while there is
        no room to record it without waiting for the disk."""
        if self.paused:
            return _IDLE
        return _CROWDED if self._meta.db.crowded else self._start_due(nursery)

    def _start_due(self, nursery: trio.Nursery) -> float:
        """Start what is due; returns seconds until the next effect is."""
        if self._trouble:
            self._forget_gone()
            self._revive_stalled()
        room = self._room()
        if room <= 0:
            return self._next_trouble()
        due, wait = self._due(room)
        deletions = [effect for effect in due if effect.kind == EffectKind.UNPUBLISH]
        for effect in due:
            if effect.kind != EffectKind.UNPUBLISH:
                self._start(nursery, effect, self._show)
        self._start_deletions(nursery, deletions)
        return min(wait, self._start_ahead(nursery), self._next_trouble())

    def _room(self) -> int:
        """How many effects may be started: one while the store is out of reach, to see."""
        limit = self._tasks if trio.current_time() >= self._outage_until else 1
        return limit - self._active

    def _due(self, room: int) -> tuple[list[EffectRow], float]:
        """(what may be shown and is due, seconds until more is).

        Effects settle about in the order in which they stand, so after a number that have not yet
        there is no use in looking further.
        """
        due: list[EffectRow] = []
        wait, unsettled, started = _IDLE, 0, 0
        for effect in self._queue.committable():
            remaining = self._remaining(effect)
            if remaining > 0:
                wait = min(wait, remaining)
                unsettled += 1
            elif not self._has_busy_twin(effect, due):
                due.append(effect)
                started += effect.kind != EffectKind.UNPUBLISH
            if started >= room or unsettled >= _LOOK_PAST or len(due) >= DELETE_BATCH:
                break
        return due, wait

    def _has_busy_twin(self, effect: EffectRow, due: list[EffectRow]) -> bool:
        """Whether another name of the same content is being shown: this one is a copy of it then,
        and both would abort each other's parts."""
        if effect.gen is None:
            return False
        twins = (each for each in self._queue.of_gen(effect.gen) if each.id != effect.id)
        return any(self._queue.is_busy(each.id) or each in due for each in twins)

    def _remaining(self, effect: EffectRow) -> float:
        """Seconds until an effect may be tried: settled, its last failure long enough ago, and no
        deletion on its way to its key."""
        settle = (self._queue.settled_at(effect) - time.time_ns()) / _S
        trouble = self._trouble.get(effect.id)
        doubt = 0.0
        if effect.kind != EffectKind.UNPUBLISH:
            doubt = self._queue.doubts.remaining(self._queue.standing(effect.id).key)
        return max(settle, trouble.until - trio.current_time() if trouble else 0.0, doubt)

    def _next_trouble(self) -> float:
        until = min((each.until for each in self._trouble.values()), default=None)
        return _IDLE if until is None else max(0.01, until - trio.current_time())

    def _start(
        self,
        nursery: trio.Nursery,
        effect: EffectRow,
        work: Callable[[EffectRow], object],
    ) -> None:
        scope = trio.CancelScope()
        self._active += 1
        self._queue.begin(effect.id, scope.cancel)
        nursery.start_soon(self._run_one, effect, work, scope)

    def _start_deletions(self, nursery: trio.Nursery, effects: list[EffectRow]) -> None:
        """Markers' keys go before the others: no marker stands for what is half gone."""
        markers = [e for e in effects if e.key and matches(self._barriers, e.key)]
        chosen = (markers or effects)[:DELETE_BATCH]
        if not chosen or (not markers and self._markers_go_first()):
            return
        self._active += 1
        for effect in chosen:
            self._queue.begin(effect.id, _ignore)
        nursery.start_soon(self._run_deletions, chosen)

    def _markers_go_first(self) -> bool:
        """Whether deletions of markers are under way, or to be tried again. One that waits its turn
        holds up nobody: it may be waiting for them."""
        queue = self._queue
        return any(queue.is_busy(each) or queue.may_commit(each) for each in queue.marker_deletions)

    def _start_ahead(self, nursery: trio.Nursery) -> float:
        """Send parts of large files whose turn to become visible has not come."""
        wait = _IDLE
        for number in list(self._queue.large):
            if self._room() <= 0:
                break
            effect = self._queue.effects[number]
            if number in self._prepared or self._queue.is_busy(number) or effect.state != PENDING:
                continue
            remaining = self._remaining(effect)
            if remaining > 0:
                wait = min(wait, remaining)
            elif not self._has_busy_twin(effect, []) and self._can_go_ahead(effect):
                self._start(nursery, effect, self._send_ahead)
        return wait

    def _can_go_ahead(self, effect: EffectRow) -> bool:
        gen = self._meta.generations.get(effect.gen) if effect.gen is not None else None
        if gen is None or self._queue.is_held(effect.id):
            return False
        if gen.base is not None and self._queue.of_gen(gen.base):
            return False  # Once the store has that, most of this may be copied from it.
        return not self._publisher.plan(gen)[0].single

    # -- one effect ---------------------------------------------------------------------------

    async def _run_one(
        self, effect: EffectRow, work: Callable[[EffectRow], object], scope: trio.CancelScope
    ) -> None:
        try:
            with scope:
                await work(effect)  # type: ignore[misc]
                self._trouble.pop(effect.id, None)
                self._reached()
        except Moot:
            pass  # The queue knows better by now; what is still due comes up again.
        except Conflict as error:
            await self._conflicted(effect, error)
        except (CachefsError, OSError, sqlite3.Error) as error:
            await self._failed(effect, error)
        except Exception as error:
            log.exception("flush failed", effect=effect.id)
            await self._failed(effect, error)
        finally:
            self._active -= 1
            self._note(Change.PAUSE, lambda: self._pause_generation(effect))
            self._queue.finish(effect.id)

    async def _show(self, effect: EffectRow) -> None:
        if effect.kind == EffectKind.RELOCATE:
            await self._publisher.relocate(effect)
        else:
            await self._publisher.publish(effect)

    async def _send_ahead(self, effect: EffectRow) -> None:
        gen = self._meta.generations.get(effect.gen or 0)
        dentry = self._meta.dentries.by_id(effect.dentry or 0)
        inode = self._meta.inodes.get(dentry.ino) if dentry is not None else None
        if gen is None or dentry is None or inode is None:
            return
        self._prepared.add(effect.id)
        try:
            key = self._queue.key_of(dentry)
            await self._publisher.compare(gen, key)
            plan, base = self._publisher.plan(gen)
            await self._publisher.send_parts(inode, gen, key, plan, base)
        except BaseException:
            self._prepared.discard(effect.id)
            raise

    async def _run_deletions(self, effects: list[EffectRow]) -> None:
        try:
            failed = await self._publisher.unpublish(effects)
            for effect in effects:
                if effect.id in failed:
                    await self._failed(effect, failed[effect.id])
                else:
                    self._trouble.pop(effect.id, None)
        except StoreError as error:
            for effect in effects:
                await self._failed(effect, error)
        finally:
            self._active -= 1
            for effect in effects:
                self._queue.finish(effect.id)

    # -- trouble ------------------------------------------------------------------------------

    async def _failed(self, effect: EffectRow, error: Exception) -> None:
        """Keep everything, remember why, decide when to try again."""
        if effect.id not in self._queue.effects:
            return  # Deleted or superseded meanwhile, and its cache file with it.
        trouble = self._trouble.setdefault(effect.id, _Trouble(0, 0.0))
        passing = isinstance(error, StoreError) and error.retry not in (
            Retry.NEVER,
            Retry.SLOWLY,
        )
        if passing and isinstance(error, StoreError):
            pause = delay(trouble.attempts, error)
            with trio.CancelScope(shield=True):
                await self._client.recover(error)
        elif isinstance(error, sqlite3.Error) and trouble.attempts < _RECORD_TRIES:
            pause = _RECORD_PAUSE  # the first to meet a full disk makes the database room
        else:
            pause = min(_STALL_MAX, _STALL_FIRST * 2.0 ** min(trouble.attempts, 10))
            self._stall(effect, error)
        if isinstance(error, StoreUnreachable | CredentialsError):
            self._unreached()
        trouble.attempts += 1
        trouble.until = trio.current_time() + pause
        self._on_retry(error.outcome if isinstance(error, StoreError) else "local")
        log.info("will try again", effect=effect.id, seconds=round(pause, 2), error=str(error))

    def _unreached(self) -> None:
        """The store cannot be reached: one effect at a time tries it, with growing pauses."""
        if trio.current_time() >= self._outage_until:
            self._outage = min(_OUTAGE_MAX, max(_OUTAGE_FIRST, 2 * self._outage))
            self._outage_until = trio.current_time() + self._outage

    def _reached(self) -> None:
        """The store answers (again): what failed for its absence is due at once."""
        if self._outage:
            self._outage, self._outage_until = 0.0, float("-inf")
            for trouble in self._trouble.values():
                trouble.until = min(trouble.until, trio.current_time() + random.uniform(0, 1))

    def _note(self, change: str, step: Callable[[], None]) -> None:
        """Record how an effect stands now. A database that has no room, or a disk that fails, must
        not end the flusher: what is not recorded comes up again, and is found out again."""
        for last in (False, True):
            try:
                with self._meta.transaction(change):
                    step()
                return
            except sqlite3.Error as error:  # The first to meet a full disk makes some room.
                if last:
                    log.warning("the state of an upload could not be recorded", reason=str(error))

    def _stall(self, effect: EffectRow, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        log.warning("stalled", key=self._queue.target_key(effect), reason=reason)

        def step() -> None:
            self._queue.set_state(effect, BLOCKED, reason)
            self._set_generation(effect, Event.REFUSE, reason)

        self._note(Change.STALL, step)

    async def _conflicted(self, effect: EffectRow, error: Conflict) -> None:
        """Keep both: the other writer's version has the key, ours goes beside it."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        reason = str(error)
        try:
            kept = await self._beside.keep(effect, f".conflict-{self._node}-{stamp}")
        except (CachefsError, OSError) as trouble:
            await self._failed(effect, trouble)  # tried again as a whole
            return
        if kept is not None:
            reason = f"{reason}; ours is kept as {kept}"
        log.warning("conflict", key=self._queue.target_key(effect), reason=reason)

        def step() -> None:
            self._queue.set_state(effect, CONFLICTED, reason)
            self._set_generation(effect, Event.CONFLICT, reason)

        self._note(Change.CONFLICT, step)
        self._on_conflict(effect)

    def _revive_stalled(self) -> None:
        """Refused effects whose pause is over are pending again."""
        now = trio.current_time()
        due = [i for i, each in self._trouble.items() if each.until <= now]
        for effect in (self._queue.effects.get(i) for i in due):
            if effect is not None and effect.state == BLOCKED and not self._is_rewritten(effect):
                self._note(Change.REVIVE, partial(self._revive, effect))

    def _revive(self, effect: EffectRow) -> None:
        self._queue.set_state(effect, PENDING, effect.error)
        self._set_generation(effect, Event.RESOLVE, effect.error)

    def _is_rewritten(self, effect: EffectRow) -> bool:
        """Its generation is open again: it goes out, with the new bytes, once that is sealed."""
        gen = self._meta.generations.get(effect.gen) if effect.gen is not None else None
        return gen is not None and gen.state in (GenState.OPEN, GenState.HELD)

    def _pause_generation(self, effect: EffectRow) -> None:
        """An upload that ended without a verdict waits as a sealed generation."""
        gen = self._meta.generations.get(effect.gen) if effect.gen is not None else None
        if gen is not None and gen.state == GenState.UPLOADING:
            self._set_generation(effect, Event.PAUSE, gen.error)
            if not self._queue.of_gen(gen.gen):  # This name is gone: perhaps nothing is left to do.
                self._queue.on_unreferenced(gen.gen)

    def _set_generation(self, effect: EffectRow, event: Event, reason: str | None) -> None:
        gen = self._meta.generations.get(effect.gen) if effect.gen is not None else None
        if gen is None or (event is Event.RESOLVE and gen.state != GenState.STALLED):
            return
        after = TRANSITIONS[GenState(gen.state)].get(event)
        if after is not None:  # Another name of the same file may have met the same trouble before.
            self._meta.generations.set_state(gen.gen, after, reason)

    # -- questions ----------------------------------------------------------------------------

    def uploading(self) -> Iterable[GenerationRow]:
        """Generations whose upload is under way."""
        return self._meta.generations.in_states(GenState.UPLOADING)


def _ignore() -> None:
    """Deletions are not cancelled: a name that comes back is written after them."""
