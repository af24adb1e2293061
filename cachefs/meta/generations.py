"""Queries on generations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cachefs.failpoints import Change
from cachefs.meta.database import Database
from cachefs.meta.numbers import Numbers
from cachefs.meta.rows import GenerationRow, to_signed, to_unsigned

_COLUMNS = (
    "gen,ino,device,file,state,lane,size,dirty,base,present,crc64,"
    "created_ns,sealed_ns,used_ns,synced,grows,error,copy_device,copy_file,copy_size,anchored"
)


_INSERT = f"INSERT INTO generation({_COLUMNS}) VALUES({','.join('?' * 21)})"
_PENDING = "state NOT IN ('open','durable')"
_WAITING = "('sealed','stalled','conflicted')"


class Generations:
    """The `generation` table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._numbers = Numbers(db, "next_generation")

    def get(self, gen: int) -> GenerationRow | None:
        """One generation, None when there is none of that number."""
        row = self._db.one(f"SELECT {_COLUMNS} FROM generation WHERE gen=?", (gen,))
        return _row(row) if row else None

    def current(self, ino: int) -> GenerationRow | None:
        """The generation that an inode's readers see, None when nothing of it is in the cache."""
        sql = f"SELECT {_COLUMNS} FROM generation WHERE gen=(SELECT gen FROM inode WHERE ino=?)"
        row = self._db.one(sql, (ino,))
        return _row(row) if row else None

    def add(self, row: GenerationRow) -> int:
        """Insert; `row.gen` 0 takes a new number. Returns and stores the number."""
        row.gen = row.gen or self._numbers.take()
        self._db.execute(_INSERT, _values(row))
        return row.gen

    def add_all(self, rows: Iterable[GenerationRow]) -> None:
        """Insert many that have their numbers."""
        self._db.many(_INSERT, map(_values, rows))

    def new_number(self) -> int:
        """A number for a generation that is to be added."""
        return self._numbers.take()

    def save(self, row: GenerationRow) -> None:
        """Write every column back but the number, the copy and `anchored`."""
        self._db.execute(
            "UPDATE generation SET ino=?,device=?,file=?,state=?,lane=?,size=?,dirty=?,base=?,"
            "present=?,crc64=?,created_ns=?,sealed_ns=?,used_ns=?,synced=?,grows=?,error=?"
            " WHERE gen=?",
            (
                row.ino,
                row.device,
                row.file,
                row.state,
                row.lane,
                row.size,
                row.dirty,
                row.base,
                row.present,
                to_signed(row.crc64),
                row.created_ns,
                row.sealed_ns,
                row.used_ns,
                row.synced,
                row.grows,
                row.error,
                row.gen,
            ),
        )

    def seal(self, row: GenerationRow) -> None:
        """Write back what sealing sets."""
        self._db.execute(
            "UPDATE generation SET state=?,size=?,dirty=?,base=?,sealed_ns=?,used_ns=?,synced=?"
            " WHERE gen=?",
            (
                row.state,
                row.size,
                row.dirty,
                row.base,
                row.sealed_ns,
                row.used_ns,
                row.synced,
                row.gen,
            ),
        )

    def set_state(self, gen: int, state: str, error: str | None = None) -> None:
        """New state, with the reason for the states that need one."""
        self._db.execute("UPDATE generation SET state=?,error=? WHERE gen=?", (state, error, gen))

    def set_checksum(self, gen: int, crc64: int) -> bool:
        """CRC64NVME of what it was closed with; False when it does not wait for the store now."""
        cursor = self._db.execute(
            f"UPDATE generation SET crc64=? WHERE gen=? AND state IN {_WAITING}",
            (to_signed(crc64), gen),
        )
        return cursor.rowcount > 0

    def unchecked(self, before_ns: int, limit: int) -> list[GenerationRow]:
        """Generations without a checksum that were sealed before `before_ns` and still wait."""
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM generation WHERE state IN {_WAITING} AND {_PENDING}"
            " AND crc64 IS NULL AND synced AND NOT grows AND sealed_ns<?"
            " AND gen NOT IN (SELECT gen FROM span) ORDER BY gen LIMIT ?",
            (before_ns, limit),
        )
        return [_row(row) for row in rows]

    def set_copy(self, gen: int, device: int, file: int, size: int | None) -> None:
        """There is, or is to be, a second cache file of it; `size` once that is on the disk."""
        self._db.execute(
            "UPDATE generation SET copy_device=?,copy_file=?,copy_size=? WHERE gen=?",
            (device, file, size, gen),
        )

    def forget_copy(self, gen: int) -> None:
        """There is no second cache file of it any more."""
        self._db.execute(
            "UPDATE generation SET copy_device=NULL,copy_file=NULL,copy_size=NULL WHERE gen=?",
            (gen,),
        )

    def move_to_copy(self, gen: int) -> None:
        """The second cache file is its only one from now on."""
        self._db.execute(
            "UPDATE generation SET device=copy_device,file=copy_file WHERE gen=?", (gen,)
        )
        self.forget_copy(gen)

    def with_copies(self) -> list[GenerationRow]:
        """Generations that have a second cache file, whole or not."""
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM generation WHERE copy_file IS NOT NULL ORDER BY gen"
        )
        return [_row(row) for row in rows]

    def closed_on(self, device: int) -> list[GenerationRow]:
        """What is closed, not durable and on a device, in the order in which it was closed."""
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM generation WHERE device=? AND {_PENDING} AND NOT grows"
            " ORDER BY sealed_ns,gen",
            (device,),
        )
        return [_row(row) for row in rows]

    def set_synced(self, gen: int, sealed_ns: int | None) -> None:
        """The bytes with which it was sealed, at this time, survive a power cut from now on. Of one
        that was written to again since nothing is noted."""
        change = "UPDATE generation SET synced=1,anchored=1"
        self._db.execute(
            f"{change} WHERE gen=? AND sealed_ns IS ? AND state<>'open'", (gen, sealed_ns)
        )

    def set_anchored(self, gen: int) -> None:
        """Its cache file's directory entry survives a power cut, whatever becomes of its bytes."""
        self._db.execute("UPDATE generation SET anchored=1 WHERE gen=?", (gen,))

    def unsynced(self) -> list[tuple[int, int]]:
        """(device, file) of those whose bytes are not known to survive a power cut."""
        return self._db.all("SELECT device,file FROM generation WHERE synced=0")

    def touch(self, gens: Iterable[tuple[int, int]]) -> None:
        """Record last uses, given as (used_ns, gen)."""
        with self._db.transaction(Change.USES):
            for used_ns, gen in gens:
                self._db.execute("UPDATE generation SET used_ns=? WHERE gen=?", (used_ns, gen))

    def remove(self, gen: int) -> None:
        """Delete the row; what the store holds of it under hidden keys is to be deleted as well."""
        self._db.execute("DELETE FROM generation WHERE gen=?", (gen,))
        self._db.execute("UPDATE span SET gen=0 WHERE gen=?", (gen,))

    def of_inode(self, ino: int) -> list[GenerationRow]:
        """Every generation of an inode, oldest first."""
        rows = self._db.all(f"SELECT {_COLUMNS} FROM generation WHERE ino=? ORDER BY gen", (ino,))
        return [_row(row) for row in rows]

    def in_states(self, *states: str) -> list[GenerationRow]:
        """Every generation in one of the states, oldest first."""
        marks = ",".join("?" * len(states))
        # Repeated as the partial index has it, so that it is used where it can be.
        pending = "" if {"open", "durable"} & set(states) else f" AND {_PENDING}"
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM generation WHERE state IN ({marks}){pending} ORDER BY gen",
            states,
        )
        return [_row(row) for row in rows]

    def durable(
        self, device: int, limit: int, after: tuple[int, int] = (-1, 0)
    ) -> list[GenerationRow]:
        """Durable generations of a device, oldest use first, `after` (used_ns, gen)."""
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM generation WHERE device=? AND state='durable'"
            " AND (used_ns,gen)>(?,?) ORDER BY used_ns,gen LIMIT ?",
            (device, *after, limit),
        )
        return [_row(row) for row in rows]

    def only_on(self, device: int) -> list[GenerationRow]:
        """Generations that the store lacks, or may lack, and whose cache file is on a device."""
        rows = self._db.all(
            f"SELECT {_COLUMNS} FROM generation WHERE device=? AND state<>'durable'"
            " AND copy_size IS NULL ORDER BY gen",
            (device,),
        )
        return [_row(row) for row in rows]

    def on(self, device: int) -> Iterator[GenerationRow]:
        """Every generation on a device, one by one: whoever asks may have seen enough soon."""
        sql = f"SELECT {_COLUMNS} FROM generation WHERE device=?"
        return map(_row, self._db.execute(sql, (device,)))

    def devices(self) -> set[int]:
        """Numbers of the devices that cache files are on."""
        return {row[0] for row in self._db.all("SELECT DISTINCT device FROM generation")}

    def files(self, device: int) -> set[int]:
        """Numbers of every cache file that a generation has on a device."""
        rows = self._db.all(
            "SELECT file FROM generation WHERE device=?1"
            " UNION SELECT copy_file FROM generation WHERE copy_device=?1",
            (device,),
        )
        return {row[0] for row in rows}

    def last_file(self) -> int:
        """The highest cache file number in use."""
        row = self._db.one(
            "SELECT coalesce(max(max(file,coalesce(copy_file,0))),0) FROM generation"
        )
        return int(row[0]) if row else 0

    def pending_totals(self) -> tuple[int, int]:
        """(files, bytes) of generations that are sealed and not yet durable."""
        row = self._db.one(
            "SELECT count(*),coalesce(sum(size),0) FROM generation WHERE state NOT IN"
            " ('open','durable','superseded')"
        )
        assert row is not None
        return row[0], row[1]


def _row(values: tuple[Any, ...]) -> GenerationRow:
    row = GenerationRow(*values)
    row.crc64 = to_unsigned(row.crc64)
    return row


def _values(row: GenerationRow) -> tuple[object, ...]:
    return (
        row.gen,
        row.ino,
        row.device,
        row.file,
        row.state,
        row.lane,
        row.size,
        row.dirty,
        row.base,
        row.present,
        to_signed(row.crc64),
        row.created_ns,
        row.sealed_ns,
        row.used_ns,
        row.synced,
        row.grows,
        row.error,
        row.copy_device,
        row.copy_file,
        row.copy_size,
        row.anchored,
    )
