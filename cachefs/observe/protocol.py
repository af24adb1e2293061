"""The control protocol: one JSON object a line over a unix stream socket.

Request: `{"op": str, "args": {...}}`. Answer: any number of `{"progress": {...}}` lines, then one
`{"result": ...}` or `{"error": {"message": str, "exit_code": int, "hint": str}}`. A connection may
carry several requests one after the other. Paths are absolute; names that are not UTF-8 travel with
surrogate escapes. A peer that closes its end withdraws the request that is running.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cachefs.errors import CachefsError

REQUEST_LIMIT = 1 << 20
"""Longest request line in bytes: some thousand paths."""
REPLY_LIMIT = 1 << 28
"""Longest answer line in bytes: a listing of a million names."""


class ControlError(CachefsError):
    """An operation failed in a way that has an exit code of its own.

    Handlers raise it; the client raises an equal one in the process that asked.
    """

    def __init__(self, message: str, *, exit_code: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def encode(message: Mapping[str, Any]) -> bytes:
    """One line, ASCII only. Raises TypeError for values JSON does not know."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes | bytearray) -> dict[str, Any]:
    """Inverse of `encode`. Raises ValueError when the line is no JSON object."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


def encode_error(error: CachefsError) -> bytes:
    """The `error` line for an exception."""
    body = {"message": str(error), "exit_code": error.exit_code, "hint": error.hint}
    return encode({"error": body})


def decode_error(body: object) -> ControlError:
    """The exception for the body of an `error` line, whatever its shape."""
    if not isinstance(body, dict):
        return ControlError(str(body))
    code = body.get("exit_code", 1)
    return ControlError(
        str(body.get("message", "unknown error")),
        exit_code=code if isinstance(code, int) and 0 < code < 256 else 1,
        hint=str(body.get("hint", "")),
    )
