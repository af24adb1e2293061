"""The command line: one module per verb group, which parses, calls and prints.

Lives here: arguments, human and JSON output, exit codes, one-line errors. May not live here:
filesystem or store logic, and anything a daemon needs. A verb's module is imported only when that
verb runs, and imports heavy libraries only inside its functions, so `cachefs status` stays quick.

A verb is a function for typer. It prints its result on standard output, raises `CachefsError` for
what the user should know, and returns (or raises `typer.Exit` with) an exit code other than 0 when
one is due.
"""

from cachefs.cli.command import app, main

__all__ = ["app", "main"]
