"""What the tiers keep: their rules from the settings, applied as checkpoints come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from cachefs import config
from cachefs.config import Settings, TierSettings
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.model.retention import Rules, Verdict
from cachefs.tiers.complete import Complete
from cachefs.tiers.hot import HotRetention
from cachefs.vfs.eviction import Eviction

_INTERVAL = 1.0
_PATIENCE = 60.0
"""Seconds after which ages are looked at, though nothing has changed."""
_DUTY = 20.0
"""Looking takes one part in so many of the time at most."""


def hot_rules(tiers: TierSettings) -> Rules:
    """What the cache keeps."""
    return Rules(tiers.hot_newest, tiers.hot_every, tiers.hot_bytes, _ns(tiers.hot_age))


def warm_rules(tiers: TierSettings) -> Rules:
    """What the warm tier keeps."""
    return Rules(tiers.warm_newest, tiers.warm_every, tiers.warm_bytes, _ns(tiers.warm_age))


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


def with_rules(settings: Settings, overrides: list[str]) -> TierSettings:
    """The tiers' settings with some changed, as `tiers.key=value`. Raises ConfigError."""
    tried = config.load(None, overrides, {}, {"store.url": settings.store.url}).tiers
    changed = {key: getattr(tried, key) for key in tried.model_fields_set}
    return settings.tiers.model_copy(update=changed)


async def follow(changed: Callable[[], trio.Event], apply: Callable[[], Awaitable[object]]) -> None:
    """Apply rules after each change, and now and then; never returns."""
    while True:
        event = changed()
        await trio.sleep(_INTERVAL)
        began = trio.current_time()
        await apply()
        await trio.sleep(_DUTY * (trio.current_time() - began))
        with trio.move_on_after(_PATIENCE):
            await event.wait()


class HotTier:
    """The cache as the tier that is read first."""

    def __init__(
        self,
        settings: Settings,
        meta: Meta,
        queue: EffectQueue,
        eviction: Eviction,
        complete: Complete,
        lacks: Callable[[str], bool],
    ) -> None:
        self._queue = queue
        self.rules = hot_rules(settings.tiers)
        self._retention = HotRetention(
            meta,
            queue,
            complete,
            keeps=eviction.keeps,
            evict=eviction.evict,
            lacks=lacks,
        )

    async def run(self) -> None:
        """Let go of what the rules name; never returns."""
        if not self.rules.any:
            await trio.sleep_forever()
        await follow(self._queue.next_change, self.retain)

    async def retain(self) -> list[Verdict]:
        """Apply the rules; the verdict on each checkpoint in the cache, newest first."""
        return await self._retention.apply(self.rules)

    async def verdicts(self, rules: Rules) -> list[Verdict]:
        """What rules would do now."""
        return await self._retention.look(rules)
