"""Names: renames in all forms, links, symbolic links, directories, what a name may be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.work import Work

NOREPLACE, EXCHANGE = 1, 2
ONLY_HERE = pytest.mark.skipif("CACHEFS_TEST_LOCAL" in os.environ, reason="no local disk does it")


def test_rename_noreplace(work: Work) -> None:
    """renameat2(NOREPLACE) onto an existing name fails and harms nothing."""
    (work / "a").write_bytes(b"a")
    (work / "b").write_bytes(b"b")
    actor = work.actor()
    with pytest.raises(OSError) as caught:
        actor("renameat2", "a", "b", NOREPLACE)
    assert caught.value.errno in (errno.EEXIST, errno.EINVAL)
    assert [(work / n).read_bytes() for n in "ab"] == [b"a", b"b"]
    if caught.value.errno == errno.EEXIST:
        actor("renameat2", "a", "c", NOREPLACE)
        assert (work / "c").read_bytes() == b"a"


def test_rename_exchange(work: Work) -> None:
    """renameat2(EXCHANGE) swaps two names, or is refused; nothing is lost."""
    (work / "a").write_bytes(b"a")
    (work / "d").mkdir()
    (work / "d" / "inside").write_bytes(b"inside")
    actor = work.actor()
    try:
        actor("renameat2", "a", "d", EXCHANGE)
    except OSError as error:
        assert error.errno == errno.EINVAL
        expected = ["a", "d/inside"]
    else:
        assert (work / "d").read_bytes() == b"a"
        assert (work / "a" / "inside").read_bytes() == b"inside"
        expected = ["a/inside", "d"]
    work.durable()
    assert work.bucket.keys() == expected


def test_rename_over_a_file_and_an_empty_directory(work: Work) -> None:
    (work / "a").write_bytes(b"new")
    (work / "b").write_bytes(b"old")
    os.rename(work / "a", work / "b")
    assert (work / "b").read_bytes() == b"new"
    (work / "d1").mkdir()
    (work / "d1" / "x").write_bytes(b"x")
    (work / "d2").mkdir()
    os.rename(work / "d1", work / "d2")
    assert sorted(os.listdir(work)) == ["b", "d2"]
    work.durable()
    assert work.bucket.keys() == ["b", "d2/x"]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("dir", "full", errno.ENOTEMPTY),
        ("dir", "file", errno.ENOTDIR),
        ("file", "dir", errno.EISDIR),
        ("full", "full/inside/deeper", errno.EINVAL),
        ("missing", "file", errno.ENOENT),
        ("file", "missing/x", errno.ENOENT),
        ("file", "other/x", errno.ENOTDIR),
    ],
)
def test_renames_that_must_fail(work: Work, source: str, target: str, expected: int) -> None:
    (work / "dir").mkdir()
    (work / "full" / "inside").mkdir(parents=True)
    (work / "file").touch()
    (work / "other").touch()
    with pytest.raises(OSError) as caught:
        os.rename(work / source, work / target)
    assert caught.value.errno == expected


def test_symlink_replaced(work: Work) -> None:
    """`last.ckpt` by unlink + symlink, and by a temporary link renamed over it."""
    for step in (1, 2, 3):
        (work / f"step_{step}").write_text(str(step))
    link = work / "last.ckpt"
    link.symlink_to("step_1")
    assert link.read_text() == "1"
    link.unlink()
    link.symlink_to("step_2")
    assert os.readlink(link) == "step_2"
    (work / "next").symlink_to("step_3")
    os.rename(work / "next", link)
    assert link.read_text() == "3"
    work.durable()
    assert work.bucket.get("last.ckpt") == b"step_3"
    assert work.bucket.attributes("last.ckpt").is_link


@pytest.mark.parametrize(
    "target", ["../up/../down", "/abs/olute", "ünïcode", "x" * 3000, " sp ace "]
)
def test_readlink_is_verbatim(work: Work, target: str) -> None:
    (work / "l").symlink_to(target)
    assert os.readlink(work / "l") == target
    assert (work / "l").lstat().st_size == len(target.encode())


def test_symlink_to_a_directory(work: Work) -> None:
    (work / "step_1").mkdir()
    (work / "step_1" / "model").write_bytes(b"m")
    (work / "latest").symlink_to("step_1")
    assert os.listdir(work / "latest") == ["model"]
    (work / "latest" / "more").write_bytes(b"n")
    assert sorted(os.listdir(work / "step_1")) == ["model", "more"]
    work.durable()
    assert work.bucket.keys() == ["latest", "step_1/model", "step_1/more"]


def test_hard_link_shares_content(work: Work) -> None:
    """link(a, b), then write through a: b shows it; both are objects."""
    (work / "a").write_bytes(b"one")
    os.link(work / "a", work / "b")
    assert (work / "a").stat().st_nlink == 2
    assert (work / "a").stat().st_ino == (work / "b").stat().st_ino
    with open(work / "a", "ab") as file:
        file.write(b",two")
    assert (work / "b").read_bytes() == b"one,two"
    work.durable()
    assert work.bucket.keys() == ["a", "b"]
    assert work.bucket.get("a") == work.bucket.get("b") == b"one,two"
    os.unlink(work / "a")
    assert (work / "b").stat().st_nlink == 1
    work.durable()
    assert work.bucket.keys() == ["b"]


def test_hard_link_of_a_directory_is_refused(work: Work) -> None:
    (work / "d").mkdir()
    with pytest.raises(PermissionError):
        os.link(work / "d", work / "e")


def test_directories(work: Work) -> None:
    """mkdir, rmdir, and what they refuse; an empty directory survives in the bucket."""
    (work / "d").mkdir(mode=0o750)
    with pytest.raises(FileExistsError):
        (work / "d").mkdir()
    (work / "d" / "x").touch()
    with pytest.raises(OSError) as caught:
        (work / "d").rmdir()
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(NotADirectoryError):
        (work / "d" / "x").rmdir()
    with pytest.raises(IsADirectoryError):
        (work / "d").unlink()
    (work / "d" / "x").unlink()
    work.durable()
    assert work.bucket.keys() == ["d/"]
    (work / "d").rmdir()
    work.durable()
    assert work.bucket.keys() == []


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "ünïcödé",
        "тест",
        "a\nb",
        "100%",
        "#frag?x=1&y=2",
        "'\"`$",
        "-rf",
        "~",
        "é" * 120,
    ],
)
def test_names_of_all_kinds(work: Work, name: str) -> None:
    """Any UTF-8 name works locally and is the key, byte for byte."""
    (work / name).write_text(name)
    assert os.listdir(work) == [name]
    work.durable()
    assert work.bucket.keys() == [name]
    assert work.bucket.get(name) == name.encode()


@ONLY_HERE
def test_names_that_cannot_be_keys(work: Work) -> None:
    """Not UTF-8: EILSEQ when created, ENOENT when looked up; too long: ENAMETOOLONG."""
    bad = os.fsencode(work.path) + b"/\xff\xfe"
    with pytest.raises(OSError) as caught:
        os.close(os.open(bad, os.O_CREAT | os.O_WRONLY))
    assert caught.value.errno == errno.EILSEQ
    with pytest.raises(OSError) as caught:
        os.mkdir(bad)
    assert caught.value.errno == errno.EILSEQ
    with pytest.raises(FileNotFoundError):
        os.stat(bad)


def test_long_names(work: Work) -> None:
    """255 bytes are fine, 256 are too long, to make and to look up."""
    (work / ("x" * 255)).touch()
    for attempt in (Path.touch, Path.stat, Path.mkdir, Path.unlink):
        with pytest.raises(OSError) as caught:
            attempt(work / ("x" * 256))
        assert caught.value.errno == errno.ENAMETOOLONG, attempt


@ONLY_HERE
def test_keys_beyond_the_limit(work: Work) -> None:
    """A path whose key would pass 1,024 bytes: ENAMETOOLONG at the call, also by a rename above."""
    deep = work.path
    for _ in range(4):
        deep = deep / ("d" * 200)
        deep.mkdir()
    (deep / "fits").touch()
    with pytest.raises(OSError) as caught:
        (deep / ("x" * 250)).touch()
    assert caught.value.errno == errno.ENAMETOOLONG
    (work / "p").mkdir()
    (work / "p" / "q").mkdir()
    os.rename(work / ("d" * 200), work / "p" / "q" / "moved")  # shorter: fine
    (work / "wide").mkdir()
    (work / "wide" / ("w" * 240)).mkdir()
    with pytest.raises(OSError) as caught:
        os.rename(work / "p" / "q" / "moved", work / "wide" / ("w" * 240) / ("m" * 200))
    assert caught.value.errno == errno.ENAMETOOLONG
    assert (work / "p" / "q" / "moved").is_dir()


@ONLY_HERE
def test_reserved_names_are_hidden(work: Work) -> None:
    """The product's own keys do not show up in the mount and cannot be made there."""
    root = work.mount.path
    assert ".cachefs" not in os.listdir(root)
    with pytest.raises(FileNotFoundError):
        os.stat(root / ".cachefs" / "id")
    with pytest.raises(OSError) as caught:
        (root / ".cachefs").mkdir()
    assert caught.value.errno in (errno.EPERM, errno.EACCES, errno.EINVAL, errno.EEXIST)


