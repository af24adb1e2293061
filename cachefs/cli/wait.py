"""`cachefs wait` and `cachefs flush`: until the store, or another tier, has it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from cachefs.cli import output, target
from cachefs.cli.arguments import seconds
from cachefs.cli.status import Json
from cachefs.cli.target import GRACE, OnProgress, Target
from cachefs.errors import CachefsError


class Level(StrEnum):
    """What a loss of the data would take."""

    PROCESS = "process"
    REBOOT = "reboot"
    INSTANCE = "instance"
    SITE = "site"


Paths = Annotated[list[str], typer.Argument(help="Files or directories in a mount.")]
Timeout = Annotated[
    str | None, typer.Option(metavar="TIME", help="Give up after this time (90, 5min).")
]


def wait(
    paths: Paths,
    survives: Annotated[
        Level, typer.Option(help="What the data must survive; site: it is in the store.")
    ] = Level.SITE,
    timeout: Timeout = None,
    json: Json = False,
) -> None:
    """Wait until paths are safe in the store.

    Covers everything closed before the call, trees too.

    Exit codes: 0 reached; 1 a path is missing; 4 time is up; 5 it cannot be reached (stalled, held,
    conflicted or blocked); 6 superseded.
    """
    done = "durable" if survives is Level.SITE else f"survives {survives.value}"
    run("wait", paths, {"survives": survives.value}, _limit(timeout), done, json)


def flush(paths: Paths, timeout: Timeout = None, json: Json = False) -> None:
    """Upload paths now instead of after the settle delay, and wait until that is done.

    Exit codes: as of `cachefs wait`.
    """
    run("flush", paths, {}, _limit(timeout), "flushed", json)


def _limit(timeout: str | None) -> float | None:
    return None if timeout is None else seconds(timeout, "--timeout")


def run(
    op: str,
    paths: list[str],
    args: dict[str, Any],
    limit: float | None,
    done: str | None,
    json: bool,
) -> list[dict[str, Any]]:
    """Ask, then tell what came of it (`done`, how much, and how long it took). JSON has the same
    keys whether or not it failed. Returns what the daemons answered."""
    began = time.monotonic()
    total: dict[str, Any] = {"paths": [], "files": 0, "bytes": 0, "seconds": 0.0}
    try:
        results = _in_each_mount(total, op, paths, args, timeout=limit, quiet=json)
    except CachefsError as exc:
        if json:
            error = {"message": str(exc), "hint": exc.hint, "exit_code": exc.exit_code}
            spent = time.monotonic() - began
            output.print_json({**total, "paths": paths, "seconds": spent, "error": error})
        raise
    if json:
        output.print_json({**total, "error": None})
    elif done is not None:
        amount = f"{output.count(total['files'], 'file')}, {output.size(total['bytes'])}"
        amount = amount if total["files"] else "nothing was left to do"
        print(f"{done}: {amount} in {output.duration(total['seconds'])}")
    return results


def _in_each_mount(
    total: dict[str, Any],
    op: str,
    paths: Sequence[str],
    args: dict[str, Any],
    *,
    timeout: float | None,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Ask the daemons of all paths one after the other; the results are added to `total`."""
    results = []
    deadline = None if timeout is None else time.monotonic() + timeout
    for found, inside in _by_mount(paths):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        request = {**args, "paths": inside, "timeout": left}
        with _progress_bar(quiet) as on_progress:
            patience = None if left is None else left + GRACE
            result = target.ask(found, op, request, on_progress=on_progress, patience=patience)
        results.append(result)
        for key, value in result.items():
            total[key] = _sum(total[key], value) if key in total else value
    return results


def _sum(one: Any, other: Any) -> Any:
    """Of two numbers or lists; counts by name are added up name by name."""
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
    return one + other


def _by_mount(paths: Sequence[str]) -> list[tuple[Target, list[str]]]:
    groups: dict[str, tuple[Target, list[str]]] = {}
    for path in paths:
        found = target.find(path)
        groups.setdefault(found.mountpoint, (found, []))[1].append(found.path)
    return list(groups.values())


@contextmanager
def _progress_bar(quiet: bool) -> Iterator[OnProgress | None]:
    """A bar on standard error while that is a terminal, gone when it ends."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bar = Progress(
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, left="")

        def on_progress(values: dict[str, Any]) -> None:
            whole, left = values["bytes_total"], values["bytes_left"]
            if not whole:  # nothing but renames, deletes or empty files
                whole, left = values["files_total"], values["files_left"]
            files = output.count(values["files_left"], "file")
            text = f"{output.size(values['bytes_left'])} in {files} left"
            bar.update(task, total=whole or None, completed=whole - left, left=text)

        yield on_progress
