"""Queries whose answers others build on: paths, subtrees, objects, uploads, states."""

from __future__ import annotations

import sqlite3
import stat

import pytest

from cachefs.meta import Meta
from cachefs.meta.rows import (
    GenerationRow,
    InodeRow,
    ObjectRow,
    PartRow,
    UploadRow,
    to_signed,
    to_unsigned,
)

DIRECTORY, FILE = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644
HIGH = (1 << 64) - 5


def add(meta: Meta, parent: int, name: bytes, mode: int = FILE) -> tuple[int, int]:
    """(dentry, inode) of a new entry."""
    ino = meta.inodes.add(InodeRow(0, mode, 0, 0, 1, 0, 0, 0, 0))
    return meta.dentries.add(parent, name, ino), ino


def generation(meta: Meta, state: str, *, ino: int = 2, device: int = 0, used: int = 0) -> int:
    row = GenerationRow(0, ino, device, 1, state, "tracked", 5, None, None, None, HIGH, 0, 0, used)
    return meta.generations.add(row)


def object_of(key: str, dentry: int | None, stale: int = 0) -> ObjectRow:
    return ObjectRow(key, dentry, "etag", 5, HIGH, 1, None, None, 0, stale)


def test_the_longest_path_below_a_directory(meta: Meta) -> None:
    _, top = add(meta, 1, b"top", DIRECTORY)
    assert meta.dentries.longest_below(top) == 0
    _, inner = add(meta, top, "inn\u00e9r".encode(), DIRECTORY)
    add(meta, top, b"0123456")
    assert meta.dentries.longest_below(top) == 7
    add(meta, inner, b"0")
    assert meta.dentries.longest_below(top) == len("inn\u00e9r/0".encode()) == 8
    assert meta.dentries.longest_below(1) == 12


def test_many_entries_at_once(meta: Meta) -> None:
    """More than one query takes, and some that there are not."""
    _, top = add(meta, 1, b"top", DIRECTORY)
    numbers = [add(meta, top, b"%d" % number)[0] for number in range(600)]
    meta.objects.put(object_of("top/7", numbers[7]))
    found = meta.dentries.many([*numbers, 10_000])
    assert list(found) == numbers
    assert found[numbers[9]] == (meta.dentries.by_id(numbers[9]), False, False)
    assert [number for number, (_, _, is_shown) in found.items() if is_shown] == [numbers[7]]
    (entry,) = meta.dentries.of_inode(top)
    assert meta.dentries.many([entry.id]) == {entry.id: (entry, True, False)}


def test_a_piece_of_a_listing_costs_the_same_in_a_large_directory(meta: Meta) -> None:
    """Else listing a directory takes time by the square of its entries."""
    steps = 0
    with meta.transaction():
        for name in range(3000):
            add(meta, 1, b"%d" % name)

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    meta.db.execute("SELECT 1").connection.set_progress_handler(count, 1)
    assert len(meta.inodes.children(1, 5, 10)) == 10
    assert 10 < steps < 1000


@pytest.mark.parametrize("number", [0, 1, (1 << 63) - 1, 1 << 63, HIGH])
def test_unsigned_numbers_come_back(number: int) -> None:
    signed = to_signed(number)
    assert signed is not None and -(1 << 63) <= signed < 1 << 63
    assert to_unsigned(signed) == number


def test_a_path_follows_its_directories(meta: Meta) -> None:
    top, top_ino = add(meta, 1, b"top", DIRECTORY)
    _, below = add(meta, top_ino, b"below", DIRECTORY)
    file, _ = add(meta, below, b"file")
    assert meta.dentries.path_of(file) == b"top/below/file"
    meta.dentries.move(top, 1, b"new")
    assert meta.dentries.path_of(file) == b"new/below/file"


def test_a_path_that_was_rolled_back_is_forgotten(meta: Meta) -> None:
    top, top_ino = add(meta, 1, b"top", DIRECTORY)
    file, _ = add(meta, top_ino, b"file")
    with pytest.raises(KeyError), meta.transaction():
        meta.dentries.move(top, 1, b"new")
        assert meta.dentries.path_of(file) == b"new/file"
        raise KeyError
    assert meta.dentries.path_of(file) == b"top/file"


def test_a_name_is_taken_once(meta: Meta) -> None:
    add(meta, 1, b"name")
    with pytest.raises(sqlite3.IntegrityError):
        meta.dentries.add(1, b"name", 99)


