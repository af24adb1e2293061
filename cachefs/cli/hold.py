"""`cachefs warm`, `evict`, `pin`, `unpin`: what is in the cache, and what stays there."""

from __future__ import annotations

from typing import Any

from cachefs.cli import output
from cachefs.cli.status import Json
from cachefs.cli.wait import Paths, run

_REASONS = {
    "dirty": "not in the store yet",
    "open": "open",
    "pinned": "pinned",
    "uncopied": "not in the warm tier yet",
}


def warm(paths: Paths, json: Json = False) -> None:
    """Fetch files and trees into the cache, so that reading them needs no store.

    Exit codes: 0 all is there; 1 something is missing, does not fit, or cannot be had.
    """
    run("warm", paths, {}, None, "fetched", json)


def evict(paths: Paths, json: Json = False) -> None:
    """Give back the space of files and trees that the store holds.

    Stays: what is not in the store yet, open or pinned.
    """
    results = run("evict", paths, {}, None, "evicted", json)
    kept = [item for result in results for item in result["kept"].items()]
    if not json:
        for reason, files in kept:
            print(f"kept: {output.count(files, 'file')} {_REASONS.get(reason, reason)}")


def pin(paths: Paths, json: Json = False) -> None:
    """Fetch files and trees, and never evict them, nor what comes to be in them later."""
    run("pin", paths, {}, None, "pinned; fetched", json)


def unpin(paths: Paths, json: Json = False) -> None:
    """Take back the pins of paths and of all below them: they may be evicted again."""
    results: list[dict[str, Any]] = run("unpin", paths, {}, None, None, json)
    if not json:
        for result in results:
            for path in result["paths"]:
                print(f"{path}: unpinned")
