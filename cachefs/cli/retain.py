"""`cachefs retain`: what the warm tier keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from cachefs.cli import output, target
from cachefs.cli.status import Json

PATIENCE = 600.0
"""Seconds for removing files from a network filesystem."""


def retain(
    mountpoint: Annotated[str, typer.Argument(help="A mount with a warm tier.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Apply the retention rules of the warm tier (`tiers.warm_*`) now.

    A checkpoint is removed whole, only from the warm tier, and only when the store has all of it.
    """
    found = target.find(mountpoint)
    told = target.ask(found, "retain", {"dry_run": dry_run}, patience=PATIENCE)["checkpoints"]
    if json:
        output.print_json({"checkpoints": told, "dry_run": dry_run})
        return
    word = "would be removed" if dry_run else "removed"
    rows = [
        (
            each["path"],
            output.size(each["bytes"]),
            word if each["removed"] else "kept",
            each["reason"],
        )
        for each in told
    ]
    output.show(output.table(("CHECKPOINT", "SIZE", "", "WHY"), rows))
