"""Compares a bucket with the tree it should mirror."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from tests.support.bucket import Bucket

Tree = dict[str, dict[str, Any]]
"""Relative path -> what `actor.describe` tells of it."""


def _nothing(_path: str) -> bool:
    return False


def differences(tree: Tree, bucket: Bucket, *, skip: Callable[[str], bool] = _nothing) -> list[str]:
    """What in the bucket is not as the tree says; empty when all is well.

    Regular files and symbolic links have one object each, with mode, uid, gid and mtime; empty
    directories have a marker; nothing else is there but markers of directories that exist.
    """
    found: list[str] = []
    keys = set(bucket.sizes())
    expected: set[str] = set()
    for path, told in tree.items():
        kind = told["type"]
        if kind == stat.S_IFDIR:
            if not any(other.startswith(path + "/") for other in tree) and path + "/" not in keys:
                found.append(f"{path}/: no marker for an empty directory")
            keys.discard(path + "/")
            continue
        if skip(path) or kind not in (stat.S_IFREG, stat.S_IFLNK):
            keys.discard(path)
            continue
        expected.add(path)
        if path not in keys:
            found.append(f"{path}: missing")
        else:
            found += [f"{path}: {why}" for why in _object(told, bucket, path)]
    return found + [f"{key}: should not be there" for key in sorted(keys - expected)]


def _object(told: dict[str, Any], bucket: Bucket, key: str) -> list[str]:
    body = bucket.get(key)
    kind = told["type"]
    if kind == stat.S_IFLNK:
        if body != told["target"].encode():
            return [f"holds {body[:50]!r}, not the link's target {told['target']!r}"]
    elif hashlib.sha1(body).hexdigest()[:16] != told["sha"]:
        return [f"other content ({len(body)} bytes, file has {told['size']})"]
    return _attributes(told, bucket, key)


def _attributes(told: dict[str, Any], bucket: Bucket, key: str) -> list[str]:
    try:
        seen = bucket.attributes(key)
        mtime = Decimal(bucket.metadata(key)["mtime"])
    except KeyError as missing:
        return [f"no metadata entry {missing}"]
    wrong = []
    wanted = told["type"] | told["mode"]
    if seen.mode != wanted:
        wrong.append(f"mode {seen.mode:o}, file has {wanted:o}")
    if (seen.uid, seen.gid) != (told["uid"], told["gid"]):
        wrong.append(f"owner {seen.uid}:{seen.gid}, file has {told['uid']}:{told['gid']}")
    if abs(mtime - Decimal(told["mtime"]) / 10**9) > Decimal("0.000001"):
        wrong.append(f"mtime {mtime}, file has {told['mtime']} ns")
    return wrong
