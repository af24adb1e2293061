"""What holds uploads back in this mount, put together: `flush.pressure` with what it asks about."""

from __future__ import annotations

from collections.abc import Sequence

from cachefs.cache.ledger import SpaceLedger
from cachefs.config import FlushSettings, Settings
from cachefs.flush.pacing import Pacing
from cachefs.flush.pressure import Haste, Kindness, Restraint
from cachefs.flush.queue import EffectQueue
from cachefs.meta import Meta
from cachefs.meta.summary import Summary
from cachefs.vfs.contents import Contents
from cachefs.vfs.sealing import Sealed


def make_restraint(
    settings: Settings,
    meta: Meta,
    queue: EffectQueue,
    pacing: Pacing,
    contents: Contents,
    ledgers: Sequence[SpaceLedger],
) -> Restraint:
    """The restraint of one mount. It is told of files that are closed, besides who is told now."""

    def haste() -> Haste:
        full = any(ledger.exhausted for ledger in ledgers)
        return Haste(leaving=full or not queue.settles, awaited=queue.is_hurried)

    restraint = Restraint(
        Kindness(
            concurrency=settings.flush.concurrency,
            thresholds=thresholds(settings.flush),
            bandwidth=settings.flush.bandwidth_limit,
            spread=settings.flush.spread,
            significant=settings.order.data_min_size,
        ),
        pacing,
        backlog=lambda: Summary(meta.db).dirty()[1],
        haste=haste,
    )
    if settings.flush.spread:
        _listen(restraint, contents)
    return restraint


def _listen(restraint: Restraint, contents: Contents) -> None:
    others = contents.on_sealed

    def sealed(what: Sealed) -> None:
        others(what)
        restraint.sealed(what.size)

    contents.on_sealed = sealed


def thresholds(flush: FlushSettings) -> dict[str, float]:
    """Resource -> share of waiting that is acceptable, for what is to be looked at."""
    shares = {"io": flush.pressure_io, "cpu": flush.pressure_cpu}
    return {name: share for name, share in shares.items() if flush.pressure in (name, "both")}