def test_two_names_change_places(meta: Meta) -> None:
    one, _ = add(meta, 1, b"one")
    other, _ = add(meta, 1, b"other")
    rows = meta.dentries.by_id(one), meta.dentries.by_id(other)
    assert rows[0] is not None and rows[1] is not None
    meta.dentries.swap(rows[0], rows[1])
    assert meta.dentries.path_of(one) == b"other"
    assert meta.dentries.path_of(other) == b"one"


def test_all_below_a_directory(meta: Meta) -> None:
    _, top = add(meta, 1, b"top", DIRECTORY)
    inner, inner_ino = add(meta, top, b"inner", DIRECTORY)
    file, file_ino = add(meta, inner_ino, b"file")
    add(meta, 1, b"beside")
    assert set(meta.dentries.below(top)) == {inner, file}
    assert meta.dentries.files_below(top) == [(file, file_ino)]
    assert meta.dentries.is_below(inner_ino, top)
    assert not meta.dentries.is_below(top, inner_ino)


def test_objects_of_a_name_that_goes_belong_to_nobody(meta: Meta) -> None:
    meta.objects.put(object_of("a", 7))
    meta.objects.put(object_of("b", 7, stale=1))
    meta.objects.put(object_of("c", 8))
    assert sorted(meta.objects.forget_dentry(7)) == ["a", "b"]
    assert meta.objects.of_dentry(7) == []
    left = meta.objects.get("a")
    assert left is not None and left.dentry is None and left.crc64 == HIGH


def test_objects_of_all_names_of_a_file(meta: Meta) -> None:
    first, ino = add(meta, 1, b"first")
    second = meta.dentries.add(1, b"second", ino)
    meta.objects.put(object_of("first", first))
    meta.objects.put(object_of("second", second))
    assert {row.key for row in meta.objects.of_inode(ino)} == {"first", "second"}


def test_objects_below_a_prefix(meta: Meta) -> None:
    for key in ("a", "a/b", "a/c/d", "ab", "a\U0010fffe"):
        meta.objects.put(object_of(key, None))
    assert [row.key for row in meta.objects.below("a/")] == ["a/b", "a/c/d"]


def test_an_upload_and_its_parts(meta: Meta) -> None:
    row = UploadRow(0, 3, "key", "id", 10, None, 0)
    parts = [PartRow(0, n, 5 * n - 5, 5 * n, "upload", None, None) for n in (2, 1)]
    meta.uploads.add(row, parts)
    meta.uploads.confirm(row.id, 2, "etag", HIGH)
    assert [(p.number, p.etag, p.crc64) for p in meta.uploads.parts(row.id)] == [
        (1, None, None),
        (2, "etag", HIGH),
    ]
    meta.uploads.disown(row.id)
    assert meta.uploads.of_gen(3) == []
    assert [each.id for each in meta.uploads.all()] == [row.id]
    meta.uploads.remove(row.id)
    assert meta.uploads.all() == [] and meta.uploads.parts(row.id) == []


def test_generations_by_state(meta: Meta) -> None:
    made = {state: generation(meta, state) for state in ("open", "sealed", "held", "durable")}
    assert [row.gen for row in meta.generations.in_states("sealed", "held")] == [
        made["sealed"],
        made["held"],
    ]
    assert [row.gen for row in meta.generations.in_states("open")] == [made["open"]]
    assert meta.generations.pending_totals() == (2, 10)


def test_what_may_be_evicted_goes_by_last_use(meta: Meta) -> None:
    later = generation(meta, "durable", used=9)
    sooner = generation(meta, "durable", used=3)
    generation(meta, "sealed", used=1)
    generation(meta, "durable", used=1, device=1)
    assert [row.gen for row in meta.generations.durable(0, 10)] == [sooner, later]
    meta.generations.touch([(20, sooner)])
    assert [row.gen for row in meta.generations.durable(0, 10)] == [later, sooner]


def test_only_the_present_generation_is_cleared(meta: Meta) -> None:
    _, ino = add(meta, 1, b"file")
    meta.inodes.set_gen(ino, 5)
    meta.inodes.clear_gen(ino, 4)
    row = meta.inodes.get(ino)
    assert row is not None and row.gen == 5
    meta.inodes.clear_gen(ino, 5)
    row = meta.inodes.get(ino)
    assert row is not None and row.gen is None
