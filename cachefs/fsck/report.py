"""What a check found, and the names of all checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cachefs.meta.invariants import INVARIANTS

CLEAN, TROUBLE, MENDED = 0, 1, 3
"""Exit codes: nothing is wrong; something is, and still is; something was, all of it is mended. 2
is wrong usage, 4 a directory that cannot be checked (in use, no cache)."""
UNCHECKED = 4

FILE_CHECKS: dict[str, tuple[str, bool]] = {
    "database-missing": ("there are cache files and no database that knows them", False),
    "database-damaged": ("the database cannot be read as a whole", True),
    "database-too-new": ("the database was written by a newer cachefs", False),
    "log-damaged": ("the database's write-ahead log is damaged: changes are lost", True),
    "commits-waiting": ("changes that waited in memory for the disk cannot be used", True),
    "odd-value": ("a column holds what is not of its type", True),
    "extents-without-sense": ("which bytes are dirty or present cannot be told", True),
    "file-missing": ("a dirty generation has no cache file", False),
    "file-lost": ("the machine went down before a file was ever synced: it is lost", False),
    "copy-missing": ("a durable generation has no cache file: it will be fetched", False),
    "second-missing": ("the second cache file of a generation is not there", True),
    "file-size": ("a cache file is not as long as it was when it was closed", True),
    "file-content": ("the bytes of a cache file are not those that were written", True),
    "file-unknown": ("a cache file of no generation", True),
    "no-file": ("what should be a cache file is something else", True),
    "open-to-others": ("other users may read or write the cache", True),
    "foreign-file": ("a file that is none of the cache's; left alone", False),
}
"""Checks that look at files: what is wrong, and whether it can be mended."""

CHECKS: dict[str, tuple[str, bool]] = {
    **FILE_CHECKS,
    **{each.name: (each.meaning, bool(each.mend)) for each in INVARIANTS},
}
"""Every check by its name."""

LEFTOVERS = {each.name for each in INVARIANTS if each.leftover} | {
    "copy-missing",
    "file-lost",
    "file-unknown",
    "foreign-file",
}
"""What is no trouble: a daemon that was killed may leave it, or a power cut, since nothing was
promised of it; or it is not ours."""

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read) now and then."""


@dataclass(slots=True)
class Finding:
    """One offence."""

    check: str
    subject: str
    """What is concerned, with its path where that is known."""
    repaired: bool = False

    @property
    def is_trouble(self) -> bool:
        """False for what the next mount clears away, or nobody need care about."""
        return self.check not in LEFTOVERS


@dataclass(slots=True)
class Report:
    """All of one run."""

    cache_dirs: list[str]
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    """Cache files looked at."""
    read_bytes: int = 0
    """Bytes whose checksum was compared."""
    salvageable: bool = False
    """True when only `--salvage` is left."""

    def add(self, check: str, subject: str, *, repaired: bool = False) -> None:
        """Note an offence."""
        assert check in CHECKS
        self.findings.append(Finding(check, subject, repaired))

    @property
    def exit_code(self) -> int:
        """See the constants above."""
        trouble = [each for each in self.findings if each.is_trouble]
        if any(not each.repaired for each in trouble):
            return TROUBLE
        return MENDED if trouble else CLEAN

    def as_json(self) -> dict[str, Any]:
        """Stable keys."""
        findings = [
            {**asdict(each), "trouble": each.is_trouble, "meaning": CHECKS[each.check][0]}
            for each in self.findings
        ]
        return {
            "cache_dirs": self.cache_dirs,
            "clean": self.exit_code == CLEAN,
            "exit_code": self.exit_code,
            "findings": findings,
            "files": self.files,
            "read_bytes": self.read_bytes,
            "checks": sorted(CHECKS),
        }
