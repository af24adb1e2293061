"""`cachefs fsck`: look after a cache directory that is not in use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cachefs.cli import output
from cachefs.cli.status import Json
from cachefs.errors import CacheError, UsageError
from cachefs.fsck.check import check
from cachefs.fsck.report import CHECKS, CLEAN, MENDED, TROUBLE, UNCHECKED, Finding, Report
from cachefs.fsck.salvage import Salvage, Saved, salvage

_MOST = 200
"""Findings shown to people; JSON has all of them."""
_RANGES = 8
"""The same of the ranges of a file that are not here."""


def fsck(
    directories: Annotated[
        list[Path], typer.Argument(metavar="CACHE_DIR...", help="In the order of the mount.")
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be: rows, and files set aside.")
    ] = False,
    salvage_to: Annotated[
        Path | None,
        typer.Option("--salvage", metavar="DIR", help="Write every cache file to this directory."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not read the cache files' bytes.")
    ] = False,
    json: Json = False,
) -> int:
    """Check a cache directory that no daemon uses, and mend it.

    Exit codes: 0 nothing is wrong, 1 something is, 2 wrong usage, 3 all that was wrong is mended,
    4 it cannot be checked (in use, or no cache directory). Nothing is ever deleted: what no
    metadata describes goes to `salvaged/` in the cache directory.
    """
    if salvage_to is not None:
        if repair or quick:
            raise UsageError("--salvage only reads; it goes with neither --repair nor --quick")
        return _salvage(directories, salvage_to, json)
    try:
        with _bar("reading") as progress:
            report = check(directories, repair=repair, content=not quick, progress=progress)
    except OSError as error:
        raise _failed(error) from error
    if json:
        output.print_json(report.as_json())
    else:
        _tell(report, repair)
    return report.exit_code


def _salvage(directories: list[Path], target: Path, json: bool) -> int:
    try:
        with _bar("writing") as progress:
            done = salvage(directories, target, progress)
    except OSError as error:
        raise _failed(error) from error
    if json:
        output.print_json(done.as_json())
    else:
        _tell_saved(done)
    return TROUBLE if done.failed else CLEAN


def _failed(error: OSError) -> CacheError:
    found = CacheError(f"{error.filename or 'the cache'}: {error.strerror}")
    found.exit_code = UNCHECKED
    return found


def _tell(report: Report, repair: bool) -> None:
    trouble = [each for each in report.findings if each.is_trouble]
    notes = [each for each in report.findings if not each.is_trouble]
    for each in [*trouble, *notes][:_MOST]:
        print(_line(each))
    if len(report.findings) > _MOST:
        print(f"and {output.count(len(report.findings) - _MOST, 'more finding')}")
    checked = f"{output.count(report.files, 'cache file')}, {output.size(report.read_bytes)} read"
    verdict = {
        CLEAN: "sound",
        MENDED: f"{output.count(len(trouble), 'offence')} mended",
        TROUBLE: f"{sum(not each.repaired for each in trouble)} of "
        f"{output.count(len(trouble), 'offence')} not mended",
    }[report.exit_code]
    print(f"{len(CHECKS)} checks, {checked}: {verdict}")
    if report.exit_code == TROUBLE:
        _advise(report, repair)


def _advise(report: Report, repair: bool) -> None:
    where = " ".join(report.cache_dirs)
    if report.salvageable:
        print(f"`cachefs fsck {where} --salvage DIR` writes out the files that are in the cache")
    elif not repair:
        print(f"`cachefs fsck {where} --repair` mends what can be mended")


def _line(finding: Finding) -> str:
    mark = "mended" if finding.repaired else "WRONG" if finding.is_trouble else "note"
    return (
        f"{mark}: {finding.check}: {CHECKS[finding.check][0]}: {output.printable(finding.subject)}"
    )


def _tell_saved(done: Salvage) -> None:
    for failure in done.failed[:_MOST]:
        print(f"FAILED: {output.printable(failure)}")
    for each in done.files[:_MOST]:
        how = "" if each.known_by == "database" else f", path from {each.known_by}"
        print(f"{output.printable(each.path)}: {output.size(each.size)}, {each.state}{how}")
        _tell_away(each)
    if len(done.files) > _MOST:
        print(f"and {output.count(len(done.files) - _MOST, 'more file')}")
    total = output.size(sum(each.size for each in done.files))
    print(f"{output.count(len(done.files), 'file')}, {total} in {done.directory}")


def _tell_away(saved: Saved) -> None:
    """What of a file is not in what was written out."""
    if not saved.in_store:
        return
    lacking = sum(each.end - each.start for each in saved.in_store)
    print(f"  INCOMPLETE: {output.size(lacking)} of it are in the store only, and are holes here:")
    for each in saved.in_store[:_RANGES]:
        what = f"bytes {each.start}-{each.end - 1} are in {output.printable(each.key)}"
        print(f"  {what} from {each.offset} on")
    if len(saved.in_store) > _RANGES:
        print(f"  and {output.count(len(saved.in_store) - _RANGES, 'more range')} (--json)")


@contextmanager
def _bar(verb: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error, for what takes longer than a moment."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn(verb), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
