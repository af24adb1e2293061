"""Imports point one way: `cli -> daemon -> fuse -> vfs -> {flush.queue, cache, meta} -> model` and
`flush -> {cache, meta, store} -> model`. Read from the source, so that an import inside a function
counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "cachefs"
EVERYBODY = ("config", "errors", "failpoints", "observe.metrics")
"""What every layer but the model may use."""
LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "failpoints": (),
    "model": (),
    "config": ("model",),
    "observe": ("model",),
    "meta": ("model",),
    "cache": ("model",),
    "store": ("model",),
    "flush": ("cache", "meta", "store", "model"),
    "vfs": ("flush.queue", "cache", "meta", "model"),
    "fuse": ("vfs", "flush.queue", "cache", "meta", "model"),
    "tiers": ("flush.queue", "cache", "meta", "model"),
    "daemon": (
        *("tiers", "fuse", "vfs", "flush", "cache", "meta", "store.base", "model", "observe"),
        "supervised",
    ),
    # Never restarted, so it stands on next to nothing.
    "supervisor": ("supervised", "fuse.kernelmount", "observe.runfiles"),
    "supervised": (),
    "demo": ("cli.output", "observe"),
    "fsck": ("cache", "meta", "store.base", "store.crc", "store.transfer", "model"),
    "bench": ("model",),
    "cli": (
        "bench",
        "demo",
        "fsck",
        "observe",
        "supervisor",
        "supervised",
        "fuse.kernelmount",
        "cache",
        "store",
        "model",
    ),
    "__main__": ("cli",),
    "__init__": ("cli.adopting",),
}
"""Layer -> what it may import besides itself and what everybody may."""
STORE_LIBRARIES = {"boto3", "botocore", "awscrt", "s3transfer"}
FACTORY = "store.base"
"""Imports the store that a URL asks for when a mover (or a test) opens it, not before."""
IMPURE = {
    *("aiofiles", "asyncio", "concurrent", "fcntl", "io", "mmap", "multiprocessing", "os"),
    *("pathlib", "pyfuse3", "queue", "select", "selectors", "shutil", "signal", "socket"),
    *("sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "trio", "urllib"),
    *("datetime", "random", "secrets", "time", "uuid", "ctypes", "logging"),
}
"""Modules that do I/O, wait, or know a clock or chance."""


def module_name(path: Path) -> str:
    """`cachefs/vfs/files.py` -> `vfs.files`; a package's `__init__` is the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer(module: str) -> str:
    return module.split(".")[0]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from (other, *runtime_nodes(other))
            continue
        yield child
        yield from runtime_nodes(child)


def named(node: ast.AST) -> list[str]:
    """The modules (or names in them) that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not used here"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def imports(module: str, *, types: bool) -> frozenset[str]:
    """What a module imports, at its head or in a function; `types`: for type checkers, too."""
    nodes = ast.walk(tree(module)) if types else runtime_nodes(tree(module))
    return frozenset(name for node in nodes for name in named(node))


def at_head(module: str) -> set[str]:
    """What importing a module imports, without its functions."""
    return {name for node in tree(module).body for name in named(node)}


def own(name: str) -> str | None:
    """The module of this package that `cachefs.x.y.Name` lies in; None for foreign names."""
    if name.split(".")[0] != "cachefs":
        return None
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in SOURCES:
        parts.pop()
    return ".".join(parts) or "__init__"


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def reachable(start: str) -> set[str]:
    """Every module of this package that running `start` may import, packages' `__init__` too."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        parts = module.split(".")
        waiting += [p for n in range(1, len(parts)) if (p := ".".join(parts[:n])) in SOURCES]
        names = at_head(module) if module == FACTORY else imports(module, types=False)
        waiting += [m for name in names if (m := own(name)) is not None]
    return found


def foreign(modules: set[str]) -> dict[str, str]:
    """Top-level name of each foreign package -> a module that imports it."""
    return {
        name.split(".")[0]: module
        for module in sorted(modules)
        for name in imports(module, types=False)
        if own(name) is None
    }


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer(module) for module in SOURCES} <= LAYERS.keys()
    for path in SOURCES.values():
        assert path.with_name("__init__.py").exists(), f"{path.parent} says nowhere what it is for"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module: str) -> None:
    mine = layer(module)
    allowed = (mine, "__init__", *LAYERS[mine], *(() if mine == "model" else EVERYBODY))
    found = {m for name in imports(module, types=True) if (m := own(name)) is not None}
    wrong = sorted(m for m in found if not within(m, allowed))
    assert not wrong, f"{module} may not import {', '.join(wrong)}"


@pytest.mark.parametrize("module", [m for m in SOURCES if layer(m) == "model"])
def test_the_model_is_pure(module: str) -> None:
    names = {name for name in imports(module, types=False) if not name.startswith("urllib.parse.")}
    used = {name.split(".")[0] for name in names}
    assert not used & IMPURE
    foreign_names = {name for name in used if name not in sys.stdlib_module_names}
    assert foreign_names <= {"cachefs"}
    for node in ast.walk(tree(module)):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await)
        opens = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("open", "print")
        assert not opens


def test_only_stores_and_tools_know_the_store_libraries() -> None:
    users = {m for m in SOURCES if foreign({m}).keys() & STORE_LIBRARIES}
    assert {layer(m) for m in users} <= {"store", "demo", "bench"}


@pytest.mark.parametrize("start", ["daemon", "vfs", "fuse", "flush.queue"])
def test_the_daemon_never_imports_boto3(start: str) -> None:
    found = foreign({m for room in SOURCES if within(room, (start,)) for m in reachable(room)})
    assert not found.keys() & STORE_LIBRARIES, found


def test_the_running_daemon_has_no_boto3() -> None:
    code = "import sys, cachefs.daemon; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert not STORE_LIBRARIES & set(done.stdout.split())


def test_the_running_daemon_has_nothing_for_terminals() -> None:
    """A daemon that takes over is waited for: rich and typer cost it a fifth of its start."""
    code = "import sys, cachefs.daemon.__main__, cachefs.daemon.serve; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert not {"rich", "typer"} & set(done.stdout.split())


def test_the_supervisor_needs_the_standard_library_only() -> None:
    found = foreign(reachable("supervisor")).keys() - {"__future__"}
    assert found <= sys.stdlib_module_names


def test_nobody_imports_the_demonstration_but_its_command() -> None:
    users = {
        m
        for m in SOURCES
        for name in imports(m, types=True)
        if layer(own(name) or "") == "demo" and layer(m) != "demo"
    }
    assert users <= {"cli.demo"}
