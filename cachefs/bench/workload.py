"""What a run writes: plain values, sent to the ranks as they are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cachefs.errors import UsageError

ALIGNMENT = 4096
"""Direct I/O wants offsets, lengths and addresses in multiples of this many bytes."""


class Style(StrEnum):
    """How a rank writes its shards."""

    BLOCKING = "blocking"
    """One after the other with write(2), as most training code does."""
    ASYNC = "async"
    """All at once in one event loop with aiofiles, as asyncio training libraries do."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One checkpoint: `ranks` processes, each with `files` shards of `size` bytes."""

    size: int
    block: int
    """Bytes for each write; the last one of a file may be shorter."""
    ranks: int
    files: int
    fsync: bool = False
    direct: bool = False
    """O_DIRECT, for writing and for reading."""
    verify: bool = False
    """Read every file back and compare checksums."""
    read: bool = False
    """Read every file back and measure that."""
    publish: bool = False
    """Ordinary names. Otherwise names end in `.tmp`, which a cachefs mount does not upload."""

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot be run."""
        for name in ("size", "block", "ranks", "files"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1")
        if self.direct and (self.size % ALIGNMENT or self.block % ALIGNMENT):
            raise UsageError(f"--direct needs --size and --block in multiples of {ALIGNMENT} bytes")

    @property
    def total(self) -> int:
        """Bytes of one round in one directory and one style."""
        return self.size * self.ranks * self.files

    def shard(self, rank: int, number: int) -> str:
        """The name of a rank's file."""
        name = f"shard-{rank:04}-{number:04}.bin"
        return name if self.publish else f"{name}.tmp"


@dataclass(frozen=True, slots=True)
class Task:
    """What one rank is told to do: its shards of `workload`, in `directory`."""

    workload: Workload
    style: Style
    directory: str
    rank: int


@dataclass(slots=True)
class Timings:
    """What one rank measured: seconds each call took, in the order of the calls."""

    open: list[float]
    write: list[float]
    fsync: list[float]
    close: list[float]
    read: list[float]

    @classmethod
    def empty(cls) -> Timings:
        """No calls yet."""
        return cls([], [], [], [], [])

    def add(self, other: Timings) -> None:
        """Join another rank's or round's calls."""
        for name in OPERATIONS:
            getattr(self, name).extend(getattr(other, name))


OPERATIONS = ("open", "write", "fsync", "close", "read")
"""Fields of `Timings`, in the order of tables."""


@dataclass(slots=True)
class Outcome:
    """What one rank reports for one task."""

    timings: Timings
    write_seconds: float
    """From the common start to this rank's last close."""
    read_seconds: float | None
    """For reading all shards back; None if that was not asked for."""
    bad: list[str]
    """Files that did not read back as written; empty also when nobody checked."""
