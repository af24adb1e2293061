"""The request `retain`: apply what the tiers keep now, or say what some rules would do."""

from __future__ import annotations

from typing import Any, Protocol

from cachefs.daemon.keeping import hot_rules, warm_rules, with_rules
from cachefs.daemon.paths import absolute
from cachefs.daemon.services import Services
from cachefs.errors import UsageError
from cachefs.model.retention import Rules, Verdict
from cachefs.observe.control import Progress


class _Tier(Protocol):
    async def verdicts(self, rules: Rules) -> list[Verdict]: ...

    async def retain(self) -> list[Verdict]: ...


class Retaining:
    """Handler of the control socket."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def retain(self, args: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """What retention does to the checkpoints in each tier, or with `dry_run` would do, then by
        other `rules` (`tiers.key=value`) if there are any. Raises UsageError, ConfigError."""
        dry_run = bool(args.get("dry_run"))
        overrides = [str(each) for each in args.get("rules") or ()]
        if overrides and not dry_run:
            raise UsageError("rules can only be tried", hint="add --dry-run, or mount with them")
        tiers = with_rules(self._services.settings, overrides)
        hot, warm = hot_rules(tiers), warm_rules(tiers)
        tiering = self._services.tiering
        if tiering is None and not hot.any:
            raise UsageError(
                "this mount has neither a warm tier nor rules for its cache",
                hint="see the settings `tiers.warm` and `tiers.hot_newest`",
            )
        told: list[dict[str, Any]] = []
        if hot.any:
            told += await self._tell("hot", self._services.hot, hot, dry_run)
        if tiering is not None:
            told += await self._tell("warm", tiering, warm, dry_run)
        return {"checkpoints": told}

    async def _tell(
        self, name: str, tier: _Tier, rules: Rules, dry_run: bool
    ) -> list[dict[str, Any]]:
        verdicts = await (tier.verdicts(rules) if dry_run else tier.retain())
        return [
            {
                "tier": name,
                "path": absolute(self._services, each.checkpoint.root),
                "step": each.checkpoint.step,
                "bytes": each.checkpoint.nbytes,
                "removed": each.goes,
                "reason": each.reason,
            }
            for each in verdicts
        ]