@pytest.mark.either_lane
@pytest.mark.timeout(120)
def test_readdir_while_entries_change(work: Work) -> None:
    """A listing in progress neither skips nor doubles entries that stay."""
    for number in range(1000):
        os.close(os.open(work / f"stay{number}", os.O_CREAT | os.O_WRONLY))

    def walk(folder: str) -> list[str]:
        seen: list[str] = []
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                seen.append(entry.name)
                if count % 20 == 0:
                    Path(folder, f"new{count}").touch()
                    if count > 100:
                        os.unlink(os.path.join(folder, f"new{count - 100}"))
        return seen

    seen = [name for name in work.run(walk, work.path) if name.startswith("stay")]
    assert len(seen) == len(set(seen)) == 1000


@pytest.mark.slow
@pytest.mark.either_lane
@pytest.mark.timeout(120)
def test_create_and_list_many(work: Work) -> None:
    """A thousand entries (under names that are not uploaded); a second listing and removal of all
    see each once."""
    names = {f"f{number:05d}.tmp" for number in range(1000)}
    for name in names:
        os.mknod(work / name)
    assert set(os.listdir(work)) == names
    work.clear()
    assert os.listdir(work) == []


def _rmtree(path: str) -> str:
    """Remove a tree as two trainers' ranks do at once; missing entries are fine, no other error."""
    import shutil

    strange: list[str] = []

    def note(_function: object, _path: str, info: tuple[object, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            strange.append(repr(info[1]))

    shutil.rmtree(path, onerror=note)
    return ";".join(strange)


def test_two_processes_remove_one_tree(work: Work) -> None:
    """The loser of each unlink gets a plain ENOENT; nothing comes back to life."""
    top = work / "checkpoint-100"
    for sub in range(10):
        (top / f"d{sub}").mkdir(parents=True)
        for number in range(20):
            (top / f"d{sub}" / f"f{number}").write_bytes(b"x")
    runners = [work.client.start(_rmtree, top) for _ in range(2)]
    told = [runner.result() for runner in runners]
    # rmdir of a directory that the other is still emptying is the one other thing that can happen.
    assert all("ENOTEMPTY" in t or "Errno 39" in t or not t for t in told), told
    work.run(_rmtree, top)
    assert not top.exists()
    work.durable()
    assert work.bucket.keys() == []


def test_two_processes_rename_one_file(work: Work) -> None:
    """Exactly one wins, the other gets ENOENT."""

    def contend(source: str, target: str, rounds: int) -> int:
        won = 0
        for number in range(rounds):
            path = f"{source}{number}"
            while not os.path.exists(path + ".go"):
                pass
            try:
                os.rename(path, f"{target}{number}")
                won += 1
            except FileNotFoundError:
                pass
        return won

    rounds = 50
    for number in range(rounds):
        (work / f"t{number}").write_bytes(b"temp")
    runners = [
        work.client.start(contend, str(work / "t"), str(work / f"{who}-"), rounds) for who in "ab"
    ]
    for number in range(rounds):
        (work / f"t{number}.go").touch()
    assert sum(runner.result() for runner in runners) == rounds
    names = [n for n in os.listdir(work) if not n.endswith(".go")]
    assert len(names) == rounds


def test_file_becomes_directory_at_once(work: Work) -> None:
    """rm foo; mkdir foo; write foo/bar: the bucket ends with foo/bar only."""
    (work / "foo").write_bytes(b"file")
    work.durable()
    (work / "foo").unlink()
    (work / "foo").mkdir()
    (work / "foo" / "bar").write_bytes(b"inside")
    work.durable()
    assert work.bucket.keys() == ["foo/bar"]


def test_directory_becomes_file_at_once(work: Work) -> None:
    (work / "foo").mkdir()
    (work / "foo" / "bar").write_bytes(b"inside")
    work.durable()
    (work / "foo" / "bar").unlink()
    (work / "foo").rmdir()
    (work / "foo").write_bytes(b"file")
    work.durable()
    assert work.bucket.keys() == ["foo"]
    assert work.bucket.get("foo") == b"file"


def test_removed_before_it_was_uploaded(work: Work) -> None:
    """mkdir old; touch old/f; mv old new; rm -rf new: no object, now or later."""
    (work / "old").mkdir()
    (work / "old" / "f").touch()
    os.rename(work / "old", work / "new")
    work.run(_rmtree, work / "new")
    work.durable()
    assert work.bucket.keys() == []
