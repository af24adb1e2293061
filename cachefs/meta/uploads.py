"""Queries on the journal of multipart uploads."""

from __future__ import annotations

from collections.abc import Iterable

from cachefs.failpoints import Change
from cachefs.meta.database import Database
from cachefs.meta.rows import PartRow, UploadRow, to_signed, to_unsigned

_UPLOAD = "id,gen,key,upload_id,size,base_etag,started_ns,meta"
_PART = 'upload,number,start,"end",source,etag,crc64'


class Uploads:
    """The `upload` and `upload_part` tables."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def all(self) -> list[UploadRow]:
        """Every upload under way."""
        return [UploadRow(*row) for row in self._db.all(f"SELECT {_UPLOAD} FROM upload")]

    def of_gen(self, gen: int) -> list[UploadRow]:
        """Uploads of a generation."""
        rows = self._db.all(f"SELECT {_UPLOAD} FROM upload WHERE gen=?", (gen,))
        return [UploadRow(*row) for row in rows]

    def add(self, row: UploadRow, parts: Iterable[PartRow]) -> int:
        """Insert an upload with its planned parts; returns and stores the new number."""
        with self._db.transaction(Change.BEGIN_UPLOAD):
            row.id = self._db.insert(
                f"INSERT INTO upload({_UPLOAD}) VALUES(?,?,?,?,?,?,?,?)",
                (
                    None,
                    row.gen,
                    row.key,
                    row.upload_id,
                    row.size,
                    row.base_etag,
                    row.started_ns,
                    row.meta,
                ),
            )
            for part in parts:
                part.upload = row.id
                self._db.execute(
                    f"INSERT INTO upload_part({_PART}) VALUES(?,?,?,?,?,?,?)",
                    (
                        part.upload,
                        part.number,
                        part.start,
                        part.end,
                        part.source,
                        part.etag,
                        to_signed(part.crc64),
                    ),
                )
        return row.id

    def parts(self, upload: int) -> list[PartRow]:
        """Parts of an upload by number."""
        rows = self._db.all(
            f"SELECT {_PART} FROM upload_part WHERE upload=? ORDER BY number", (upload,)
        )
        parts = [PartRow(*row) for row in rows]
        for part in parts:
            part.crc64 = to_unsigned(part.crc64)
        return parts

    def confirm(self, upload: int, number: int, etag: str | None, crc64: int | None) -> None:
        """Record the store's receipt for a part; `etag` None takes it back."""
        self._db.execute(
            "UPDATE upload_part SET etag=?,crc64=? WHERE upload=? AND number=?",
            (etag, to_signed(crc64), upload, number),
        )

    def disown(self, upload: int) -> None:
        """No generation's any more; still to be aborted in the store."""
        self._db.execute("UPDATE upload SET gen=0 WHERE id=?", (upload,))

    def disown_all(self, gen: int) -> None:
        """As `disown`, whatever there is of a generation: its bytes are about to be other ones."""
        self._db.execute("UPDATE upload SET gen=0 WHERE gen=?", (gen,))

    def remove(self, upload: int) -> None:
        """Completed or aborted."""
        self._db.execute("DELETE FROM upload_part WHERE upload=?", (upload,))
        self._db.execute("DELETE FROM upload WHERE id=?", (upload,))
