"""git, sqlite3, rsync, tar, cp, pip, fio, stress-ng, dbench on the mount.

Debian packages: git sqlite3 rsync tar fio stress-ng dbench. One that is missing skips its test.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import compare
from tests.support.client import program
from tests.support.work import Work

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("needs")
    missing = [name for name in (marker.args if marker else ()) if not shutil.which(name)]
    if missing:
        pytest.skip(f"not installed: apt-get install {' '.join(missing)}")


def _same_tree(left: Path, right: Path) -> None:
    """Content, modes, times, links."""
    told = program("rsync", "-anic", "--delete", "--omit-dir-times", f"{left}/", f"{right}/")
    assert told.strip() == "", told


def _make_tree(top: Path) -> None:
    """A tree with sizes, modes, times, links and names of all kinds."""
    top.mkdir()
    for number in range(40):
        folder = top / f"d{number % 7}" / f"s{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"f {number} ü"
        file.write_bytes(os.urandom(number * number * 97))
        file.chmod(0o600 | (number % 8) * 0o11)
        os.utime(file, ns=(10**18 + number, 10**18 + number * 1001))
    os.link(top / "d0" / "s0" / "f 0 ü", top / "hard")
    (top / "soft").symlink_to("d1/s1")
    (top / "empty").mkdir()


@pytest.mark.needs("git")
@pytest.mark.either_lane
def test_git(work: Work) -> None:
    """init, commits, branches, clone, gc, fsck."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    repo = work / "repo"

    def run(*words: str, where: Path = repo) -> str:
        return program(*git, *words, cwd=where, env=env)

    repo.mkdir()
    run("init", "-q")
    for number in range(8):
        for name in range(15):
            (repo / f"file{name}").write_text(f"{number} {name}\n" * 200)
        run("add", ".")
        run("commit", "-q", "-m", f"c{number}")
    run("checkout", "-q", "-b", "other", "HEAD~3")
    (repo / "file1").write_text("other\n")
    run("commit", "-q", "-a", "-m", "other")
    run("checkout", "-q", "main")
    run("gc", "-q", "--prune=now")
    run("fsck", "--strict", "--full")
    assert run("status", "--porcelain") == ""
    run("clone", "-q", str(repo), str(work / "clone"), where=work.path)
    assert run("log", "--oneline", where=work / "clone").count("\n") == 8
    run("fsck", "--strict", where=work / "clone")
    work.durable()


@pytest.mark.parametrize("journal", ["wal", "delete", "truncate", "persist"])
@pytest.mark.either_lane
def test_sqlite(work: Work, journal: str) -> None:
    """A database written by two processes; integrity check; readable from the bucket."""

    def fill(path: str, journal: str, who: int) -> int:
        import sqlite3

        with sqlite3.connect(path, timeout=30, isolation_level=None) as db:
            if journal != "wal":  # that one is kept in the file, and changing it takes it alone
                db.execute(f"pragma journal_mode={journal}")
            for number in range(100):
                db.execute("begin immediate")
                db.execute("insert into t values (?, ?, ?)", (who, number, os.urandom(500)))
                db.execute("commit" if number % 10 else "rollback")
        db.close()
        return number

    path = work / "data.db"
    db = sqlite3.connect(str(work.local / "seed.db"))
    db.execute("create table t (who, number, body)")
    db.commit()
    db.close()
    shutil.copy(work.local / "seed.db", path)
    assert program("sqlite3", path, f"pragma journal_mode={journal}").strip() == journal
    runners = [work.client.start(fill, path, journal, who) for who in range(2)]
    for runner in runners:
        runner.result(50)
    check = "pragma integrity_check; select count(*) from t;"
    assert program("sqlite3", path, check).split() == ["ok", "180"]
    program("sqlite3", path, "pragma journal_mode=delete; vacuum;")
    work.durable()
    copy = work.local / "copy.db"
    copy.write_bytes(work.bucket.get("data.db"))
    assert program("sqlite3", copy, check).split() == ["ok", "180"]


@pytest.mark.needs("rsync")
@pytest.mark.parametrize("kind", ["plain", "inplace", "temp-dir"])
@pytest.mark.either_lane
def test_rsync(work: Work, kind: str) -> None:
    """rsync -aHX in and out, again after changes; nothing of its temporary files is published."""
    source = work.local / "src"
    _make_tree(source)
    options = ["-aHX", "--delete"]
    if kind == "inplace":
        options.append("--inplace")
    if kind == "temp-dir":
        (work / "tmp").mkdir()
        options += [f"--temp-dir={work / 'tmp'}"]
    program("rsync", *options, f"{source}/", work / "dst/")
    _same_tree(source, work / "dst")
    changed = source / "d1" / "s1" / "f 22 ü"
    changed.write_bytes(os.urandom(100_000))
    (source / "hard").unlink()
    program("rsync", *options, f"{source}/", work / "dst/")
    _same_tree(source, work / "dst")
    work.durable()
    tree = work.actor()("tree", "dst")
    assert compare.differences(tree, work.bucket.below("dst")) == []


def test_tar(work: Work) -> None:
    """tar --sparse out of and into the mount."""
    source = work.local / "src"
    _make_tree(source)
    with open(source / "sparse", "wb") as file:
        file.seek(5_000_000)
        file.write(b"end")
    for number, (top, name) in enumerate(((work.local, "src"), (work.path, "u0"))):
        archive = work.local / f"{number}.tar"
        program("tar", "--sparse", "-C", top, "-cf", archive, name)
        target = work / f"u{number}"
        target.mkdir()
        program("tar", "-C", target, "--strip-components=1", "-xpf", archive)
        _same_tree(source, target)


