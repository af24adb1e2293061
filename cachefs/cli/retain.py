"""`cachefs retain`: what the tiers keep."""

from __future__ import annotations

from typing import Annotated

import typer

from cachefs.cli import output, target
from cachefs.cli.status import Json

PATIENCE = 600.0
"""Seconds for removing files from a network filesystem."""

Rules = Annotated[
    list[str] | None,
    typer.Option("-o", metavar="tiers.KEY=VALUE", help="With --dry-run: try another rule."),
]


def retain(
    mountpoint: Annotated[str, typer.Argument(help="A mount with a warm tier or such rules.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")
    ] = False,
    rules: Rules = None,
    json: Json = False,
) -> None:
    """Apply the retention rules (`tiers.hot_*`, `tiers.warm_*`) now.

    A checkpoint leaves the cache (hot) or the warm tier whole, and only when the next tier has all
    of it. From the store nothing is removed.
    """
    found = target.find(mountpoint)
    args = {"dry_run": dry_run, "rules": rules or []}
    told = target.ask(found, "retain", args, patience=PATIENCE)["checkpoints"]
    if json:
        output.print_json({"checkpoints": told, "dry_run": dry_run})
        return
    word = "would be removed" if dry_run else "removed"
    rows = [
        (
            each["tier"],
            each["path"],
            output.size(each["bytes"]),
            word if each["removed"] else "kept",
            each["reason"],
        )
        for each in told
    ]
    output.show(output.table(("TIER", "CHECKPOINT", "SIZE", "", "WHY"), rows))
