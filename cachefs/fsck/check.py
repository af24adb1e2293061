"""One run of the check: database, then cache files, then their bytes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cachefs.fsck.content import Content
from cachefs.fsck.files import Files
from cachefs.fsck.place import Place, home_of, number
from cachefs.fsck.report import Progress, Report
from cachefs.meta import ring, wal
from cachefs.meta.database import SCHEMA_VERSION
from cachefs.meta.inspection import Inspection
from cachefs.meta.invariants import INVARIANTS


@contextmanager
def locked(directories: Sequence[Path]) -> Iterator[list[Place]]:
    """The cache directories of one mount, in its order, locked. NotCheckable."""
    places: list[Place] = []
    try:
        for index, directory in enumerate(directories):
            places.append(Place(index, directory))
        yield places
    finally:
        for place in places:
            place.close()


def check(
    directories: Sequence[Path],
    *,
    repair: bool = False,
    content: bool = True,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Check the cache in `directories`, the one with the database first, and mend it if asked to.

    `content`: compare bytes with checksums too. Raises NotCheckable, OSError.
    """
    report = Report([str(directory) for directory in directories])
    with locked(directories) as places:
        first = home_of(places)
        _bring_to_log(first.database, report, repair)
        if not first.database.exists() or not first.database.stat().st_size:
            _without_database(places, report)
            return report
        log = wal.examine(first.database)
        if log.damage is not None:
            report.add("log-damaged", f"{first.database}-wal: {log.damage}", repaired=repair)
        if repair:
            _back_up(first, damaged_log=log.damage is not None)
            _check_all(places, first.database, log, report, True, content, progress)
            return report
        with tempfile.TemporaryDirectory(prefix="cachefs-fsck-") as scratch:
            copy = copy_database(first.database, Path(scratch), with_log=log.damage is None)
            _check_all(places, copy, log, report, False, content, progress)
    return report


def _bring_to_log(database: Path, report: Report, repair: bool) -> None:
    """What a daemon that was killed had committed while the disk stood still."""
    left = ring.recover(database)
    left.close()
    if left.note and not left.is_gone:
        report.add("commits-waiting", left.note, repaired=repair)
        if repair:
            ring.pointer(database).unlink(missing_ok=True)


def _without_database(places: Sequence[Place], report: Report) -> None:
    if count := sum(len(place.numbers()) for place in places):
        report.salvageable = True
        where = f"{places[0].database}: {count} cache files are there"
        report.add("database-missing", f"{where} (or is this not the mount's first directory?)")


def copy_database(database: Path, scratch: Path, *, with_log: bool) -> Path:
    """Opening a database may change it: its log becomes part of it."""
    copy = scratch / database.name
    shutil.copyfile(database, copy)
    log = database.with_name(f"{database.name}-wal")
    if with_log and log.exists():
        shutil.copyfile(log, scratch / log.name)
    return copy


def _back_up(place: Place, *, damaged_log: bool) -> None:
    """The database as it was found stays, in `salvaged/`; a damaged log goes there."""
    place.set_aside(place.database, copy=True)
    log = place.database.with_name(f"{place.database.name}-wal")
    if log.exists() and log.stat().st_size:
        place.set_aside(log, copy=not damaged_log)
    if damaged_log:
        place.database.with_name(f"{place.database.name}-shm").unlink(missing_ok=True)


def _check_all(
    places: Sequence[Place],
    database: Path,
    log: wal.Wal,
    report: Report,
    repair: bool,
    content: bool,
    progress: Progress,
) -> None:
    inspection = Inspection(database)
    try:
        if not _is_readable(inspection, database, log, report, repair):
            return
        if not _check_values(inspection, report, repair):
            return  # Nothing else can be said before that is mended.
        inspection.complete()
        number(places, inspection.devices())
        _check_rows(inspection, report, repair)
        files = Files(places, inspection, report, repair=repair)
        sound = files.check()
        if content:
            known = {place.index: place for place in places}
            Content(known, files, report, progress).check(sound, inspection.sent())
    except sqlite3.Error as error:
        report.salvageable = True
        report.add("database-damaged", f"{home_of(places).database}: {error}")
    finally:
        inspection.close()


def _is_readable(
    inspection: Inspection, database: Path, log: wal.Wal, report: Report, repair: bool
) -> bool:
    damage = inspection.damage()
    if damage is not None and repair:
        try:
            inspection.reindex()
        except sqlite3.Error:
            pass  # What is damaged is more than an index.
        left = inspection.damage()
        report.add("database-damaged", damage, repaired=left is None)
        report.salvageable = left is not None
        return left is None
    if damage is not None:
        report.add("database-damaged", damage)
        report.salvageable = True
        return False
    if log.damage is None and log.size and (lost := _lost_commits(database, log)):
        report.add("log-damaged", f"{lost} changes are beyond reach", repaired=repair)
    if (version := inspection.version()) > SCHEMA_VERSION:
        report.add("database-too-new", f"schema version {version}, known is {SCHEMA_VERSION}")
        return False
    return True


def _lost_commits(database: Path, log: wal.Wal) -> int:
    index = wal.open_index(database)
    try:
        return wal.lost_commits(database, log, index)
    finally:
        os.close(index)


def _check_values(inspection: Inspection, report: Report, repair: bool) -> bool:
    found = [what for what, _ in inspection.odd_values()]
    left = inspection.mend_values() if repair and found else found
    for what in found:
        report.add("odd-value", what, repaired=what not in left)
    return not left


def _check_rows(inspection: Inspection, report: Report, repair: bool) -> None:
    while _check_rows_once(inspection, report, repair):
        pass  # What is mended may let something else be seen.
    for gen, why in inspection.bad_extents():
        report.add("extents-without-sense", f"generation {gen}, {why}", repaired=repair)
        if repair:
            inspection.forget_extents(gen)


def _check_rows_once(inspection: Inspection, report: Report, repair: bool) -> bool:
    """Whether anything was mended."""
    known = {(each.check, each.subject) for each in report.findings}
    changed = False
    for invariant in INVARIANTS:
        found = inspection.offences(invariant)
        left = set(inspection.mend(invariant) if repair and found else found)
        for line in dict.fromkeys([*found, *left]):
            if (invariant.name, line) not in known:
                report.add(invariant.name, line, repaired=line not in left)
                changed |= line not in left
    return changed
