"""`cachefs demo`: the product at work, on this machine alone."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    stay: Annotated[
        bool, typer.Option("--stay", help="Leave mount, store and metrics up until Ctrl-C.")
    ] = False,
    size: Annotated[str, typer.Option(help="Bytes of the checkpoint.")] = "256MiB",
) -> None:
    """Save a checkpoint through a mount into a real S3 store, and prove that it arrived."""
    from cachefs.cli.output import console
    from cachefs.config import parse_size
    from cachefs.demo.run import run
    from cachefs.demo.screen import Screen
    from cachefs.errors import UsageError

    try:
        data_size = parse_size(size)
    except ValueError as exc:
        raise UsageError(f"--size: {exc}") from None
    assert isinstance(data_size, int)
    run(Screen(console()), data_size, stay=stay)
