"""`cachefs bench`: how fast a directory takes a checkpoint."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachefs.cli import output
from cachefs.cli.status import Json
from cachefs.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from cachefs.bench.runner import Measurement
    from cachefs.bench.workload import Style, Workload


class Styles(StrEnum):
    """Which writers run."""

    BOTH = "both"
    BLOCKING = "blocking"
    ASYNC = "async"


def bench(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write: a mount, or any directory.")
    ],
    against: Annotated[
        Path | None, typer.Option(metavar="DIR2", help="Measure this directory too, by turns.")
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes a file.")] = "256MiB",
    block: Annotated[str, typer.Option(metavar="SIZE", help="Bytes a write.")] = "1MiB",
    ranks: Annotated[int, typer.Option(min=1, help="Processes that write at once.")] = 2,
    files: Annotated[int, typer.Option(min=1, help="Files for each rank.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 5,
    style: Annotated[
        Styles, typer.Option(help="Plain blocking writers, asyncio with aiofiles, or both.")
    ] = Styles.BOTH,
    fsync: Annotated[bool, typer.Option("--fsync", help="fsync each file.")] = False,
    direct: Annotated[bool, typer.Option("--direct", help="Direct I/O (O_DIRECT).")] = False,
    read: Annotated[bool, typer.Option("--read", help="Measure reading back, too.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read back, compare checksums.")] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="Use names that a mount uploads.")
    ] = False,
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the result (needs matplotlib).")
    ] = None,
) -> None:
    """Write checkpoints into a directory and show how fast that went.

    Each rank is a process with files of its own. Rounds alternate between directories and styles;
    everything written is removed again. Throughput is all bytes by the slowest rank's time,
    fsync and close included.

    Exit codes: 0 measured; 1 it could not be, or a file did not read back as written.
    """
    from cachefs.bench import report, runner
    from cachefs.bench.workload import Workload

    workload = Workload(
        size=_bytes(size, "--size"), block=_bytes(block, "--block"), ranks=ranks, files=files,
        fsync=fsync, direct=direct, verify=verify, read=read, publish=publish,
    )  # fmt: skip
    if plot is not None:
        _check_plot(plot)
    directories = [directory] if against is None else [directory, against]
    styles = _styles(style)
    total = workload.total * rounds * len(directories) * len(styles)
    with _progress_bar(total, quiet=json) as on_bytes:
        found = runner.measure(
            directories, workload, styles=styles, rounds=rounds, on_bytes=on_bytes
        )
    other = None if against is None else str(against)
    document = report.document(workload, rounds, found, other)
    _draw(plot, workload, found)
    if json:
        output.print_json(document)
    else:
        _show(document)
    if any(measurement.bad for measurement in found):
        raise runner.BenchError("files did not read back as written (see above)")


def _bytes(text: str, option: str) -> int:
    from cachefs.config import parse_size

    try:
        value = parse_size(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    assert isinstance(value, int)
    return value


def _styles(style: Styles) -> list[Style]:
    from cachefs.bench.workload import Style

    return list(Style) if style is Styles.BOTH else [Style(style.value)]


def _check_plot(path: Path) -> None:
    from cachefs.bench import plot

    if not path.parent.is_dir():
        raise UsageError(f"--plot: {path.parent} is not a directory")
    plot.check()


def _draw(path: Path | None, workload: Workload, found: Sequence[Measurement]) -> None:
    if path is not None:
        from cachefs.bench import plot

        plot.save(path, workload, found)


@contextlib.contextmanager
def _progress_bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while that is a terminal, gone when it ends."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def _show(document: dict[str, Any]) -> None:
    results = document["results"]
    parts = [_throughput_table(results), _latency_table(results)]
    lines = [_ratio_line(style, ratio) for style, ratio in document["ratios"].items()]
    if document["workload"]["verify"]:
        lines += [_verified_line(result) for result in results]
    output.show(*parts, *(["\n".join(lines)] if lines else []))


def _throughput_table(results: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for result in results:
        for what in ("write", "read"):
            if result[what]:
                rates = (output.size(result[what][key]) + "/s" for key in ("median", "min", "max"))
                rows.append((result["directory"], result["style"], what, *rates))
    return output.table(("DIRECTORY", "STYLE", "", ">MEDIAN", ">MIN", ">MAX"), rows)


def _latency_table(results: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for result in results:
        for call, values in result["latency"].items():
            if values:
                times = (_time(values[key]) for key in ("p50", "p99", "p999", "max"))
                rows.append(
                    (result["directory"], result["style"], call, f"{values['count']:,}", *times)
                )
    headings = ("DIRECTORY", "STYLE", "CALL", ">COUNT", ">P50", ">P99", ">P99.9", ">MAX")
    return output.table(headings, rows)


def _time(seconds: float) -> str:
    """Three digits: `8.31 us`, `1.20 ms`, `2.4 s`."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _ratio_line(style: str, ratio: dict[str, Any]) -> str:
    text = f"{style}: writes at {ratio['write']:.2f} of the other directory's median"
    return text if ratio["read"] is None else f"{text}, reads at {ratio['read']:.2f}"


def _verified_line(result: dict[str, Any]) -> str:
    where = f"{result['directory']} ({result['style']})"
    if result["verified"]:
        return f"{where}: every file read back as written"
    return f"{where}: DAMAGED: {', '.join(map(output.printable, result['damaged_files']))}"
