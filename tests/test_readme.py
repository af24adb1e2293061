"""README.md agrees with the code. `python -m tests.test_readme` writes its tables anew."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cachefs.cli.command import VERBS
from cachefs.config import settings, units
from cachefs.config.settings import Settings
from cachefs.observe.metrics import SPECS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
COMPUTED = {
    "store.url": "(required)",
    "cache.dirs": "one below `/var/cache/cachefs`",
    "flush.movers": "`auto`",
    "mount.umask": "`0o022`",
    "mount.uid": "who mounts",
    "mount.gid": "who mounts",
    "node.id": "host name",
}
"""Defaults that depend on the machine, or read better in another form."""


def meanings() -> dict[tuple[str, str], str]:
    """(class, key) -> the text below the key. Read from the source: asking the models for it would
    cost every start of every process some milliseconds."""
    found = {}
    for item in ast.parse(inspect.getsource(settings)).body:
        if isinstance(item, ast.ClassDef):
            for key, text in pairwise(item.body):
                if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(text.value, ast.Constant)
                    found[item.name, ast.unparse(key.target)] = str(text.value.value)
    return found


def settings_rows() -> Iterator[str]:
    texts = meanings()
    for section, outer in Settings.model_fields.items():
        model = outer.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key, field in model.model_fields.items():
            name = f"{section}.{key}"
            default = COMPUTED.get(name) or default_text(field)
            meaning = " ".join(texts[model.__name__, key].split()).replace("None:", "otherwise")
            yield f"| `{name}` | {default} | {meaning} |"


def default_text(field: FieldInfo) -> str:
    value: Any = field.default
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "(built in)"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    parsers = [getattr(item, "func", None) for item in field.metadata]
    if units.parse_size in parsers:
        return f"`{in_units(value, {'GiB': 1 << 30, 'MiB': 1 << 20, 'KiB': 1 << 10})}`"
    if units.parse_duration in parsers:
        return f"`{in_units(value, {'h': 3600, 'min': 60, 's': 1, 'ms': 0.001})}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def in_units(value: float, sizes: dict[str, float]) -> str:
    unit = next(name for name, size in sizes.items() if value >= size and value % size == 0)
    return f"{value / sizes[unit]:.0f}{unit}"


def metric_rows() -> Iterator[str]:
    for spec in SPECS.values():
        labels = f"{{{','.join(spec.labels)}}}" if spec.labels else ""
        kind = "counter" if spec.kind == "total" else spec.kind
        yield f"| `{spec.name}{labels}` | {kind} | {spec.meaning} |"


def command_rows() -> Iterator[str]:
    for name, verb in VERBS.items():
        yield f"| `cachefs {name}` | {verb.help} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "command": command_rows,
    "key": settings_rows,
    "metric": metric_rows,
}
"""First column of a table's head -> its rows."""


def with_tables(text: str) -> str:
    """The README with the rows of its generated tables as the code has them."""
    for head, rows in TABLES.items():
        table = re.compile(rf"(^\| {head} \|[^\n]*\n\|[-|]+\|\n)(?:\|[^\n]*\n)*", re.MULTILINE)
        found = list(table.finditer(text))
        assert len(found) == 1, f"README has {len(found)} tables with the head {head!r}"
        match = found[0]
        body = "".join(f"{row}\n" for row in rows())
        text = text[: match.start()] + match[1] + body + text[match.end() :]
    return text


def test_tables_are_what_the_code_says() -> None:
    text = README.read_text()
    assert text == with_tables(text), "run `python -m tests.test_readme`"


def test_every_setting_has_an_effect() -> None:
    sources = [p for p in (ROOT / "cachefs").rglob("*.py") if p.parent.name != "config"]
    code = "\n".join(path.read_text() for path in sources)
    for section, outer in Settings.model_fields.items():
        for key in getattr(outer.annotation, "model_fields", {}):
            assert re.search(rf"\.{key}\b|\"{key}\"", code), f"nothing reads {section}.{key}"


def test_commands_exist() -> None:
    used = re.findall(r"(?:^    |`)cachefs ([a-z]+)", README.read_text(), re.MULTILINE)
    assert set(used) <= VERBS.keys()


def test_metrics_exist() -> None:
    assert set(re.findall(r"`(cachefs_\w+)", README.read_text())) <= SPECS.keys()


def test_settings_exist() -> None:
    sections = "|".join(Settings.model_fields)
    used = re.findall(rf"`(?:-o )?((?:{sections})\.[a-z_]+)\b", README.read_text())
    known = {row.split("`")[1] for row in settings_rows()}
    assert set(used) - {"cachefs.state"} <= known


@pytest.mark.parametrize("path", sorted(set(re.findall(
    r"(?<![\w/.])(?:deploy|tests|systemd|cachefs)/[\w@./-]*\w|\.ci/run", README.read_text()
))))  # fmt: skip
def test_files_that_it_names_exist(path: str) -> None:
    assert (ROOT / path).exists() or not (ROOT / path.split("/")[0]).exists()


def rows_with_tests() -> Iterator[tuple[list[str], str]]:
    """Rows of the tables whose last column names a test: the cells before it, and the test."""
    inside = False
    for line in README.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.endswith("| test |"):
            inside = True
        elif inside and not line.startswith("|--"):
            *cells, test = (cell.strip() for cell in line.strip("|").split("|"))
            yield cells, test


def test_every_row_of_semantics_names_a_test_that_there_is() -> None:
    tests = [test for _, test in rows_with_tests()]
    assert len(tests) > 50
    assert [test for test in tests if not re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", test)] == []
    names = sorted({test.strip("`") for test in tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *names]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_no_behaviour_is_told_twice() -> None:
    told = [cells[0] for cells, _ in rows_with_tests()]
    assert len(told) == len(set(told))


def test_versions_of_frameworks_are_those_that_are_installed() -> None:
    pinned = (ROOT / "tests/frameworks_all.txt").read_text()
    named = [
        found
        for cells, _ in rows_with_tests()
        for found in re.findall(r"\((\S+) (\d[\d.]+)\)$", cells[0])
    ]
    assert len(named) >= 8
    for package, version in named:
        assert re.search(rf"^{re.escape(package)}=={re.escape(version)}\b", pinned, re.MULTILINE)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
