"""`Meta`: the database with its tables, as one object."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from cachefs.meta.applied import Applied
from cachefs.meta.database import Database
from cachefs.meta.deferral import PATIENCE
from cachefs.meta.dentries import Dentries
from cachefs.meta.effects import Effects
from cachefs.meta.generations import Generations
from cachefs.meta.inodes import Inodes
from cachefs.meta.objects import Objects
from cachefs.meta.pins import Pins
from cachefs.meta.spans import Spans
from cachefs.meta.uploads import Uploads
from cachefs.meta.warm import WarmCopies


class Meta:
    """All tables of one cache's database."""

    def __init__(
        self,
        path: Path,
        *,
        may_create: bool = True,
        memory: Path | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Open or create the database file at `path`, as `Database` does."""
        self.db = Database(path, may_create=may_create, memory=memory, patience=patience)
        self.inodes = Inodes(self.db)
        self.dentries = Dentries(self.db)
        self.generations = Generations(self.db)
        self.objects = Objects(self.db)
        self.effects = Effects(self.db)
        self.uploads = Uploads(self.db)
        self.spans = Spans(self.db)
        self.applied = Applied(self.db)
        self.pins = Pins(self.setting, self.set_setting)
        self.warm = WarmCopies(self.db)

    def transaction(self, change: str = "") -> AbstractContextManager[None]:
        """See `Database.transaction`."""
        return self.db.transaction(change)

    def setting(self, key: str) -> str | None:
        """Value of a setting, None when unset."""
        row = self.db.one("SELECT value FROM setting WHERE key=?", (key,))
        return row[0] if row else None

    def set_setting(self, key: str, value: str) -> None:
        """Store a setting."""
        self.db.execute(
            "INSERT INTO setting VALUES(?,?) ON CONFLICT(key) DO UPDATE SET value=excluded.value",
            (key, value),
        )

    def close(self) -> None:
        """Close the connection."""
        self.db.close()
