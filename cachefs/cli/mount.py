"""`cachefs mount` and `cachefs unmount`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from cachefs.cli import arguments, checks, ending, output
from cachefs.cli.target import OnProgress
from cachefs.errors import MountError
from cachefs.fuse import kernelmount


def mount(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="s3://bucket/prefix or file:///directory.")
    ],
    mountpoint: Annotated[str, typer.Argument(help="An existing directory.")],
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Settings as TOML.")] = None,
    cache_dir: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Cache device; repeat for more."),
    ] = None,
    endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Endpoint of an S3 service other than AWS.")
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, with the log on standard error.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="SECTION.KEY=VALUE", help="One setting; repeat for more."),
    ] = None,
    daemon_module: Annotated[str, typer.Option(hidden=True)] = "cachefs.daemon",
) -> None:
    """Mount a store at a directory.

    Returns when the mount answers; a daemon serves it in the background.

    Exit codes: 0 mounted; 1 not mounted; 2 bad usage or settings. With --foreground those of
    `cachefs unmount`.
    """
    from cachefs import config as configuration
    from cachefs.cli import claim, launch

    flags = {"store.url": store, "store.endpoint": endpoint_url, "cache.dirs": cache_dir or None}
    settings = configuration.load(config, option or (), flags=flags)
    checks.may_mount()
    target = checks.resolve(mountpoint)
    with claim.claim(target) as claimed:
        checks.places(settings, target)
        connection = claim.clear(target, settings, daemon_module)
        covered = kernelmount.mount_at(target) is not None
        hides = not covered and checks.directory(target)
        start = launch.Launch(settings, target, claimed, connection, daemon_module)
        if foreground:
            launch.in_foreground(start)
        report = launch.in_background(start)
    if hides:
        _warn(f"{target} is not empty: its files are hidden while it is mounted")
    for text in report.get("warnings", ()):
        _warn(str(text))
    print(f"mounted {settings.store.url} on {target}, log {report['log']}")


def unmount(
    mountpoint: Annotated[str, typer.Argument(help="Where it is mounted.")],
    drain_timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Longest time to upload what is left (90, 5min)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even if files are open or the daemon hangs.")
    ] = False,
) -> int:
    """Upload what is left, then end a mount.

    Exit codes: 0 everything is in the store; 3 unmounted, something remains in the cache and
    uploads at the next mount; 1 not unmounted.
    """
    seconds = None if drain_timeout is None else arguments.seconds(drain_timeout, "--drain-timeout")
    if os.geteuid() != 0:
        raise MountError("only root can unmount", hint="run it with sudo")
    target = checks.resolve(mountpoint)
    with _progress() as on_progress:
        left = ending.unmount(target, seconds, on_progress, force=force)
    if left.files == 0:
        return 0
    _tell_remains(left)
    return 3


@contextmanager
def _progress() -> Iterator[OnProgress | None]:
    """One line on standard error while that is a terminal, gone when it ends."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(values: dict[str, Any]) -> None:
        files = output.count(values["files_left"], "file")
        text = f"uploading: {output.size(values['bytes_left'])} in {files} left"
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _tell_remains(left: ending.Remains) -> None:
    if left.files is None or left.bytes is None:
        what = "the daemon could not be asked what remains"
    else:
        what = f"{output.count(left.files, 'file')} / {left.bytes} bytes remain"
    where = f" in {', '.join(left.cache_dirs)}" if left.cache_dirs else ""
    print(f"{what} (kept{where}, uploaded at the next mount)", file=sys.stderr)


def _warn(text: str) -> None:
    print(f"cachefs: warning: {text}", file=sys.stderr)
