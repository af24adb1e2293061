"""What the demonstration shows: bars on a terminal, calm lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from cachefs.cli import output

LINE_INTERVAL = 5.0
"""Seconds between two lines about the same phase where there is no terminal."""
_PLAIN_WIDTH = 120

SetDone: TypeAlias = Callable[[float], None]
"""Takes the number of bytes done so far."""


def speed(size: float, seconds: float) -> str:
    """Bytes per second in decimal megabytes, as disks and networks are sold."""
    return f"{size / max(seconds, 1e-9) / 1e6:,.0f} MB/s"


_WIDE = 400
"""Columns for what may not be cut."""


class Screen:
    """Where the demonstration is told."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        if not self._live:
            console.width = _PLAIN_WIDTH

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def bars(self) -> Iterator[Bars]:
        """Phases that are shown together, each as one bar."""
        progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=30),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
        )
        with progress:
            yield Bars(progress, None if self._live else self.say)

    def facts(self, title: str, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values below a title."""
        self._part(title, output.facts(pairs))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
        """A table below a title. A `>` before a column's name aligns it right."""
        self._part(title, output.table(columns, rows))

    def _part(self, title: str, content: RenderableType) -> None:
        """No line ends in blanks, so that a log of it stays readable, and none is cut: addresses
        are there to be copied."""
        self._console.print(Text(f"\n{title}", style="bold"))
        width = self._console.width
        with self._console.capture() as capture:
            self._console.width = max(width, _WIDE)
            self._console.print(content)
        self._console.width = width
        lines = capture.get().splitlines()
        self._console.out("\n".join(line.rstrip() for line in lines), highlight=False)


class Bars:
    """The bars of one `Screen.bars` block."""

    def __init__(self, progress: Progress, say: Callable[[str], None] | None) -> None:
        self._progress = progress
        self._say = say
        """Where there is no terminal: how to print a line."""

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[SetDone]:
        """A phase that works on `total` bytes; it ends with the block."""
        task = self._progress.add_task(name, total=total)
        line = _Lines(name, total, self._say) if self._say else None

        def set_done(done: float) -> None:
            self._progress.update(task, completed=done)
            if line:
                line.set_done(done)

        yield set_done
        set_done(total)
        self._progress.stop_task(task)


class _Lines:
    """A phase as lines: now and then while it lasts, and one at its end."""

    def __init__(self, name: str, total: int, say: Callable[[str], None]) -> None:
        self._name, self._total, self._say = name, total, say
        self._started = self._last = time.monotonic()

    def set_done(self, done: float) -> None:
        now = time.monotonic()
        if done >= self._total:
            spent = now - self._started
            self._say(f"{self._name}: 100 % in {spent:.2f} s ({speed(self._total, spent)})")
            self._total = 1 << 62  # said once
        elif now - self._last >= LINE_INTERVAL:
            self._last = now
            self._say(f"{self._name}: {100 * done / self._total:.0f} %")
