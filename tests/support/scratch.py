"""Directories of tests outside pytest's own, which go when the test run does, however it ends.

Each is locked (flock) by the process that made it. What is still there when its tests are over is
unmounted, removed and told; what a run left that was killed goes at the start of the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support import fusectl

_SETTLED = 60.0
"""Seconds after which a directory has been locked by whoever made it."""
PARENTS = ("/dev/shm", "/var/tmp", "/tmp")
_PREFIX = "cachefs-test."
_locks: dict[Path, int] = {}


def make(parent: str, kind: str = "") -> Path:
    """A fresh directory, for `remove`. `kind`: what people will find in its name."""
    _forget_removed()
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind and kind + '-'}", dir=parent))
    lock = _lock(path)
    assert lock is not None, f"{path} is somebody else's"
    _locks[path] = lock
    return path


def remove(path: Path) -> None:
    """Unmount what is mounted below it, and remove it with all that it holds."""
    fusectl.unmount_below(path)
    shutil.rmtree(path, ignore_errors=True)
    _forget_removed()


@contextlib.contextmanager
def directory(parent: str, kind: str = "") -> Iterator[Path]:
    """One for a while."""
    path = make(parent, kind)
    try:
        yield path
    finally:
        remove(path)


def remove_all() -> list[Path]:
    """Remove what this process made and did not remove; what that was."""
    _forget_removed()
    left = sorted(_locks)
    for path in left:
        remove(path)
    return left


def sweep() -> list[Path]:
    """Remove what processes made that live no more; what that was."""
    swept = []
    for path in [path for parent in PARENTS for path in Path(parent).glob(f"{_PREFIX}*")]:
        if path not in _locks and _is_settled(path) and (lock := _lock(path)) is not None:
            remove(path)
            os.close(lock)
            swept.append(path)
    return swept


def _is_settled(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _SETTLED
    return False


def _lock(path: Path) -> int | None:
    """None: somebody has it, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _forget_removed() -> None:
    for path in [path for path in _locks if not path.exists()]:
        os.close(_locks.pop(path))