def test_cp(work: Work) -> None:
    """cp -a in and out."""
    source = work.local / "src"
    _make_tree(source)
    program("cp", "-a", source, work / "in")
    _same_tree(source, work / "in")
    program("cp", "-a", work / "in", work.local / "out")
    _same_tree(source, work.local / "out")
    assert (work / "in" / "hard").stat().st_nlink == 2


@pytest.mark.timeout(120)
@pytest.mark.either_lane
def test_venv_and_pip(work: Work) -> None:
    """A virtual environment with a package installed into it runs from the mount."""
    program(sys.executable, "-m", "venv", work / "venv", timeout=100)
    package = work.local / "pkg"
    package.mkdir()
    (package / "pyproject.toml").write_text('[project]\nname = "tiny"\nversion = "1"\n')
    (package / "tiny.py").write_text("print('it runs')\n")
    site = program(
        work / "venv/bin/python", "-c", "import site; print(site.getsitepackages()[0])"
    ).strip()
    shutil.copy(package / "tiny.py", site)
    assert program(work / "venv/bin/python", "-m", "tiny").strip() == "it runs"
    assert "pip" in program(work / "venv/bin/python", "-m", "pip", "--version")


FIO = {
    "buffered": ["--ioengine=psync"],
    "direct": ["--ioengine=psync", "--direct=1"],
    "mmap": ["--ioengine=mmap"],
    "async": ["--ioengine=libaio", "--direct=1", "--iodepth=8"],
    "append-fsync": ["--ioengine=psync", "--fsync=16"],
}


@pytest.mark.needs("fio")
@pytest.mark.parametrize("kind", FIO)
@pytest.mark.parametrize("pattern", ["write", "randwrite"])
@pytest.mark.either_lane
def test_fio(work: Work, kind: str, pattern: str) -> None:
    """fio writes and verifies every block."""
    program(
        "fio", "--name=v", f"--directory={work}", f"--rw={pattern}", "--bs=16k", "--size=8m",
        "--numjobs=2", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--minimal",
        *FIO[kind], timeout=50, cwd=work.local,
    )  # fmt: skip
    work.durable()
    for name in os.listdir(work):
        assert work.bucket.get(name) == (work / name).read_bytes()


STRESSORS = (
    "access", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "fallocate", "fcntl",
    "fiemap", "filename", "flock", "fstat", "getdent", "hdd", "iomix", "link", "lockf", "metamix",
    "mknod", "mmap", "open", "rename", "seek", "sendfile", "symlink", "sync-file", "touch",
    "unlink", "utime", "xattr",
)  # fmt: skip


SIZES = (
    "--hdd-bytes=8m", "--iomix-bytes=8m", "--seek-size=8m", "--fallocate-bytes=8m",
    "--mmap-bytes=8m", "--copy-file-bytes=128m", "--sync-file-bytes=8m", "--sendfile-size=8m",
    "--filename-opts=posix", "--oomable",
)  # fmt: skip


@pytest.mark.needs("stress-ng")
@pytest.mark.timeout(150)
@pytest.mark.either_lane
def test_stress_ng(work: Work) -> None:
    """stress-ng's filesystem stressors, all at once for some seconds, with checks."""
    known = program("stress-ng", "--stressors").split()
    todo = [word for name in STRESSORS if name in known for word in (f"--{name}", "1")]
    work.path.chmod(0o777)
    program("stress-ng", *todo, "--timeout", "3s", "--verify", "--temp-path", work.path, *SIZES)
    assert [n for n in os.listdir(work) if not n.startswith("tmp-stress")] == []


@pytest.mark.needs("dbench")
@pytest.mark.either_lane
def test_dbench(work: Work) -> None:
    """dbench with four clients for a few seconds: no operation fails."""
    told = program("dbench", "-D", work.path, "-t", "3", "--skip-cleanup", "4", timeout=50)
    assert "Throughput" in told
    wrong = [line for line in told.splitlines() if "failed" in line and "semaphore" not in line]
    assert wrong == []


def test_python_modules(work: Work) -> None:
    """Things of the standard library that are picky: dbm, shelve, zipfile, tempfile, mailbox."""

    def play(folder: str) -> list[Any]:
        import dbm.dumb
        import mailbox
        import shelve
        import tempfile
        import zipfile

        with dbm.dumb.open(f"{folder}/dbm", "c") as db:
            db["k"] = "v"
        with shelve.open(f"{folder}/shelf", "c") as shelf:
            shelf["x"] = [1, 2]
        with zipfile.ZipFile(f"{folder}/z.zip", "w") as archive:
            archive.writestr("a", "b" * 1000)
        with zipfile.ZipFile(f"{folder}/z.zip", "a") as archive:
            archive.writestr("c", "d")
        box = mailbox.mbox(f"{folder}/mbox")
        box.lock()
        box.add("From: a\n\nhello\n")
        box.flush()
        box.unlock()
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
        with dbm.dumb.open(f"{folder}/dbm", "r") as db, shelve.open(f"{folder}/shelf") as shelf:
            return [db["k"], shelf["x"], zipfile.ZipFile(f"{folder}/z.zip").namelist(), len(box)]

    assert work.run(play, work.path) == [b"v", [1, 2], ["a", "c"], 1]
