"""Which files have content in the cache, for retention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cachefs.meta.database import Database
from cachefs.meta.dentries import Dentries


@dataclass(frozen=True, slots=True)
class CachedRow:
    """One name whose present content is in the cache, in whole or part."""

    dentry: int
    path: str
    gen: int
    size: int
    changed_ns: int
    """When it was closed here, or begun."""
    was_fetched: bool
    """It came from the store."""
    is_durable: bool
    """The store has it."""


def cached_files(db: Database, dentries: Dentries) -> Iterator[CachedRow]:
    """Every name with content in the cache."""
    rows = db.all(
        "SELECT d.id,d.parent,d.name,g.gen,g.size,coalesce(g.sealed_ns,g.created_ns),"
        "g.sealed_ns IS NULL,g.state='durable' FROM generation g"
        " JOIN inode i ON i.gen=g.gen JOIN dentry d ON d.ino=i.ino"
    )
    for dentry, parent, name, gen, size, changed_ns, never_closed, is_durable in rows:
        path = dentries.path(parent, name).decode()
        was_fetched = bool(never_closed and is_durable)
        yield CachedRow(dentry, path, gen, size, changed_ns, was_fetched, bool(is_durable))
