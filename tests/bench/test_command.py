"""`cachefs bench` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SMALL = ("--size", "256KiB", "--block", "64KiB", "--rounds", "2")


def bench(*args: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    places = [str(place) for place in (path, REPO) if place]
    return subprocess.run(
        [sys.executable, "-m", "cachefs", "bench", *map(str, args)],
        env={**os.environ, "PYTHONPATH": ":".join(places)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def without_matplotlib(place: Path) -> Path:
    (place / "matplotlib").mkdir(parents=True)
    (place / "matplotlib/__init__.py").write_text("raise ImportError('not here')")
    return place


def test_tables(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    done = bench(tmp_path, "--against", other, *SMALL, "--fsync", "--verify", "--read")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["DIRECTORY", "STYLE", "MEDIAN", "MIN", "MAX"]
    assert lines[1].split()[:3] == [str(tmp_path), "blocking", "write"]
    head = ["DIRECTORY", "STYLE", "CALL", "COUNT", "P50", "P99", "P99.9", "MAX"]
    assert head in [line.split() for line in lines]
    calls = {line.split()[2] for line in lines if line.startswith(str(other))}
    assert {"open", "write", "fsync", "close", "read"} <= calls
    assert sum("of the other directory's median, reads at" in line for line in lines) == 2
    assert sum("every file read back as written" in line for line in lines) == 4


def test_json(tmp_path: Path) -> None:
    done = bench(tmp_path, *SMALL, "--json", "--style", "async", "--ranks", 3)
    document = json.loads(done.stdout)
    assert document["version"] == 1
    assert document["workload"]["ranks"] == 3
    assert [result["style"] for result in document["results"]] == ["async"]
    assert document["results"][0]["latency"]["write"]["count"] == 3 * 2 * 4 * 2


def _on_a_terminal(command: list[str], out: Path) -> str:
    """What a command shows there; its standard output goes to a file."""
    screen, terminal = os.openpty()
    env = {**os.environ, "PYTHONPATH": str(REPO), "TERM": "xterm"}
    with out.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=terminal)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while data := os.read(screen, 1 << 16):
            shown += data
    os.close(screen)
    assert process.wait(60) == 0
    return shown.decode()


def test_files_and_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """The result alone goes to standard output."""
    out = tmp_path / "out"
    words = ["-m", "cachefs", "bench", str(tmp_path), *SMALL, "--files", "3", "--style", "async"]
    shown = _on_a_terminal([sys.executable, *words], out)
    assert "3.0/3.0 MiB" in shown
    rows = [line.split() for line in out.read_text().splitlines()]
    (opened,) = (row for row in rows if row[1:3] == ["async", "open"])
    assert opened[3] == "12", "ranks, files, rounds"


def test_direct_io(tmp_path: Path) -> None:
    done = bench(tmp_path, *SMALL, "--direct", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    assert all(result["verified"] for result in json.loads(done.stdout)["results"])


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    done = bench(tmp_path, *SMALL, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_so_before_it_writes(tmp_path: Path) -> None:
    path = without_matplotlib(tmp_path / "site")
    done = bench(tmp_path, "--size", "1TiB", "--plot", tmp_path / "p.png", path=path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--plot needs matplotlib" in done.stderr and "cachefs[bench]" in done.stderr
    done = bench(tmp_path, *SMALL, path=path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["/nowhere/at/all"], 1, "is not a directory"),
        (["."], 0, ""),
        ([".", "--size", "lots"], 2, "--size"),
        ([".", "--direct", "--size", "5000"], 2, "multiples of 4096"),
        ([".", "--plot", "/nowhere/at/all/p.png"], 2, "--plot"),
        ([".", "--ranks", "0"], 2, "ranks"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = bench(*([*args, *SMALL] if code == 0 else args))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
