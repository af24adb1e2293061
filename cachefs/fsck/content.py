"""Bytes of cache files against the checksums that are known of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cachefs.errors import CacheError
from cachefs.fsck.files import Files
from cachefs.fsck.place import Place
from cachefs.fsck.report import Progress, Report
from cachefs.meta.inspection import FileRow, Sent
from cachefs.model.states import GenState
from cachefs.store.base import FileRange
from cachefs.store.crc import extend
from cachefs.store.transfer import pieces


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes [start, end) of a generation should have a checksum."""

    row: FileRow
    start: int
    end: int
    crc64: int


class Content:
    """Compares what can be compared."""

    def __init__(
        self, places: Mapping[int, Place], files: Files, report: Report, progress: Progress
    ) -> None:
        self._places = places
        self._files = files
        self._report = report
        self._progress = progress
        self._total = 0

    def check(self, rows: Iterable[FileRow], sent: Iterable[Sent]) -> None:
        """Read all that has a checksum."""
        ranges = list(self._ranges({row.gen: row for row in rows}, list(sent)))
        self._total = sum(each.end - each.start for each in ranges)
        wrong: set[int] = set()
        for each in ranges:
            if each.row.gen not in wrong and not self._fits(each):
                wrong.add(each.row.gen)
                self._files.damaged(
                    "file-content", each.row, f"bytes {each.start} to {each.end} are other ones"
                )

    def _ranges(self, rows: dict[int, FileRow], sent: list[Sent]) -> Iterator[_Range]:
        for row in rows.values():
            settled = row.state not in (GenState.OPEN, GenState.HELD)
            if row.crc64 is not None and row.is_whole and settled and not row.grows:
                yield _Range(row, 0, row.size, row.crc64)
        for part in sent:
            row_of = rows.get(part.gen)
            if row_of is not None and row_of.state not in (GenState.OPEN, GenState.HELD):
                yield _Range(row_of, part.start, part.end, part.crc64)

    def _fits(self, each: _Range) -> bool:
        path = str(self._places[each.row.device].path(each.row.file))
        value = 0
        try:
            for piece in pieces(FileRange(path, each.start, each.end)):
                value = extend(value, piece)
                self._report.read_bytes += len(piece)
                self._progress(self._report.read_bytes, self._total)
        except CacheError:
            return False
        return value == each.crc64
