"""`cachefs latest`: what to resume from."""

from __future__ import annotations

from typing import Annotated

import typer

from cachefs.cli import output, target
from cachefs.cli.status import Json

PATIENCE = 300.0
"""Seconds for looking through a bucket."""


def latest(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory of checkpoints.")],
    json: Json = False,
) -> None:
    """Print the path of the newest checkpoint that is complete and durable.

    Whoever saved it: by the manifests of all its nodes, or the framework's own index.

    Exit code 1: there is none.
    """
    found = target.find(directory)
    result = target.ask(found, "latest", {"path": found.path}, patience=PATIENCE)
    if json:
        output.print_json(result)
    else:
        print(result["path"])
