"""A control server with scripted handlers, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from cachefs.observe.control import Handler, serve_control


@contextmanager
def serving(path: Path, handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Serve `handlers` at `path` while the block runs. A server that fails, fails the block."""
    ready = threading.Event()
    scope = trio.CancelScope()
    failures: list[BaseException] = []
    tokens: list[trio.lowlevel.TrioToken] = []

    async def run() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(serve_control, path, handlers))
                ready.set()

    def thread() -> None:
        try:
            trio.run(run)
        except BaseException as exc:
            failures.append(exc)
        finally:
            ready.set()

    runner = threading.Thread(target=thread)
    runner.start()
    ready.wait(10)
    try:
        yield
    finally:
        if not failures:
            tokens[0].run_sync_soon(scope.cancel)
        runner.join(10)
    assert not failures, failures
