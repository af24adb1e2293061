"""What `pip install` builds: everything that runs, with a C compiler and without."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made of what is in the checkout now."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    ignored = ["--exclude=.git", "--exclude=.venv", "--exclude=*.so", "--exclude=.*_cache"]
    source.mkdir()
    packed = subprocess.run(
        ["tar", "-c", *ignored, "."], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x"], cwd=source, input=packed.stdout, check=True)
    build = (
        "from setuptools.build_meta import build_sdist as b, get_requires_for_build_sdist as r;"
        "import sys; b(sys.argv[1])"
    )
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder / "build")]
    subprocess.run([*pip, "setuptools>=77"], check=True)
    subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=source, check=True, capture_output=True, env=with_setuptools(folder),
    )  # fmt: skip
    (found,) = folder.glob("cachefs-*.tar.gz")
    return found


def with_setuptools(folder: Path) -> dict[str, str]:
    """The environment that has what the build needs, without another copy of it."""
    return {**os.environ, "PYTHONPATH": str(folder / "build")}


def contents(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def wheel_of(sdist: Path, folder: Path, *words: str, env: dict[str, str]) -> set[str]:
    """The names in a wheel built from the source distribution as pip does it."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *words]
    subprocess.run([*pip, "-w", str(folder), str(sdist)], check=True, env=env, cwd=folder)
    (wheel,) = folder.glob("cachefs-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


EXTENSIONS = ("cachefs/fuse/_tap.", "cachefs/meta/_walvfs.")


def extensions(names: set[str]) -> list[str]:
    return [
        each
        for each in EXTENSIONS
        for name in names
        if name.startswith(each) and name.endswith(".so")
    ]


def test_source_distribution_holds_all_that_the_build_needs(sdist: Path) -> None:
    names = contents(sdist)
    found = [*ROOT.glob("cachefs/fuse/_tap*.[ch]"), *ROOT.glob("cachefs/meta/_wal*.[ch]")]
    native = {path.relative_to(ROOT).as_posix() for path in found}
    assert len(native) > 10
    assert native | {"setup.py", "LICENSE", "README.md", "constraints.txt"} <= names
    assert {"deploy/quickstart.sh", "systemd/cachefs@.service"} <= names


def test_wheel_holds_all_that_runs(sdist: Path, tmp_path: Path) -> None:
    names = wheel_of(sdist, tmp_path, env=dict(os.environ))
    assert len(extensions(names)) == len(EXTENSIONS)
    source = sdist.parent / "source"
    kinds = {".py", ".pyi", ".sql", ".html", ".typed"}
    files = [path for path in (source / "cachefs").rglob("*") if path.suffix in kinds]
    needed = {path.relative_to(source).as_posix() for path in files}
    needed |= {"cachefs/errors.py", "cachefs/meta/schema.sql", "cachefs/py.typed"}
    assert not needed - names
    assert not {name for name in names if name.startswith("tests/")}


def test_without_a_compiler_the_install_goes_on_without_extensions(
    sdist: Path, tmp_path: Path
) -> None:
    env = {**with_setuptools(sdist.parent), "CC": "/bin/false"}
    names = wheel_of(sdist, tmp_path, "--no-build-isolation", env=env)
    assert not extensions(names)
    assert "cachefs/errors.py" in names
