"""Load, numbers and document, without the command line."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.bench import report, runner
from cachefs.bench.content import Content
from cachefs.bench.runner import BenchError, Measurement, measure
from cachefs.bench.stats import Latency, percentile, ratio_of_medians
from cachefs.bench.workload import Style, Task, Timings, Workload
from cachefs.bench.writers import differing, paths, write_all
from cachefs.errors import UsageError

STYLES = list(Style)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 1001)]
    assert [percentile(values, share) for share in (50, 99, 99.9, 100)] == [500, 990, 999, 1000]
    assert percentile([7.0], 50) == percentile([7.0], 99.9) == 7.0
    assert Latency.of([3.0, 1.0, 2.0]) == Latency(3, 2.0, 3.0, 3.0, 3.0)
    assert Latency.of([]) is None


def test_ratio_of_medians() -> None:
    assert ratio_of_medians([1.0, 9.0, 2.0], [4.0, 4.0, 100.0]) == 0.5


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size": 0}, "--size"),
        ({"block": 0}, "--block"),
        ({"direct": True, "size": 5000}, "multiples of 4096"),
        ({"direct": True, "block": 100}, "multiples of 4096"),
    ],
)
def test_loads_that_make_no_sense(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        replace(Workload(size=8192, block=4096, ranks=1, files=1), **changes)


def test_every_file_and_block_is_different() -> None:
    work = Workload(size=10_000, block=4096, ranks=2, files=2)
    blocks = [bytes(block) for block in Content(work, 0, 0).blocks()]
    assert [len(block) for block in blocks] == [4096, 4096, 1808]
    assert len(set(blocks)) == 3
    sums = {Content(work, rank, number).checksum() for rank in (0, 1) for number in (0, 1)}
    assert len(sums) == 4
    assert Content(work, 1, 1).checksum() == Content(work, 1, 1).checksum()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_written_reads_back(tmp_path: Path, style: Style, direct: bool) -> None:
    work = Workload(size=40_960, block=8192, ranks=1, files=3, fsync=True, direct=direct)
    task = Task(work, style, str(tmp_path), 0)
    contents = [Content(work, 0, number) for number in range(3)]
    timings, seen = Timings.empty(), 0

    def count(number: int) -> None:
        nonlocal seen
        seen += number

    write_all(task, contents, timings, count)
    assert seen == work.total
    assert [len(getattr(timings, n)) for n in ("open", "write", "fsync", "close")] == [3, 15, 3, 3]
    assert differing(task, contents) == []
    assert all(Path(path).stat().st_size == 40_960 for path in paths(task))
    damaged = Path(paths(task)[1])
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    assert differing(task, contents) == [damaged.name]


def test_names_that_a_mount_does_not_upload_unless_told() -> None:
    work = Workload(size=1, block=1, ranks=1, files=1)
    assert work.shard(3, 4) == "shard-0003-0004.bin.tmp"
    published = Workload(size=1, block=1, ranks=1, files=1, publish=True)
    assert published.shard(3, 4) == "shard-0003-0004.bin"


def test_rounds_and_document(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    work = Workload(size=100_000, block=4096, ranks=2, files=2, read=True, verify=True)
    seen: list[int] = []
    found = measure([one, two], work, styles=STYLES, rounds=2, on_bytes=seen.append)
    assert sum(seen) == work.total * 2 * 2 * 2
    assert [(m.directory, m.style) for m in found] == [
        (str(directory), style) for style in STYLES for directory in (one, two)
    ]
    assert list(one.iterdir()) == list(two.iterdir()) == []
    document = report.document(work, 2, found, str(two))
    assert list(document) == ["version", "workload", "results", "ratios"]
    assert document["workload"]["bytes"] == 400_000
    first = document["results"][0]
    assert list(first) == [
        "directory", "role", "style", "write", "read", "latency", "verified", "damaged_files",
    ]  # fmt: skip
    assert [r["role"] for r in document["results"]] == ["subject", "against"] * 2
    assert list(first["write"]) == ["median", "min", "max", "rounds"]
    assert len(first["write"]["rounds"]) == len(first["read"]["rounds"]) == 2
    assert list(first["latency"]) == ["open", "write", "fsync", "close", "read"]
    assert list(first["latency"]["write"]) == ["count", "p50", "p99", "p999", "max"]
    assert first["latency"]["write"]["count"] == 25 * 2 * 2 * 2
    assert first["latency"]["fsync"] is None
    assert first["verified"] is True
    assert set(document["ratios"]) == {"blocking", "async"}
    assert document["ratios"]["async"]["write"] > 0 < document["ratios"]["async"]["read"]


def test_no_ratio_without_another_directory(tmp_path: Path) -> None:
    work = Workload(size=10, block=100, ranks=1, files=1)
    found = measure([tmp_path], work, styles=[Style.BLOCKING], rounds=1)
    document = report.document(work, 1, found, None)
    assert document["ratios"] == {}
    assert document["results"][0]["read"] is None
    assert document["results"][0]["verified"] is None


def test_a_rank_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(size=1 << 20, block=4096, ranks=2, files=1)
    run = runner._run

    def killing(place: Path, style: Style, load: Workload, ranks: list[runner.Rank], on: object):  # type: ignore[no-untyped-def]
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        return run(place, style, load, ranks, lambda _: None)

    monkeypatch.setattr(runner, "_run", killing)
    with pytest.raises(BenchError, match="ended unexpectedly"):
        measure([tmp_path], work, styles=[Style.BLOCKING], rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_trouble_of_the_filesystem_is_told(tmp_path: Path) -> None:
    """The error of a rank becomes the error of the run."""
    work = Workload(size=1 << 20, block=4096, ranks=1, files=1)
    with runner.started(1) as ranks, pytest.raises(BenchError, match="No such file"):
        runner._run(tmp_path / "missing", Style.BLOCKING, work, ranks, lambda _: None)
    with pytest.raises(BenchError, match="is not a directory"):
        measure([tmp_path / "missing"], work, styles=STYLES, rounds=1)


def test_damage_shows_in_the_document(tmp_path: Path) -> None:
    work = Workload(size=10, block=10, ranks=1, files=1, verify=True)
    damaged = Measurement(str(tmp_path), Style.ASYNC, [1.0], [], Timings.empty(), ["b", "a", "a"])
    result = report.document(work, 1, [damaged], None)["results"][0]
    assert (result["verified"], result["damaged_files"]) == (False, ["a", "b"])


def test_what_is_removed_in_the_background_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1, 5, 9, 9, 10])
    monkeypatch.setattr(runner, "_LOOK", 0.0)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bfree=next(free)))
    runner._settle(tmp_path)
    assert next(free) == 10, "it had ended"
