"""Cache files against the rows that describe them: is each there, of its size, and only ours."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from cachefs.cache.journal import Journal
from cachefs.cache.system import boot_id
from cachefs.fsck.place import Place, home_of
from cachefs.fsck.report import Report
from cachefs.meta.inspection import FileRow, Inspection
from cachefs.model.states import DAMAGED, NEVER_ON_DISK, GenState

_GROWING = (GenState.OPEN, GenState.HELD)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Files:
    """All cache files of one cache."""

    def __init__(
        self, places: Sequence[Place], inspection: Inspection, report: Report, *, repair: bool
    ) -> None:
        self._places = {place.index: place for place in places}
        self._inspection = inspection
        self._report = report
        self._repair = repair
        self._rebooted = inspection.boot() not in ("", boot_id())

    def check(self) -> list[FileRow]:
        """Check them all; returns the generations whose content may be compared."""
        sound = [row for row in self._inspection.files() if self._is_sound(row)]
        for row in self._inspection.files():
            self._check_second(row)
        for place in self._places.values():
            self._check_unknown(place)
        return sound

    def describe(self, row: FileRow) -> str:
        """A generation for people: its path if it has one."""
        path = self._inspection.path_of(row.ino)
        shown = path if path is not None else f"inode {row.ino}"
        return f"{shown} (generation {row.gen}, {row.state}, file {row.file})"

    def _is_sound(self, row: FileRow) -> bool:
        place = self._places.get(row.device)
        if place is None:
            return False  # On a device that was not named: nothing can be said.
        self._report.files += 1
        path = place.path(row.file)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            self._missing(row)
            return False
        if not stat.S_ISREG(found.st_mode):
            self.damaged("no-file", row, f"{path} is no regular file")
            return False
        self._check_mode(path, found)
        return self._has_its_size(row, found.st_size)

    def _check_second(self, row: FileRow) -> None:
        place = self._places.get(row.copy_device) if row.copy_device is not None else None
        if place is None or row.copy_file is None or place.path(row.copy_file).exists():
            return
        self._report.add("second-missing", self.describe(row), repaired=self._repair)
        if self._repair:
            self._inspection.forget_second(row.gen)

    def _missing(self, row: FileRow) -> None:
        if row.state == GenState.DURABLE:
            self._report.add("copy-missing", self.describe(row), repaired=self._repair)
            if self._repair:
                self._inspection.forget_copy(row.gen)
        elif not row.grows:
            check = "file-lost" if self._went_with_power(row) else "file-missing"
            self._report.add(check, self.describe(row))

    def _went_with_power(self, row: FileRow) -> bool:
        """Whether nothing of it was ever on the disk when the machine went down."""
        if row.error == NEVER_ON_DISK:
            return True
        place, never = self._places[row.device], not row.anchored and row.copy_size is None
        return never and self._rebooted and place.outlives_power

    def _has_its_size(self, row: FileRow, size: int) -> bool:
        if row.state in _GROWING or size == row.size or (row.grows and size > row.size):
            return True
        if row.state == GenState.DURABLE and size > row.size:
            return True
        self.damaged("file-size", row, f"it has {size} bytes of {row.size}")
        return False

    def damaged(self, check: str, row: FileRow, what: str) -> None:
        """A cache file is not what it should be: a copy is given up, and for what is nowhere else
        a person decides."""
        self._report.add(check, f"{self.describe(row)}: {what}", repaired=self._repair)
        if not self._repair:
            return
        if row.state == GenState.DURABLE:
            self._inspection.forget_copy(row.gen)
            self._places[row.device].set_aside(self._places[row.device].path(row.file))
        else:
            self._inspection.hold(row.gen, f"{DAMAGED}: {what}")

    def _check_mode(self, path: Path, found: os.stat_result) -> None:
        if not stat.S_IMODE(found.st_mode) & _OTHERS:
            return
        mode = stat.S_IMODE(found.st_mode)
        self._report.add("open-to-others", f"{path} has mode {mode:o}", repaired=self._repair)
        if self._repair:
            os.chmod(path, mode & ~_OTHERS, follow_symlinks=True)

    def _check_unknown(self, place: Place) -> None:
        for path in (place.directory, place.directory / "files", place.directory / "meta"):
            if path.is_dir():
                self._check_mode(path, path.stat())
        if place.database.exists():
            self._check_mode(place.database, place.database.stat())
        known: set[int | None] = set()
        for row in self._inspection.files():
            known |= {row.file} if row.device == place.index else set()
            known |= {row.copy_file} if row.copy_device == place.index else set()
        known |= self._in_journal(place.index)
        for number in sorted(place.numbers() - known):
            self._unknown(place, place.path(number))
        for path in sorted(place.foreign()):
            self._report.add("foreign-file", str(path))

    def _in_journal(self, device: int) -> set[int]:
        """Cache files that the next daemon takes in: see `cache.journal`."""
        home = home_of(list(self._places.values()))
        left = Journal(home.directory / "meta" / "journal").left()
        return {record.file for record in left if record.device == device}

    def _unknown(self, place: Place, path: Path) -> None:
        size = os.lstat(path).st_size
        self._report.add("file-unknown", f"{path} ({size} bytes)", repaired=self._repair)
        if self._repair:
            place.set_aside(path)
