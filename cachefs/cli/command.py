"""The command itself: the table of verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from cachefs import __version__
from cachefs.errors import CachefsError


class Verb(NamedTuple):
    """Where a verb is implemented (`module:function`), and its line in the help."""

    target: str
    help: str


VERBS = {
    "mount": Verb("cachefs.cli.mount:mount", "Mount a store at a directory."),
    "unmount": Verb("cachefs.cli.mount:unmount", "Upload what is left, then end a mount."),
    "upgrade": Verb("cachefs.cli.upgrade:upgrade", "Let a new daemon take a mount over."),
    "status": Verb("cachefs.cli.status:status", "Show how a mount or a path in it is doing."),
    "ls": Verb("cachefs.cli.status:ls", "List a directory with upload states."),
    "wait": Verb("cachefs.cli.wait:wait", "Wait until paths are safe in the store."),
    "flush": Verb("cachefs.cli.wait:flush", "Upload paths now instead of after the settle delay."),
    "resolve": Verb("cachefs.cli.resolve:resolve", "Decide about what does not go on by itself."),
    "fsck": Verb("cachefs.cli.fsck:fsck", "Check a cache directory that is not in use."),
    "warm": Verb("cachefs.cli.hold:warm", "Fetch paths into the cache."),
    "evict": Verb("cachefs.cli.hold:evict", "Give back the space of what the store holds."),
    "pin": Verb("cachefs.cli.hold:pin", "Fetch paths, and never evict them."),
    "unpin": Verb("cachefs.cli.hold:unpin", "Let pinned paths be evicted again."),
    "latest": Verb("cachefs.cli.latest:latest", "Print the newest complete checkpoint."),
    "adopt": Verb("cachefs.cli.adopting:adopt", "Move a finished file from outside into a mount."),
    "retain": Verb("cachefs.cli.retain:retain", "Apply the retention rules of the warm tier."),
    "bench": Verb("cachefs.cli.bench:bench", "Measure writing and reading in a directory."),
    "demo": Verb("cachefs.cli.demo:demo", "See it work: store, mount, save, upload, compare."),
}
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """Knows its verbs by name and help line; imports a verb when it is called."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, verb in VERBS.items():
            self.commands[name] = TyperCommand(name, help=verb.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command in place of its line in the help."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and _load(str(name)), rest


def _load(name: str) -> Any:
    module, _, function = VERBS[name].target.partition(":")
    single = typer.Typer(
        add_completion=False, context_settings=_CONTEXT, rich_markup_mode="markdown"
    )
    single.command(name)(getattr(importlib.import_module(module), function))
    return typer.main.get_command(single)


app = typer.Typer(
    name="cachefs",
    cls=LazyGroup,
    help="Checkpoints at local speed, in the object store in the right order.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=_CONTEXT,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"cachefs {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are one line on standard error."""
    try:
        code = app(
            args=None if argv is None else list(argv), prog_name="cachefs", standalone_mode=False
        )
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except typer.Abort:
        return 130
    except Exception as exc:
        if os.environ.get("CACHEFS_DEBUG") == "1":
            raise
        line, status = _explain(exc)
        if line:
            print(f"cachefs: {line}", file=sys.stderr)
        return status
    return code if isinstance(code, int) else 0


def _explain(exc: Exception) -> tuple[str, int]:
    """What, why and what to do in one line, and the exit code."""
    if isinstance(exc, CachefsError):
        return _one_line(f"{exc}; {exc.hint}" if exc.hint else str(exc)), exc.exit_code
    usage: Callable[[], str] | None = getattr(exc, "format_message", None)
    if usage is not None:  # typer's own complaints about the command line
        command = getattr(getattr(exc, "ctx", None), "command_path", "cachefs")
        wrong = usage().replace("Value error, ", "").rstrip(".")
        return wrong and _one_line(f"{wrong}; see `{command} --help`"), 2
    if isinstance(exc, OSError) and exc.strerror:
        where = f"{os.fsdecode(exc.filename)}: " if exc.filename else ""
        return _one_line(f"{where}{exc.strerror}"), 1
    what = f"internal error: {type(exc).__name__}: {exc}"
    return _one_line(f"{what}; set CACHEFS_DEBUG=1 to see where"), 1


def _one_line(text: str) -> str:
    return " ".join(text.encode(errors="backslashreplace").decode().split())


def _silence_stdout() -> None:
    """The reader of our output is gone: keep the interpreter's last flush from complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
