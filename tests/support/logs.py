"""Which lines of a daemon's log a test did not expect.

A daemon that did its work says nothing above "info". Every warning, error and traceback must be
expected by the test that causes it, by a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LOUD = re.compile(
    r"""\[(warning|error|critical|exception)\s*\]      # structlog, console
      | \blevel=["']?(warning|error|critical)\b        # key=value
      | "level":\s*"(warning|error|critical)"          # JSON
      | \b(WARNING|ERROR|CRITICAL|FATAL)\b
      | Traceback\ \(most\ recent
      | \b\w+(Error|Warning|Exception):\s              # last line of a traceback, warnings module
      | Segmentation\ fault | core\ dumped | Fatal\ Python\ error | never\ awaited
      | AddressSanitizer | double\ free | corrupted
    """,
    re.VERBOSE,
)


def unexpected(text: str, allowed: Iterable[str] = ()) -> list[str]:
    """Lines that tell of trouble and match none of the `allowed` patterns (regular expressions).

    A traceback is one entry: allowed when a pattern matches anywhere in it.
    """
    patterns = [re.compile(pattern, re.DOTALL) for pattern in allowed]
    return [
        entry
        for entry in _entries(text)
        if _LOUD.search(entry) and not any(pattern.search(entry) for pattern in patterns)
    ]


def _entries(text: str) -> list[str]:
    """Lines; a traceback, up to the line of its exception, is joined to the line before it."""
    entries: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = "Traceback (most recent" in line
        continues = inside or line.startswith((" ", "\t", "|"))
        if entries and (continues or starts):
            entries[-1] += "\n" + line
        else:
            entries.append(line)
        if starts:
            inside = True
        elif inside and not line.startswith((" ", "\t", "|", "+")) and line:
            inside = False
    return entries
