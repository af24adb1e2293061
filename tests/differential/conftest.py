"""A mount beside a local directory, for programs that run on both."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.differential.pair import Pair
from tests.support import scratch
from tests.support.mounts import Mount, Watchdog

MakePair = Callable[..., Pair]
With = Callable[[contextlib.ExitStack], MakePair]


@pytest.fixture(scope="module")
def pairs_until(
    lane: str, make_mount: Callable[..., Any], seaweed: Any, _watchdog: Watchdog
) -> With:
    """Factory of mounts, each beside a local directory (on tmpfs, like the cache), with clients:
    `pairs_until(stack)(check_bucket=True, **{"flush.settle": "1ms"})`. They end with the stack,
    which fails if a mount's log has what it should not have."""

    def until(stack: contextlib.ExitStack) -> MakePair:
        def factory(check_bucket: bool = False, **options: str) -> Pair:
            folder = stack.enter_context(scratch.directory("/dev/shm"))
            folder.chmod(0o755)
            whole = seaweed.fresh_bucket()
            stack.callback(seaweed.remove_bucket, whole)
            view = whole.below("runs")

            def start() -> Mount:
                mount: Mount
                cache = tempfile.mkdtemp(prefix="cache", dir=folder)
                mount, _ = make_mount(view, lane=lane, cache_dirs=[Path(cache)], options=options)
                mount.allowed_log.append("SIGKILL|no takeover")
                _watchdog.watch(mount)
                return mount.start()

            local = folder / "local"
            local.mkdir()
            pair = Pair(start, local, view, check_bucket=check_bucket)
            stack.callback(pair.close)
            return pair

        return factory

    return until


@pytest.fixture
def pair_with(pairs_until: With) -> Iterator[MakePair]:
    """The factory, for one test."""
    with contextlib.ExitStack() as stack:
        yield pairs_until(stack)


@pytest.fixture(scope="module")
def shared_pair(pairs_until: With) -> Iterator[Pair]:
    """One pair for many short programs."""
    with contextlib.ExitStack() as stack:
        yield pairs_until(stack)()


@pytest.fixture(scope="module")
def shared_bucket_pair(pairs_until: With) -> Iterator[Pair]:
    """One pair for many short programs after which the bucket is compared as well."""
    with contextlib.ExitStack() as stack:
        yield pairs_until(stack)(check_bucket=True, **{"flush.settle": "5ms"})
