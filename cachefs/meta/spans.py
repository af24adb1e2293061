"""Queries on ranges of files that are in the store under hidden keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from cachefs.meta.database import Database
from cachefs.meta.rows import GenerationRow, to_signed, to_unsigned
from cachefs.model.spans import Span, SpanMap, part_key

_COLUMNS = 'key,gen,start,"end",etag,crc64,asked_ns'


class Spans:
    """The `span` table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._having = {row[0] for row in db.all("SELECT DISTINCT gen FROM span WHERE gen<>0")}

    def has(self, gen: int) -> bool:
        """Whether a generation has bytes that its cache file has not."""
        return gen in self._having and bool(self.of_gen(gen))

    def of_gen(self, gen: int) -> list[Span]:
        """What of a generation is in the store, in order."""
        if gen not in self._having:  # asked at each open, and hardly any file has some
            return []
        return self._all("gen=? AND etag IS NOT NULL ORDER BY start", (gen,))

    def of_files(self) -> list[Span]:
        """Every one that a generation has."""
        return self._all("gen<>0 AND etag IS NOT NULL ORDER BY gen,start")

    def unconfirmed(self) -> list[Span]:
        """Those that were asked for, without an answer."""
        return self._all("gen<>0 AND etag IS NULL")

    def given_up(self) -> list[Span]:
        """Those that are to be deleted in the store."""
        return self._all("gen=0")

    def add(self, span: Span) -> None:
        """Note what is about to be asked for, for a generation or (0) for nobody yet."""
        self._having.add(span.gen)
        self._db.execute(
            f"INSERT INTO span({_COLUMNS}) VALUES(?,?,?,?,NULL,NULL,?)",
            (span.key, span.gen, span.start, span.end, span.asked_ns),
        )

    def adopt(self, gen: int, spans: Iterable[Span]) -> None:
        """The store has what was noted for nobody: it is a generation's, whose cache file lacks
        it."""
        self._having.add(gen)
        self._db.many(
            "UPDATE span SET gen=?,etag=? WHERE key=?", ((gen, s.etag, s.key) for s in spans)
        )

    def is_used(self, key: str) -> bool:
        """Whether any generation has a range of a hidden object."""
        sql = "SELECT 1 FROM span WHERE gen<>0 AND key>=? AND key<? LIMIT 1"
        return self._db.one(sql, (part_key(key, 0)[:-1], key + "$")) is not None

    def confirm(self, span: Span) -> None:
        """The store has it: from now on the cache file's bytes do not count."""
        self._db.execute(
            "UPDATE span SET etag=?,crc64=? WHERE key=?",
            (span.etag, to_signed(span.crc64), span.key),
        )

    def answered(self, span: Span) -> None:
        """The store has it, and nobody wants it any more."""
        self._db.execute("UPDATE span SET gen=0,etag=? WHERE key=?", (span.etag, span.key))

    def give_up(self, spans: Iterable[Span]) -> None:
        """To be deleted in the store."""
        self._db.many("UPDATE span SET gen=0 WHERE key=?", ((each.key,) for each in spans))

    def release(self, gen: GenerationRow, released: Callable[[int], None]) -> None:
        """An object has what a generation's have: they are to be deleted in the store, and `gen`,
        which the caller saves, says what the cache file has without them. `released` is called with
        its number once that is committed, if there were any."""
        number, spans = gen.gen, self.of_gen(gen.gen)
        if spans:
            gen.present = SpanMap(spans).rest(gen.size).pack()
            self._db.execute("UPDATE span SET gen=0 WHERE gen=?", (number,))
            self._db.after_commit(lambda: released(number))

    def remove(self, spans: Iterable[Span]) -> None:
        """The store has them no more."""
        self._db.many("DELETE FROM span WHERE key=?", ((each.key,) for each in spans))

    def version(self, gen: int) -> str | None:
        """Changes when the spans of a generation do; None without any."""
        keys = [span.key for span in self.of_gen(gen)]
        return hashlib.sha256("\n".join(keys).encode()).hexdigest() if keys else None

    def _all(self, condition: str, values: tuple[Any, ...] = ()) -> list[Span]:
        rows = self._db.all(f"SELECT {_COLUMNS} FROM span WHERE {condition}", values)
        return [
            Span(key, gen, start, end, etag, to_unsigned(crc64), asked_ns)
            for key, gen, start, end, etag, crc64, asked_ns in rows
        ]
