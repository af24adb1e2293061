"""File attributes as user metadata of objects, in the form that s3fs and rclone use.

``mode`` (decimal, with type bits), ``uid``, ``gid``, ``mtime`` (seconds with decimals) and, when a
file has any, ``xattr``: the percent-encoded JSON object {name: base64 of the value} of s3fs
(https://github.com/s3fs-fuse/s3fs-fuse). What comes back from a bucket may have been written by
anybody: values that make no sense are as if absent.
"""

from __future__ import annotations

import base64
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

XATTR_LIMIT = 1024
"""Bytes that all extended attributes of a file may take in encoded form: S3 allows 2 KB of user
metadata in all."""

_NUMBER = re.compile(r"[0-9]{1,10}")
_SECONDS = re.compile(r"(-?[0-9]{1,12})(?:\.([0-9]{1,12}))?")
_ID_LIMIT = 0xFFFFFFFE
_TYPES = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}


@dataclass(frozen=True, slots=True)
class FileAttributes:
    """What an object says about the file it holds; None where it says nothing sensible."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


def encode(
    mode: int, uid: int, gid: int, mtime_ns: int, xattrs: Iterable[tuple[bytes, bytes]] = ()
) -> dict[str, str]:
    """User metadata of an object."""
    seconds, rest = divmod(mtime_ns, 1_000_000_000)
    fields = {
        "mode": str(mode),
        "uid": str(uid),
        "gid": str(gid),
        "mtime": f"{seconds}.{rest:09d}",
    }
    blob = encode_xattrs(xattrs)
    if blob:
        fields["xattr"] = blob
    return fields


def encode_xattrs(xattrs: Iterable[tuple[bytes, bytes]]) -> str:
    """Extended attributes in encoded form, empty when there are none."""
    values = {
        name.decode("utf-8", "surrogateescape"): base64.b64encode(value).decode("ascii")
        for name, value in sorted(xattrs)
    }
    if not values:
        return ""
    return quote(json.dumps(values, separators=(",", ":")), safe="")


def decode(fields: Mapping[str, str]) -> FileAttributes:
    """File attributes from an object's user metadata (names in lower case)."""
    return FileAttributes(
        mode=_mode(fields.get("mode", "")),
        uid=_id(fields.get("uid", "")),
        gid=_id(fields.get("gid", "")),
        mtime_ns=_time(fields.get("mtime", "")),
        xattrs=_xattrs(fields.get("xattr", "")),
    )


def _mode(text: str) -> int | None:
    if not _NUMBER.fullmatch(text):
        return None
    mode = int(text)
    if stat.S_IFMT(mode) == 0:
        mode |= stat.S_IFREG
    return mode if mode <= 0o177777 and stat.S_IFMT(mode) in _TYPES else None


def _id(text: str) -> int | None:
    if not _NUMBER.fullmatch(text):
        return None
    number = int(text)
    return number if number <= _ID_LIMIT else None


def _time(text: str) -> int | None:
    match = _SECONDS.fullmatch(text)
    if match is None:
        return None
    seconds, decimals = match.groups()
    nanoseconds = int(((decimals or "") + "000000000")[:9])
    total = int(seconds) * 1_000_000_000 + nanoseconds
    return total if abs(total) < 1 << 62 else None


def _xattrs(blob: str) -> tuple[tuple[bytes, bytes], ...]:
    if not blob or len(blob) > 4 * XATTR_LIMIT:
        return ()
    try:
        values = json.loads(unquote(blob))
    except (ValueError, RecursionError):
        return ()
    if not isinstance(values, dict):
        return ()
    pairs = (_xattr(name, value) for name, value in values.items())
    return tuple(sorted(pair for pair in pairs if pair is not None))


def _xattr(name: object, value: object) -> tuple[bytes, bytes] | None:
    if not isinstance(name, str) or not isinstance(value, str):
        return None
    if not name.startswith("user.") or name.startswith("user.cachefs.") or "\0" in name:
        return None
    try:
        raw = name.encode("utf-8", "surrogateescape")
        return (raw, base64.b64decode(value, validate=True)) if len(raw) <= 255 else None
    except ValueError:
        return None
