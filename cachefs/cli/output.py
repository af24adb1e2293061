"""How results look: sizes, times, names, tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_STYLES = {
    "durable": "green",
    "remote": "green",
    "open": "cyan",
    "dirty": "yellow",
    "uploading": "yellow",
    "held": "magenta",
    "stalled": "bold red",
    "conflicted": "bold red",
    "blocked": "bold red",
}


def size(count: float) -> str:
    """Bytes in binary units with three digits: `512 B`, `1.50 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        count /= 1024
        if count < 999.5 or unit == "PiB":
            break
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {unit}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units: `0.4 s`, `2 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for name, unit, minor_name, minor in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= unit:
            rest = whole % unit // minor
            return f"{whole // unit} {name}" + (f" {rest} {minor_name}" if rest else "")
    return f"{whole} s"


def count(number: int, noun: str) -> str:
    """`1 file`, `3 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(name: str) -> str:
    """A file name that cannot steer the terminal: control characters and raw bytes are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def state(name: str) -> Text:
    """A state in its colour."""
    return Text(printable(name), style=_STYLES.get(name, ""))


def console() -> Console:
    """Standard output. Not on a terminal: lines are as long as they are."""
    width = None if sys.stdout.isatty() else 10_000
    return Console(highlight=False, emoji=False, markup=False, width=width)


def show(*parts: RenderableType) -> None:
    """Print on standard output, parts separated by empty lines, no line ending in blanks."""
    out = console()
    for number, part in enumerate(parts):
        with out.capture() as capture:
            out.print(part)
        text = "\n".join(line.rstrip() for line in capture.get().splitlines())
        print(f"\n{text}" if number else text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Aligned columns without lines. A `>` before a column's name aligns it right."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        right = name.startswith(">")
        grid.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return grid


def facts(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """`name  value` lines, names aligned; pairs with an empty value are left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            grid.add_row(name, Text(value) if isinstance(value, str) else value)
    return grid


def print_json(value: Any) -> None:
    """One JSON document, ASCII only so that any file name survives."""
    print(json.dumps(value, indent=2))
