"""Manifests: what a node says of its part of a checkpoint, in the bucket beside it.

    .cachefs/ckpt/<checkpoint>/<node>.json   everything listed in it is in the bucket
    .cachefs/asks/<node>-<number>.json       a node that has a marker to show asks the others
                                             whether anything is left there in some checkpoints

A manifest names the questions that it answers: it was written after its node had seen them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cachefs.model.names import RESERVED

CHECKPOINTS = f"{RESERVED}ckpt/"
ASKS = f"{RESERVED}asks/"
_FORMAT = 1


class Unreadable(ValueError):
    """No manifest, or one of a later format."""


@dataclass(frozen=True, slots=True)
class Part:
    """One object of a checkpoint. `size` in bytes."""

    key: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One node's part of a checkpoint."""

    path: str
    """The checkpoint's, below the store's prefix."""
    node: str
    nodes: int
    """How many nodes save it together."""
    written: float
    """Seconds since the epoch, by the node's clock; for people."""
    files: tuple[Part, ...]
    answers: tuple[str, ...] = ()
    """Questions that were seen before it was written."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Has anybody anything left to upload in these checkpoints?"""

    number: str
    node: str
    paths: tuple[str, ...]


def manifest_key(path: str, node: str) -> str:
    """Where a node's manifest of a checkpoint is."""
    return f"{CHECKPOINTS}{path}/{node}.json"


def ask_key(ask: Ask) -> str:
    """Where a question is."""
    return f"{ASKS}{ask.node}-{ask.number}.json"


def encode(what: Manifest | Ask) -> bytes:
    """As the body of an object."""
    return json.dumps({"format": _FORMAT, **asdict(what)}, indent=1).encode() + b"\n"


def decode_manifest(body: bytes) -> Manifest:
    """Raises Unreadable."""
    try:
        values = _values(body)
        files = tuple(
            Part(each["key"], int(each["size"]), each["etag"]) for each in values["files"]
        )
        return Manifest(
            values["path"], values["node"], int(values["nodes"]), float(values["written"]),
            files, tuple(values["answers"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(str(error)) from None


def decode_ask(body: bytes) -> Ask:
    """Raises Unreadable."""
    try:
        values = _values(body)
        return Ask(values["number"], values["node"], tuple(values["paths"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(str(error)) from None


def _values(body: bytes) -> dict[str, Any]:
    values = json.loads(body)
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise Unreadable("not of a format that is known here")
    return values


def is_whole(found: Iterable[Manifest], held: Mapping[str, str]) -> bool:
    """Whether all nodes have said that they are done, and all that they list is there; `held`: key
    -> etag of what the bucket holds."""
    by_node = {each.node: each for each in found}
    if not by_node or len(by_node) < max(each.nodes for each in by_node.values()):
        return False
    files = [part for each in by_node.values() for part in each.files]
    return bool(files) and all(held.get(part.key) == part.etag for part in files)
