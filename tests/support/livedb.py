"""The database of a live mount, as its files say: nobody else may open it."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def database_of(cache: Path) -> Iterator[sqlite3.Connection]:
    """A copy of it; what still waits in memory is not there."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (cache / "meta").glob("cachefs.db*"):
            if path.suffix in (".db", ".db-wal"):
                shutil.copy(path, folder)
        with closing(sqlite3.connect(Path(folder) / "cachefs.db")) as database:
            yield database
