"""Whether a checkpoint is whole by what its framework says of it, where there is no manifest.

Never by the mere presence of files: some marker must be there, which the order law and the
frameworks themselves write last, and all that an index file or a shard's own name tells of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from cachefs.model.checkpoints import is_marker

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<rest>.*)")
_DISTCP = re.compile(rb"__\d+_\d+\.distcp")


def is_index(name: str) -> bool:
    """Whether a file's text is needed to tell."""
    base = name.rpartition("/")[2]
    return base.endswith(".index.json") or base == ".metadata"


def is_whole(
    names: Collection[str], markers: Sequence[str], text_of: Callable[[str], bytes]
) -> bool:
    """Whether files of these names (below the checkpoint's directory) are all of it; `text_of`:
    the content of an index file."""
    if not any(is_marker(name.rpartition("/")[2], markers) for name in names):
        return False
    wanted = set(_shards(names))
    for name in filter(is_index, names):
        wanted |= named_in(name, text_of(name))
    return wanted <= set(names)


def _shards(names: Iterable[str]) -> Iterable[str]:
    """All of the files of which some call themselves one of several."""
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None:
            total = int(match["total"])
            first = 0 if ".data" in match["stem"] else 1  # TensorFlow counts from 0
            for number in range(first, total + first):
                yield f"{match['stem']}-{number:05d}-of-{match['total']}{match['rest']}"


def named_in(index: str, text: bytes) -> set[str]:
    """The files that an index file names, in its own directory."""
    folder = index[: index.rfind("/") + 1]
    if index.endswith(".metadata"):
        return {folder + name.decode() for name in _DISTCP.findall(text)}
    try:
        files = set(json.loads(text)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {folder + name for name in files if isinstance(name, str)}
