"""The effect queue by itself: what becomes pending, what replaces what, and who may go out."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.flush.queue import BLOCKED, EffectQueue, NewFile
from cachefs.meta import Meta
from cachefs.meta.rows import DentryRow, EffectRow, GenerationRow, InodeRow, ObjectRow
from cachefs.model.effects import OrderRules

S = 1_000_000_000
RULES = OrderRules(data_min_size=60)


class Desk:
    """A queue, names, and what the bucket is said to hold."""

    def __init__(self, path: Path) -> None:
        self.now = 1000 * S
        self.meta = Meta(path)
        self.meta.inodes.add(InodeRow(1, stat.S_IFDIR | 0o755, 0, 0, 2, 0, 0, 0, 0))
        self.unreferenced: list[int] = []
        self.queue = self.open()

    def open(self) -> EffectQueue:
        """A queue as the next daemon would have it."""
        queue = EffectQueue(
            self.meta, RULES, settle=1.0, settle_max=10.0, temp_hold=60.0, clock=lambda: self.now
        )
        queue.on_unreferenced = self.unreferenced.append
        return queue

    def entry(self, name: str, parent: int = 1, mode: int = stat.S_IFREG | 0o644) -> DentryRow:
        ino = self.meta.inodes.add(InodeRow(0, mode, 0, 0, 1, 0, 0, 0, 0))
        return DentryRow(
            self.meta.dentries.add(parent, name.encode(), ino), parent, name.encode(), ino
        )

    def content(self, entry: DentryRow, size: int) -> int:
        """A sealed generation of an entry."""
        row = GenerationRow(
            0, entry.ino, 0, 0, "sealed", "tracked", size, None, None, None, None, 0, 0, 0
        )
        gen = self.meta.generations.add(row)
        self.meta.inodes.set_gen(entry.ino, gen)
        return gen

    def new(self, name: str, size: int) -> NewFile:
        """A file that the queue knows nothing of yet."""
        entry = self.entry(name)
        return NewFile(entry, self.content(entry, size), size)

    def seal(self, entry: DentryRow, size: int = 5) -> int:
        """New content of an entry is complete; its generation."""
        gen = self.content(entry, size)
        with self.meta.transaction():
            self.queue.publish(entry, gen, size)
        return gen

    def saved(self, name: str, size: int = 5) -> tuple[DentryRow, int]:
        entry = self.entry(name)
        return entry, self.seal(entry, size)

    def rename(self, entry: DentryRow, name: str, replaced: DentryRow | None = None) -> DentryRow:
        with self.meta.transaction():
            if replaced is not None:
                self.meta.dentries.remove(replaced.id)
            self.meta.dentries.move(entry.id, entry.parent, name.encode())
            moved = DentryRow(entry.id, entry.parent, name.encode(), entry.ino)
            self.queue.renamed(moved, replaced)
        return moved

    def remove(self, entry: DentryRow) -> None:
        with self.meta.transaction():
            self.queue.removed(entry.id)
            self.meta.dentries.remove(entry.id)

    def show(self, effect: EffectRow) -> None:
        """The bucket shows a publish."""
        key = self.queue.target_key(effect)
        assert key is not None
        row = ObjectRow(key, None, f"etag of {effect.id}", 5, None, effect.gen, None, None, 0)
        self.queue.published(effect, row)

    def show_all(self) -> None:
        for effect in list(self.queue.effects.values()):
            self.show(effect)

    def pending(self) -> list[tuple[str, str]]:
        """(kind, key) in order."""
        rows = sorted(self.queue.effects.values(), key=lambda row: (row.end, row.id))
        return [(row.kind, self.queue.target_key(row) or "") for row in rows]

    def free(self) -> list[str]:
        return [self.queue.target_key(row) or "" for row in self.queue.committable()]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "db")
    yield desk
    desk.meta.close()


def test_a_marker_waits_for_what_was_complete_before_it(desk: Desk) -> None:
    desk.saved("model.bin")
    desk.saved("config.json")
    desk.saved("latest")
    assert desk.free() == ["model.bin"]
    desk.show(next(desk.queue.committable()))
    assert desk.free() == ["config.json"]
    desk.show(next(desk.queue.committable()))
    assert desk.free() == ["latest"]


def test_a_rewrite_takes_the_place_of_what_nobody_waits_for(desk: Desk) -> None:
    entry, first = desk.saved("model.bin")
    desk.seal(entry)
    assert desk.pending() == [("publish", "model.bin")]
    assert desk.unreferenced == [first]


def test_a_marker_that_is_rewritten_goes_out_in_both_versions(desk: Desk) -> None:
    entry, _ = desk.saved("latest")
    desk.seal(entry)
    assert desk.pending() == [("publish", "latest")] * 2


def test_what_the_flusher_has_in_hand_is_not_superseded(desk: Desk) -> None:
    entry, _ = desk.saved("model.bin")
    (effect,) = desk.queue.effects
    desk.queue.begin(effect, lambda: None)
    desk.seal(entry)
    assert desk.pending() == [("publish", "model.bin")] * 2
    assert desk.free() == []


def test_a_file_that_is_removed_before_it_was_shown_leaves_nothing(desk: Desk) -> None:
    entry, gen = desk.saved("model.bin")
    desk.remove(entry)
    assert desk.pending() == []
    assert desk.unreferenced == [gen]


def test_removing_what_is_shown_deletes_its_key(desk: Desk) -> None:
    entry, _ = desk.saved("model.bin")
    desk.show_all()
    desk.remove(entry)
    assert desk.pending() == [("unpublish", "model.bin")]


def test_removing_what_is_in_flight_cancels_it_and_deletes_what_came_of_it(desk: Desk) -> None:
    entry, _ = desk.saved("model.bin")
    (effect,) = desk.queue.effects.values()
    cancelled: list[bool] = []
    desk.queue.begin(effect.id, lambda: cancelled.append(True))
    desk.remove(entry)
    assert cancelled == [True]
    row = ObjectRow("model.bin", None, "etag", 5, None, effect.gen, None, None, 0)
    desk.queue.published(effect, row)
    assert desk.pending() == [("unpublish", "model.bin")]


def test_a_rename_before_the_upload_costs_nothing(desk: Desk) -> None:
    entry, _ = desk.saved("model.tmp")
    assert desk.free() == []
    desk.rename(entry, "model.bin")
    assert desk.pending() == [("publish", "model.bin")]
    assert desk.free() == ["model.bin"]


def test_a_rename_of_what_is_shown_copies_and_then_deletes(desk: Desk) -> None:
    entry, _ = desk.saved("old.bin")
    desk.show_all()
    desk.rename(entry, "new.bin")
    assert desk.pending() == [("relocate", "new.bin"), ("unpublish", "old.bin")]
    assert desk.free() == ["new.bin"]


def test_there_and_back_leaves_nothing_to_do(desk: Desk) -> None:
    entry, _ = desk.saved("old.bin")
    desk.show_all()
    desk.rename(desk.rename(entry, "new.bin"), "old.bin")
    assert desk.pending() == []


def test_a_file_renamed_over_another_overwrites_its_object(desk: Desk) -> None:
    target, _ = desk.saved("config.json")
    desk.show_all()
    moved, _ = desk.saved("config.json.new")
    desk.rename(moved, "config.json", replaced=target)
    assert desk.pending() == [("publish", "config.json")]
    known = desk.meta.objects.get("config.json")
    assert known is not None and known.dentry == moved.id and known.stale


def test_a_deletion_under_way_is_not_asked_for_again(desk: Desk) -> None:
    entry, _ = desk.saved("a.txt")
    desk.show_all()
    moved = desk.rename(entry, "b.txt")
    deletion = desk.queue.unpublish_of("a.txt")
    assert deletion is not None
    desk.queue.begin(deletion.id, lambda: None)
    desk.rename(moved, "c.txt")
    assert desk.pending().count(("unpublish", "a.txt")) == 1


def test_what_a_living_name_shows_is_not_to_be_deleted(desk: Desk) -> None:
    entry, _ = desk.saved("a.txt")
    desk.show_all()
    assert desk.queue.is_shown("a.txt")
    desk.rename(entry, "b.txt")
    assert not desk.queue.is_shown("a.txt")
    assert not desk.queue.is_shown("b.txt")


def test_a_new_file_waits_until_its_key_was_copied_away(desk: Desk) -> None:
    entry, _ = desk.saved("a.bin")
    desk.show_all()
    desk.rename(entry, "b.bin")
    desk.saved("a.bin")
    assert desk.free() == ["b.bin"]


def test_a_file_does_not_wait_for_what_went_from_its_key_to_a_temporary_name(desk: Desk) -> None:
    entry, _ = desk.saved("a.bin")
    desk.show_all()
    desk.rename(entry, "b.tmp")
    assert desk.free() == []
    desk.saved("a.bin")
    assert desk.free() == ["a.bin"]


def test_temporary_names_go_out_when_they_have_been_held_for_long(desk: Desk) -> None:
    desk.saved("model.tmp")
    desk.queue.release_expired()
    assert desk.free() == []
    desk.now += 61 * S
    desk.queue.release_expired()
    assert desk.free() == ["model.tmp"]


def test_the_next_daemon_has_the_same_queue(desk: Desk) -> None:
    shown, _ = desk.saved("old.bin")
    desk.show_all()
    desk.rename(shown, "new.bin")
    desk.saved("config.json")
    desk.saved("latest")
    before = desk.pending(), desk.free(), desk.queue.next_number
    desk.queue = desk.open()
    assert (desk.pending(), desk.free(), desk.queue.next_number) == before


NEW = ("gone", "model.bin", "config.json", "latest", "kept.tmp", "a.log", "shown")


@pytest.mark.parametrize("busy", [False, True], ids=["unshown", "shown-before"])
def test_many_new_files_are_queued_as_each_in_its_turn(tmp_path: Path, busy: bool) -> None:
    """Those among them, too, whose names the bucket knows, or is to delete."""
    seen = []
    for way in ("one", "many"):
        desk = Desk(tmp_path / way)
        row = ObjectRow("shown", None, "etag", 5, None, None, None, None, 0)
        desk.meta.objects.put(row)
        desk.meta.objects.put(replace(row, key="config.json", etag=""))
        if busy:
            entry, _ = desk.saved("gone")
            desk.show_all()
            desk.remove(entry)
        files = [desk.new(name, size) for size, name in enumerate(NEW, 57)]
        with desk.meta.transaction():
            if way == "many":
                desk.queue.publish_new(files)
            else:
                for each in files:
                    desk.queue.publish(each.dentry, each.gen, each.size)
        lines = desk.pending(), desk.free(), desk.queue.next_number
        seen.append((lines, desk.meta.effects.all(), list(desk.queue.effects.values())))
        desk.queue = desk.open()
        assert (desk.pending(), desk.free(), desk.queue.next_number) == lines
        desk.meta.close()
    assert seen[0] == seen[1]


def test_a_rollback_takes_back_what_was_queued(desk: Desk) -> None:
    entry, _ = desk.saved("model.bin")
    before = desk.pending(), desk.free()
    with pytest.raises(KeyError), desk.meta.transaction():
        desk.queue.removed(entry.id)
        desk.queue.publish(desk.entry("other.bin"), None, 0)
        raise KeyError
    assert (desk.pending(), desk.free()) == before


def test_settling_counts_from_the_last_seal_but_not_for_ever(desk: Desk) -> None:
    entry, _ = desk.saved("model.bin")
    began = desk.now
    for _ in range(20):
        desk.now += S * 9 // 10
        desk.seal(entry)
    (effect,) = desk.queue.effects.values()
    assert desk.queue.settled_at(effect) == began + 10 * S
    desk.queue.hurry([effect.id])
    assert desk.queue.settled_at(effect) == 0


def test_who_is_in_a_hurry_takes_what_it_waits_for_along(desk: Desk) -> None:
    desk.saved("model.bin")
    _, gen = desk.saved("latest")
    desk.saved("later.bin")
    desk.queue.hurry([effect.id for effect in desk.queue.of_gen(gen)])
    rows = {desk.queue.target_key(row): row for row in desk.queue.effects.values()}
    assert desk.queue.settled_at(rows["model.bin"]) == 0
    assert desk.queue.settled_at(rows["later.bin"]) > 0


def test_behind_a_refused_file_its_marker_waits(desk: Desk) -> None:
    desk.saved("model.bin")
    _, gen = desk.saved("latest")
    (effect,) = (row for row in desk.queue.effects.values() if row.gen != gen)
    desk.queue.set_state(effect, BLOCKED, "no")
    assert desk.free() == []
    (marker,) = desk.queue.of_gen(gen)
    assert desk.queue.blockers(marker.id) == [effect]
    assert not desk.queue.has_work()


def test_an_older_pointer_goes_when_what_it_names_is_deleted(desk: Desk) -> None:
    shard, _ = desk.saved("shard.bin")
    pointer, _ = desk.saved("latest")
    desk.saved("other.bin")
    newest = desk.seal(pointer)
    desk.remove(shard)
    assert desk.pending() == [("publish", "other.bin"), ("publish", "latest")]
    assert len(desk.queue.of_gen(newest)) == 1


def test_an_older_pointer_stays_for_a_marker_beside_it(desk: Desk) -> None:
    shard, _ = desk.saved("shard.bin")
    pointer, _ = desk.saved("latest")
    desk.saved("model.index.json")
    desk.seal(pointer)
    desk.remove(shard)
    assert desk.pending() == [
        ("publish", "latest"),
        ("publish", "model.index.json"),
        ("publish", "latest"),
    ]


def test_older_pointers_stay_for_each_other(desk: Desk) -> None:
    """Two that are rewritten in turn: each stands for the other as it was then."""
    shard, _ = desk.saved("shard.bin")
    index, _ = desk.saved("model.index.json")
    pointer, _ = desk.saved("latest")
    desk.seal(index)
    desk.seal(pointer)
    desk.remove(shard)
    both = [("publish", "model.index.json"), ("publish", "latest")]
    assert desk.pending() == both + both


def test_older_pointers_go_together(desk: Desk) -> None:
    """The one stands for the other in its directory, but its older version goes as well."""
    shard, _ = desk.saved("shard.bin")
    step = desk.entry("step", mode=stat.S_IFDIR | 0o755)
    index = desk.entry("model.index.json", step.ino)
    pointer = desk.entry("latest")
    for entry in (index, pointer, index, pointer):
        desk.seal(entry)
    desk.remove(shard)
    assert desk.pending() == [("publish", "step/model.index.json"), ("publish", "latest")]


def test_what_was_read_anew_after_a_rollback_is_what_counts(desk: Desk) -> None:
    """A full disk took the first try back: the second one blocks the effect, here and on the disk,
    so that it is revived in time and not forgotten."""
    desk.saved("f")
    (effect,) = desk.queue.effects.values()

    def fail() -> None:
        with desk.meta.transaction():
            desk.queue.set_state(effect, BLOCKED, "first")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    desk.queue.set_state(effect, BLOCKED, "second")
    for queue in (desk.queue, desk.open()):
        assert [(each.state, each.error) for each in queue.effects.values()] == [
            (BLOCKED, "second")
        ]


@pytest.mark.parametrize(("shown", "most"), [(False, 7), (True, 10)], ids=["pending", "shown"])
def test_renaming_a_directory_asks_little_for_each_entry(
    desk: Desk, shown: bool, most: int
) -> None:
    """All else waits while one of a hundred thousand entries is renamed."""
    folder, count = desk.entry("old", mode=stat.S_IFDIR | 0o755), 200
    for number in range(count):
        entry = desk.entry(f"f{number}", folder.ino)
        if shown:
            row = ObjectRow(f"old/f{number}", entry.id, "etag", 5, None, None, None, None, 0)
            desk.meta.objects.put(row)
        else:
            desk.seal(entry)
    asked: list[str] = []
    desk.meta.db._db.set_trace_callback(asked.append)
    desk.rename(folder, "new")
    desk.meta.db._db.set_trace_callback(None)
    assert len(desk.queue.effects) == (2 if shown else 1) * count
    assert len(asked) <= most * count
