"""House rules that no linter knows."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINE_LIMIT = 500
TEXT = {"", ".c", ".h", ".md", ".py", ".service", ".sh", ".sql", ".toml", ".txt", ".yaml", ".yml"}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK|W" r"IP)\b")
MACHINE_PATHS = re.compile(
    r"(?<![\w.~}])/(work|home/(?!u\b)\w+|opt/(?!cachefs\b)\w+|root/(?!cachefs\b|\.)\w+|tmp/dv)\b"
)
OTHER_TALK = re.compile(
    r"\bissue #?\d|\bDESIGN\.md|\bCASES\.md|\bSPEC\.md|as discussed|the brief\b", re.IGNORECASE
)


@cache
def tracked() -> tuple[Path, ...]:
    """The files of the project; where git is not to be had, all that are not hidden."""
    try:
        listed = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names = [ROOT / name for name in listed.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        visible = (p for p in ROOT.rglob("*") if not any(part[0] == "." for part in p.parts[1:]))
        names = [p for p in visible if p.is_file()]
    return tuple(p for p in names if p.suffix in TEXT and p.is_file() and p.name != "LICENSE")


def offences(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def test_there_are_files_to_check() -> None:
    assert ROOT / "cachefs" / "errors.py" in tracked()


def test_files_are_short_enough_to_read() -> None:
    code = [p for p in tracked() if p.suffix in {".py", ".c", ".h", ".sh", ".sql"}]
    lengths = {p: len(p.read_text().splitlines()) for p in code}
    assert not {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n >= LINE_LIMIT}


@pytest.mark.parametrize(
    "pattern", [UNFINISHED, MACHINE_PATHS, OTHER_TALK], ids=["unfinished", "paths", "talk"]
)
def test_the_product_speaks_of_itself_alone(pattern: re.Pattern[str]) -> None:
    assert not offences(pattern)


def test_scripts_can_be_run() -> None:
    for path in tracked():
        if path.read_bytes()[:2] == b"#!":
            assert path.stat().st_mode & 0o111, path
