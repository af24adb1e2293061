"""`cachefs resolve`: a person decides about what does not go on by itself."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from cachefs.cli import output, target
from cachefs.cli.status import Json
from cachefs.errors import MountError, UsageError

PATIENCE = 300.0
"""Seconds for a decision about a tree, each file of which is looked up in the store."""


def resolve(
    path: Annotated[str, typer.Argument(help="A file in trouble, or a directory of such.")],
    keep: Annotated[
        bool, typer.Option("--keep", help="Ours is the one: publish it, over the other if need be.")
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="The store's is the one: give ours up.")
    ] = False,
    publish_as: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Publish ours under this name, show the store's here."),
    ] = None,
    json: Json = False,
) -> None:
    """Decide about files that are held, conflicted, stalled or superseded.

    Without an option nothing changes: it lists such files at or below PATH, and why.
    """
    if keep + discard + (publish_as is not None) > 1:
        raise UsageError("--keep, --discard and --publish-as exclude each other")
    found = target.find(path)
    if publish_as is not None:
        files = _publish_as(found, publish_as)
    else:
        decision = "keep" if keep else "discard" if discard else None
        files = _ask(found, decision)
    if json:
        output.print_json({"files": files})
        return
    done = "kept" if keep else "discarded" if discard else None
    done = f"to be published as {publish_as}" if publish_as is not None else done
    _tell(path, files, done)


def _ask(found: target.Target, decision: str | None, **more: Any) -> list[dict[str, Any]]:
    args = {"path": found.path, "decision": decision, **more}
    files: list[dict[str, Any]] = target.ask(found, "resolve", args, patience=PATIENCE)["files"]
    return files


def _publish_as(found: target.Target, name: str) -> list[dict[str, Any]]:
    """The renaming is an ordinary one, of this process: so the kernel knows of it."""
    new = os.path.join(os.path.dirname(found.path), name)
    if os.path.lexists(new):
        raise UsageError(f"{new} exists")
    files = _ask(found, "detach")
    if [each["path"] for each in files] != [found.path]:
        raise UsageError(f"{found.path} is not a file in trouble")
    try:
        os.rename(found.path, new)
    except OSError as error:
        raise MountError(f"cannot rename {found.path} to {new}: {error.strerror}") from None
    _ask(target.find(new), "keep", show=found.path)
    return files


def _tell(path: str, files: list[dict[str, Any]], done: str | None) -> None:
    for each in files:
        print(f"{each['path']}: {each['state']}: {done or each['reason']}")
    if not files:
        print(f"{path}: nothing to decide")
    elif done is None:
        print("decide with --keep, --discard or --publish-as NAME")
