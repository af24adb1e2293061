"""`cachefs adopt`, and the Python call for it."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from cachefs.cli import output, target
from cachefs.cli.status import Json

_METHODS = {
    "link": "the file itself, no byte was copied",
    "reflink": "its blocks are shared, no byte was copied",
    "copy": "copied: it was not on a filesystem of the cache",
}


def move(source: str, destination: str) -> dict[str, Any]:
    """Have the daemon move a file into its mount; its answer. Raises CachefsError."""
    found = target.find(destination)
    args = {"src": os.path.abspath(source), "dst": found.path}
    result: dict[str, Any] = target.ask(found, "adopt", args, patience=None)
    return result


def adopt(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A finished file, anywhere.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Its path in a mount.")],
    json: Json = False,
) -> None:
    """Move a finished file from outside into a mount, without a copy where that is possible.

    It appears under its new name at once and with all its bytes, is uploaded like any other, and is
    gone from where it was.
    """
    result = move(source, destination)
    if json:
        output.print_json(result)
        return
    how = _METHODS[result["method"]]
    print(f"{destination}: {output.size(result['bytes'])}, {how}")
