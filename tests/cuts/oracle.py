"""What must be true after a power cut, by what programs had been told before it.

Every commit that was made before an fsync began is on the disk once that fsync returns, whoever
asked for it. So at a cut the namespace is one that it had between the beginning of the last fsync
that returned (the floor) and the cut; a file that was synced itself has bytes no older than that.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.cuts.writer import block

Fact = dict[str, Any]
_SECTOR = 512
_CHANGES = ("write", "trunc")


@dataclass(frozen=True, slots=True)
class Span:
    """Versions of a file that may be found: by number of changes; `synced`: bytes count."""

    file: str
    first: int
    last: int
    synced: bool


class Oracle:
    """All that the writers wrote down."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.facts: list[Fact] = [json.loads(line) for line in lines]
        self.by_file: dict[str, list[Fact]] = defaultdict(list)
        self.by_name: dict[str, list[tuple[Fact, str | None]]] = defaultdict(list)
        for fact in self.facts:
            self.by_file[fact.get("file", "")].append(fact)
            for name, occupant in _occupations(fact):
                self.by_name[name].append((fact, occupant))

    # ---- names ---------------------------------------------------------------------------------

    def floor(self, cut: int) -> int:
        """What ended before this is on the disk."""
        synced = (f["begin"] for f in self.facts if f["op"] == "fsync" and f["end"] <= cut)
        return max(synced, default=0)

    def occupants(self, name: str, cut: int) -> set[str | None]:
        """Files that the name may stand for; None: it may be absent."""
        floor = self.floor(cut)
        found: set[str | None] = {None}
        for fact, occupant in self.by_name[name]:
            if fact["end"] <= floor:
                found = {occupant}
            elif fact["begin"] <= cut:
                found.add(occupant)
        return found

    # ---- bytes ---------------------------------------------------------------------------------

    def span(self, file: str, cut: int) -> Span:
        """Which versions may be found."""
        changes, first, last, synced = 0, 0, 0, False
        for fact in self.by_file[file]:
            changes += fact["op"] in _CHANGES
            if fact["begin"] <= cut:
                last = changes
            if fact["op"] == "fsync" and fact["end"] <= cut:
                first, synced = changes, True
        return Span(file, first, last, synced)

    def content(self, file: str, version: int) -> bytes:
        """The bytes after so many changes."""
        data, changes = bytearray(), 0
        for fact in self.by_file[file]:
            if fact["op"] in _CHANGES:
                changes += 1
                if changes > version:
                    break
            if fact["op"] == "trunc" and changes <= version:
                data.clear()
            elif fact["op"] == "write":
                end = fact["at"] + fact["length"]
                data.extend(bytes(max(0, end - len(data))))
                data[fact["at"] : end] = block(fact["seed"], fact["length"])
        return bytes(data)

    def sealed(self, file: str, cut: int) -> Iterator[int]:
        """Versions that a close made complete before the cut, or was about to."""
        changes = 0
        for fact in self.by_file[file]:
            changes += fact["op"] in _CHANGES
            if fact["op"] == "close" and fact["begin"] <= cut:
                yield changes

    def is_possible(self, data: bytes, span: Span) -> bool:
        """Whether a file may hold this: a version, or a mixture of those that were being written.
        Of a file that was never synced anything may be left."""
        if not span.synced:
            return True
        versions = [self.content(span.file, v) for v in range(span.first, span.last + 1)]
        return data in versions or _is_mixture(data, versions)

    def describe(self, data: bytes, span: Span) -> str:
        """Where it differs from each version, for people."""
        told = []
        for number in range(span.first, span.last + 1):
            version = self.content(span.file, number)
            common = min(len(data), len(version))
            sectors = [s for s in range(0, common, _SECTOR)
                       if data[s : s + _SECTOR] != version[s : s + _SECTOR]]  # fmt: skip
            zeros = sum(not any(data[s : s + _SECTOR]) for s in sectors)
            told.append(
                f"version {number} of {len(version)} bytes: {len(sectors)} sectors differ,"
                f" {zeros} of them zero, from {sectors[:1]} to {sectors[-1:]}"
            )
        changes = [(f["op"], f.get("at"), f.get("length")) for f in self.by_file[span.file]]
        return f"{span.file}: {'; '.join(told)}; {changes}"

    def is_sealed(self, data: bytes, files: Iterable[str], cut: int) -> bool:
        """Whether it is what one of the files held when it was closed."""
        return any(
            data == self.content(file, version)
            for file in files
            for version in self.sealed(file, cut)
        )

    def files_of(self, name: str) -> set[str]:
        """All that ever had the name."""
        return {occupant for _, occupant in self.by_name[name] if occupant is not None}


def _occupations(fact: Fact) -> Iterator[tuple[str, str | None]]:
    if fact["op"] == "create":
        yield fact["name"], fact["file"]
    elif fact["op"] == "unlink":
        yield fact["name"], None
    elif fact["op"] == "rename":
        yield fact["old"], None
        yield fact["new"], fact["file"]


def _is_mixture(data: bytes, versions: list[bytes]) -> bool:
    """Each byte is that of some version, and none is missing that all of them have."""
    if len(data) < min(map(len, versions)):
        return False
    for start in range(0, len(data), _SECTOR):
        piece = data[start : start + _SECTOR]
        if any(version[start : start + _SECTOR] == piece for version in versions):
            continue
        if not all(_is_in(piece, start, i, versions) for i in range(len(piece))):
            return False
    return True


def _is_in(piece: bytes, start: int, index: int, versions: list[bytes]) -> bool:
    at = start + index
    if piece[index] == 0 and any(at >= len(version) for version in versions):
        return True  # Grown, and its bytes never arrived.
    return any(at < len(version) and version[at] == piece[index] for version in versions)


def check(oracle: Oracle, cut: int, shown: dict[str, bytes | str], bucket: dict[str, bytes],
          names: Callable[[], Iterable[str]] | None = None) -> list[str]:  # fmt: skip
    """What is wrong with what was recovered: `shown` has bytes, or the error of reading them."""
    wrong = []
    for name in names() if names is not None else list(oracle.by_name):
        may_be = oracle.occupants(name, cut)
        data = shown.get(name)
        if data is None:
            if None not in may_be and any(oracle.span(f, cut).synced for f in may_be if f):
                wrong.append(f"{name} is gone: {may_be}")
            continue
        spans = [oracle.span(file, cut) for file in may_be if file is not None]
        if isinstance(data, str):
            if None not in may_be and all(span.synced for span in spans):
                wrong.append(f"{name} cannot be read: {data}; {spans}")
        elif not any(oracle.is_possible(data, span) for span in spans):
            wrong.append(f"{name} holds {len(data)} bytes of nothing that it can be: {spans}")
            wrong += [oracle.describe(data, span) for span in spans]
    for key, data in bucket.items():
        if not oracle.is_sealed(data, oracle.files_of(key), cut):
            wrong.append(f"the bucket shows {len(data)} bytes as {key} that never were complete")
    return wrong
